"""Every preset whose images are at hand, for two rounds on a few real images on the CPU: that each runs end to end.

    python benchmarks/presets.py --root DIR [--limit 16] [--out results/benchmarks]

Images and rounds are far too few for scores to mean anything; presets without a built-in source are named as such.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from equipoise.contract.config import preset_names
from equipoise.core.errors import UserError
from equipoise.engine.runs import execute, make_config
from equipoise.report import read_run

#: presets whose own images are not at hand, tried on others
ELSEWHERE = {"fediic-isic2019": "ham10000"}


def try_preset(name: str, root: Path, limit: int, store: Path, data: str = "") -> dict[str, Any]:
    """Two reduced rounds of a preset, on its own data or on others."""
    settings = [
        "train.rounds=2",
        "train.epochs=1",
        "evaluation.first_round=1",
        "evaluation.last=1",
        "net.weights='none'",
        "data.size=48",
        "augment.size=48",
        f"data.limit={limit}",
        f"data.store='{store}'",
        f"data.root='{root}'",
        "data.redraw=true",
    ]
    if data:
        settings.append(f"data.name='{data}'")
    if name.startswith("fedbm"):
        settings += ["fedbm.every=1", "fedbm.generator_steps=2", "fedbm.generator_width=8", "fedbm.synthetic=4"]
    began = time.perf_counter()
    try:
        config = make_config(name, settings)
        with tempfile.TemporaryDirectory() as folder:
            execute(config, Path(folder) / "run")
            record = read_run(Path(folder) / "run")
    except UserError as problem:
        return {"preset": name, "runs": False, "why": str(problem).splitlines()[0][:100]}
    seconds = time.perf_counter() - began
    return {"preset": name, "runs": True, "seconds": round(seconds, 1), "status": record.status}


def main() -> None:
    """Try all presets and write `presets.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the raw data sets")
    parser.add_argument("--limit", type=int, default=16, help="images per site and part")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as store:
        for name in preset_names():
            for data in ("", *([ELSEWHERE[name]] if name in ELSEWHERE else [])):
                row = try_preset(name, arguments.root, arguments.limit, Path(store), data)
                rows.append(row | ({"on": data} if data else {}))
                print(rows[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "presets.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
