"""What each method costs beside FedAvg on the phantom: CPU seconds and bytes per round, as ratios.

    python benchmarks/method_costs.py              # all methods
    python benchmarks/method_costs.py ditto fedper # these alone; the figures of all others stay

`compute` is a round without its evaluation; `evaluation` is that evaluation, after every round, with whatever a method
does to make personal models of the global one first (FedBABU, FedETF and Per-FedAvg adapt there: in a run with
`evaluation.every = 1` they pay this in every round, unless `evaluation.view = "global"`); `traffic` is what sites send
and receive in a round.

Each method runs right after a run of FedAvg, and CPU time is counted instead of wall time, so that a busy machine
disturbs the ratios little; rounds leave no checkpoints. Writes `src/equipoise/methods/costs.json`, which
`equipoise methods` shows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from equipoise.data import load_federation
from equipoise.engine.disclosure import POOLED
from equipoise.engine.loop import Run
from equipoise.engine.runs import make_config
from equipoise.methods import COSTS, get_method, method_names

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "all methods, and it writes into the package"

ROUNDS = 4
SETTINGS = (
    f"train.rounds={ROUNDS}",
    "train.epochs=3",  # fewer, and PRR would not take all of its steps
    "train.batch_size=16",
    "data.phantom.images=400",
    "data.phantom.size=32",
    "evaluation.trained=false",
    "evaluation.every=1",
    f"evaluation.first_round={ROUNDS}",  # a selected round is checkpointed, whatever checkpoint.every says
    "checkpoint.every=100",
)


@dataclass(frozen=True)
class Cost:
    """One round: CPU seconds of the round and of its evaluation, and bytes sent and received."""

    compute: float
    evaluation: float
    traffic: float


class Clock:
    """Adds up the CPU seconds and bytes of rounds but the first, which also warms up, and the last, after which a
    server has nothing to prepare (FedBM)."""

    def __init__(self) -> None:
        self.compute, self.evaluation, self.bytes, self.rounds = 0.0, 0.0, 0.0, 0
        self._round_ended, self._measured = 0.0, 0.0

    def event(self, event: str, **fields: object) -> None:
        """A round ends with its event, and its evaluation with the last of the events that tell scores."""
        now = time.process_time()
        if event == "evaluation":
            self._measured = now
        if event == "round":
            if fields["round"] not in (1, ROUNDS):
                sites: dict[str, dict[str, float]] = fields["sites"]  # type: ignore[assignment]
                self.evaluation += self._measured - self._round_ended
                self.compute += now - self._measured
                self.bytes += sum(facts["sent"] + facts["received"] for facts in sites.values())
                self.rounds += 1
            self._round_ended = now

    def cost(self) -> Cost:
        """The mean over rounds."""
        return Cost(self.compute / self.rounds, self.evaluation / self.rounds, self.bytes / self.rounds)


def cost(method: str, settings: Sequence[str] = ()) -> Cost:
    """What one round of a method costs."""
    config = make_config(None, [*SETTINGS, *settings], method=method)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        Run(config, get_method(method), load_federation(config.data, 1), Path(folder), [clock]).execute()
    return clock.cost()


def ratios(method: str) -> dict[str, float]:
    """A method's costs beside FedAvg's; the lesser of two measurements each, for others only add time."""
    if method == "fedavg":  # beside itself; what two measurements differ by is noise
        return dict.fromkeys(("compute", "evaluation", "traffic"), 1.0)
    kinds = ("compute", "evaluation") if get_method(method).pooled else ("compute", "evaluation", "traffic")
    base, own = zip(*((cost("fedavg"), cost(method, get_method(method).options.in_short)) for _ in range(2)))
    return {kind: round(min(getattr(c, kind) for c in own) / min(getattr(c, kind) for c in base), 2) for kind in kinds}


def main() -> None:
    """Measure methods and write the file."""
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    known = json.loads(COSTS.read_text(encoding="utf-8")) if asked else {}
    costs = {method: known[method] for method in method_names() if method in known}
    for method in asked or method_names():
        costs[method] = ratios(method)
        print(f"{method:<12}", *(f"{kind} x{ratio:5.2f}  " for kind, ratio in costs[method].items()), flush=True)
    COSTS.write_text(json.dumps(dict(sorted(costs.items())), indent=1) + "\n")
    write_page(costs)


def write_page(costs: Mapping[str, Mapping[str, float]]) -> None:
    """`docs/methods.md`: what each method changes, sends and costs."""
    lines = [
        "# The methods",
        "",
        "Written by `python benchmarks/method_costs.py`. Compute (CPU seconds of a round's local training and server",
        "step), traffic (bytes both ways) and evaluation (CPU seconds, with its adaptation) are relative to FedAvg",
        "on the phantom, in rounds of three epochs. FedBM trains its generator for 20 steps in every round here, and",
        "CLIMB steps its dual variables. Scores of all methods on the phantom: [phantom-all.md](phantom-all.md).",
        "",
        "| method | paper | changes | sends | compute | traffic | evaluation |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for name in method_names():
        method, cost = get_method(name), costs.get(name, {})
        sheet = POOLED if method.pooled else method.client.discloses
        sent = ", ".join(dict.fromkeys(entry for entries in sheet.values() for entry in entries))
        shown = (f"x{cost[kind]:.2f}" if kind in cost else "-" for kind in ("compute", "traffic", "evaluation"))
        figures = " | ".join(shown)
        lines.append(f"| `{name}` | {method.paper} | {method.changes} | {sent or 'nothing'} | {figures} |")
    page = Path(__file__).parents[1] / "docs" / "methods.md"
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
