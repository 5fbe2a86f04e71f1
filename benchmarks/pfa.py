"""What PRR's Fourier aggregation costs the server on a CPU: CPU seconds and memory to merge one net of every site.

    python benchmarks/pfa.py [--before COMMIT] [--net resnet18] [--sites 4] [--repeats 3] [--quick]
        [--out results/benchmarks]

Each turn is a fresh process of one thread. It makes random weights for every site, then merges them as a round does.
The memory is the peak of the process less what it held before it merged.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from earlier import environment, sources

MERGE = """
import json, resource, sys, threading, time
import torch
from equipoise.nets import build_net
try:
    from equipoise.components._fourier_merging import layer_kinds, merge_deputies
    from equipoise.nets.net_config import NetConfig
    from equipoise.contract.protocol import Replies, Reply
except ImportError:  # before the components
    from equipoise.config import NetConfig
    from equipoise.engine.protocol import Replies, Reply
    from equipoise.methods._prr_fourier import layer_kinds, merge_deputies
name, sites, phase = sys.argv[1], int(sys.argv[2]), sys.argv[3]
net = build_net(NetConfig(name=name), num_classes=8, channels=3)
draws = torch.Generator().manual_seed(1)
def reply(site):
    floats = {entry: t for entry, t in net.state_dict().items() if t.is_floating_point()}
    return Reply(site, {"model": {entry: torch.randn(t.shape, generator=draws) for entry, t in floats.items()}})
replies = Replies([reply(f"site{i}") for i in range(sites)])
kinds = {entry: kind for entry, kind in layer_kinds(net).items() if entry in replies[0]["model"]}
held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
began = time.process_time()
mean, merged = merge_deputies(replies, kinds, 0.8, phase)
spent = time.process_time() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
values = sum(t.numel() for t in merged.values())
print(json.dumps({"s": spent, "mb": peak - held, "result_mb": values * 4 / 2**20}))
"""


def merged(source: Path, options: argparse.Namespace, phase: str) -> dict[str, Any]:
    """One merge in a fresh process."""
    command = [sys.executable, "-c", MERGE, options.net, str(options.sites), phase]
    done = subprocess.run(command, env=environment(source), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout)


def main() -> None:
    """Measure in turns, print and write `pfa.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="", help="a commit to measure in turns with this tree")
    parser.add_argument("--net", default="resnet18")
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one turn on a small net, to try the script")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    options = parser.parse_args()
    if options.quick:
        options.net, options.repeats = "small-cnn", 1
    rows = []
    with sources(options.before) as found:
        for phase in ("angle", "complex"):
            turns = [
                {side: merged(source, options, phase) for side, source in found.items()} for _ in range(options.repeats)
            ]
            for side in found:
                own = [turn[side] for turn in turns]
                row = {"phase": phase, "side": side, "s": min(o["s"] for o in own)}
                rows.append(row | {key: statistics.median(o[key] for o in own) for key in ("mb", "result_mb")})
                print(f"{phase:<8} {side:<7} {row['s']:6.2f} s {rows[-1]['mb']:6.0f} MB")
    command = "python benchmarks/pfa.py" + (f" --before {options.before}" if options.before else "")
    result = {"command": command, "net": options.net, "sites": options.sites, "turns": options.repeats}
    result |= {"before_commit": options.before, "rows": rows, "load": os.getloadavg()[0]}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pfa.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
