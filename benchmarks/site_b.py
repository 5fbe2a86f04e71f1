"""Who the melanomas among a site's test images are, and how its naevi were confirmed: PRR's sites A to C.

    python benchmarks/site_b.py SPLITS     # results/prr-dermoscopy/patients.json

SPLITS is the folder of the authors' lists (`prr_test_clientB.csv` and the like), which tell sex, age and how a
diagnosis was made.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "the authors' lists of images"
OUT = Path(__file__).resolve().parents[1] / "results" / "prr-dermoscopy" / "patients.json"


def patients(splits: Path, site: str) -> dict[str, Any]:
    """A site's test melanomas, and all its naevi by how they were confirmed."""
    parts = {part: pd.read_csv(splits / f"prr_{part}_client{site}.csv") for part in ("train", "valid", "test")}
    melanomas = parts["test"].query("dx == 'mel'")
    naevi = parts["test"].query("dx == 'nv'")["dx_type"].value_counts()
    return {
        "melanomas": len(melanomas),
        "sex": sorted(melanomas["sex"].unique()),
        "age": [int(melanomas["age"].min()), int(melanomas["age"].max())],
        "naevi": int(naevi.sum()),
        "naevi by histology": int(naevi.get("histo", 0)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("splits", type=Path)
    found = {site: patients(parser.parse_args().splits, site) for site in "ABC"}
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(OUT)


if __name__ == "__main__":
    main()
