"""What each method costs beside FedAvg on the phantom: CPU seconds and bytes per round, as ratios.

    python benchmarks/method_costs.py

Each method runs right after a run of FedAvg, and CPU time is counted instead of wall time, so that a busy machine
disturbs the ratios little. Writes `src/equipoise/methods/costs.json`, which `equipoise methods` shows.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from equipoise.data import load_federation
from equipoise.engine.loop import Run
from equipoise.methods import COSTS, get_method, method_names
from equipoise.runs import make_config

ROUNDS = 3
SETTINGS = (
    f"train.rounds={ROUNDS}",
    "train.epochs=2",
    "train.batch_size=16",
    "data.phantom.images=600",
    "data.phantom.size=32",
    "evaluation.trained=false",
    "evaluation.every=100",
)
#: a system's costs with everything switched on from the first rounds
THOROUGH = {"fedbm": ("fedbm.every=1",), "prr": ("prr.warmup=0",)}


class Clock:
    """Adds up the CPU seconds and bytes of rounds after the first, which also warms up."""

    def __init__(self) -> None:
        self.seconds, self.bytes, self.rounds = 0.0, 0.0, 0
        self._last = 0.0

    def event(self, event: str, **fields: object) -> None:
        """Take the time at the end of each round."""
        now = time.process_time()
        if event == "round" and fields["round"] != 1:
            sites: dict[str, dict[str, float]] = fields["sites"]  # type: ignore[assignment]
            self.seconds += now - self._last
            self.bytes += sum(facts["sent"] + facts["received"] for facts in sites.values())
            self.rounds += 1
        self._last = now


def cost(method: str, settings: Sequence[str] = ()) -> tuple[float, float]:
    """CPU seconds and bytes of one round."""
    config = make_config(None, [*SETTINGS, *settings], method=method)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        Run(config, get_method(method), load_federation(config.data, 1), Path(folder), [clock]).execute()
    return clock.seconds / clock.rounds, clock.bytes / clock.rounds


def main() -> None:
    """Measure every method and write the file."""
    torch.set_num_threads(1)
    costs = {}
    for method in method_names():
        pairs = [(cost("fedavg"), cost(method, THOROUGH.get(method, ()))) for _ in range(2)]
        compute = min(seconds for _, (seconds, _) in pairs) / min(seconds for (seconds, _), _ in pairs)
        traffic = pairs[0][1][1] / pairs[0][0][1]
        costs[method] = {"compute": round(compute, 2), "traffic": round(traffic, 2)}
        print(f"{method:<12} compute x{compute:5.2f}   traffic x{traffic:5.2f}", flush=True)
    COSTS.write_text(json.dumps(costs, indent=1) + "\n")


if __name__ == "__main__":
    main()
