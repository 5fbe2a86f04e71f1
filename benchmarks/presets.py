"""Every preset for two reduced rounds on the CPU, on small made-up files and on real images: that each runs end to end.

    python benchmarks/presets.py [--root DIR] [--limit 16] [--only NAME ...] [--out results/benchmarks]

Made-up files have the documented layouts (`made_up.py`). With --root, presets whose real images lie there run on
those as well. Images and rounds are far too few for scores to mean anything.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from equipoise.contract.config_files import preset_names, read_raw
from equipoise.core.errors import UserError
from equipoise.engine.runs import make_config, prepare_run
from equipoise.report import read_run
from made_up import MAKERS

COLUMNS = ("preset", "images", "runs", "seconds", "sites", "why")


def reduced(name: str, limit: int, store: Path) -> list[str]:
    """Settings that leave two short rounds of a preset."""
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
        "data.redraw=true",
    ]
    if name.startswith("fedbm"):
        settings += ["fedbm.every=1", "fedbm.generator_steps=2", "fedbm.generator_width=8", "fedbm.synthetic=4"]
    return settings


def try_preset(name: str, settings: list[str]) -> dict[str, Any]:
    """A run of a preset that is thrown away; what it was, and why it did not end."""
    began = time.perf_counter()
    try:
        config = make_config(name, settings)
        with tempfile.TemporaryDirectory() as folder:
            prepare_run(config, Path(folder) / "run").execute()
            record = read_run(Path(folder) / "run")
    except UserError as problem:
        return {"runs": False, "why": str(problem).splitlines()[0]}
    seconds = time.perf_counter() - began
    sites = [site for site in record.start.sites if site.name != "common"]
    return {"runs": record.finished, "seconds": round(seconds, 1), "sites": len(sites)}


def data_of(name: str) -> str:
    """The source of a preset."""
    return read_raw(name).get("data", {}).get("name", "phantom")


def try_all(names: list[str], root: Path | None, limit: int, work: Path) -> list[dict[str, Any]]:
    """Each preset on made-up files, or on the phantom's drawn images, and on real ones where they are."""
    rows = []
    for name in names:
        source = data_of(name)
        settings = reduced(name, limit, work / "stores")
        copies = {"drawn": settings}
        if source in MAKERS:
            folder = work / source
            if not folder.exists():
                MAKERS[source](folder)
            copies = {"made up": [*settings, f"data.root='{folder}'", "data.skip_unreadable=true"]}
            if root is not None:
                copies["real"] = [*settings, f"data.store='{work / 'real'}'", f"data.root='{root}'"]
        for images, given in copies.items():
            row = {"preset": name, "images": images, **try_preset(name, given)}
            if images == "real" and "why" in row:  # where images lie on this machine is nobody's concern
                row["why"] = row["why"].replace(str(root), "DIR")
            rows.append(row)
            print(rows[-1], flush=True)
    return rows


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        values = row | {"runs": "yes" if row["runs"] else "no"}
        lines.append(f"| {' | '.join(str(values.get(column, '')) for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try all presets, and write `presets.json` and `presets.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, help="folder of real data sets; default: made-up files alone")
    parser.add_argument("--limit", type=int, default=16, help="images per site and part")
    parser.add_argument("--only", nargs="+", help="these presets")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--quick", action="store_true", help="one preset, to try the script")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.only, arguments.limit = ["fedbm-kvasir-0.1"], 4
    with tempfile.TemporaryDirectory() as work:
        rows = try_all(arguments.only or list(preset_names()), arguments.root, arguments.limit, Path(work))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "presets.json").write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.out / "presets.md").write_text(as_markdown(rows))
    if not all(row["runs"] for row in rows if row["images"] != "real"):
        raise SystemExit("a preset did not run on made-up files")


if __name__ == "__main__":
    main()
