"""What secure sums cost a site and the server: CPU seconds of masks, and bytes, for a model and some sites.

python benchmarks/secure_sums.py --weights 11200000 --sites 3 8
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from equipoise.hospitals.pairwise_masks import own_mask, secret_of, threshold
from equipoise.hospitals.sum_desk import Identity, SumDesk


def measured(sites: int, weights: int) -> tuple[float, float, float, float]:
    """CPU seconds of a site (keys and shares, masks) and of the server, and the MB that a site sends."""
    with TemporaryDirectory() as folder:
        names = [f"site {number}" for number in range(sites)]
        desks = {name: SumDesk(name, Path(folder) / name, "run", Identity()) for name in names}
        began = time.process_time()
        keys = {name: desk.keys("1") for name, desk in desks.items()}
        told = {name: desk.shares("1", keys) for name, desk in desks.items()}
        spent = time.process_time() - began
        shares = {name: {other: told[other][name] for other in names if other != name} for name in names}
        vector = torch.arange(weights)
        total = torch.zeros_like(vector)
        began = time.process_time()
        for name, desk in desks.items():
            total += desk.masked("1", "question", shares[name], vector)
        masks = time.process_time() - began
        began = time.process_time()
        opened = {name: desk.open("1", names) for name, desk in desks.items()}
        givers = sorted(names)[: threshold(sites)]
        places = {name: place for place, name in enumerate(sorted(names))}
        for name in names:
            seed = secret_of({places[giver]: bytes.fromhex(opened[giver][name]) for giver in givers})
            total -= own_mask(seed, "1", weights)
        server = time.process_time() - began
        assert torch.equal(total, sites * vector), "the masks do not cancel"
        return spent / sites, masks / sites, server, weights * 8 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=int, default=11_200_000)
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--quick", action="store_true", help="few weights and three sites, to try the script")
    parser.add_argument("--out", type=Path, help="write the rows to secure_sums.json in this folder, too")
    asked = parser.parse_args()
    if asked.quick:
        asked.weights, asked.sites = 10_000, [3]
    rows = []
    torch.set_num_threads(1)
    print("| sites | a site's keys and shares (s) | a site's masks (s) | server opens (s) | a site sends (MB) |")
    print("|---:|---:|---:|---:|---:|")
    for sites in asked.sites:
        rows.append((sites, *measured(sites, asked.weights)))
        print("| {} | {:.3f} | {:.2f} | {:.2f} | {:.0f} |".format(*rows[-1]))
    if asked.out:
        (asked.out / "secure_sums.json").write_text(json.dumps({"weights": asked.weights, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
