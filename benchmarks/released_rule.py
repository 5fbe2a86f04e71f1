"""Which rounds FedBM's released code would have chosen of a study's runs, and what they have on validation images.

    python benchmarks/released_rule.py results/fedbm-ham10000-0.05

The code adds up accuracy, micro recall (which is accuracy), precision, F1 and AUC; precision is taken as the mean over
classes. Reads the events of a study's finished runs and writes `released_rule.json` beside them, in per cent.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.storage import write_text
from equipoise.report.record import RunRecord, read_run
from equipoise.studies.archive import unpack

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a study's logs"

#: besides precision
METRICS = ["accuracy", "accuracy", "macro_f1", "balanced_auc"]


def precision(confusion: list[list[int]]) -> float:
    """The mean over classes of the share of right calls; 0 for a class that is never called."""
    counts = np.array(confusion, dtype=float)
    return float(np.mean(np.diag(counts) / np.maximum(counts.sum(0), 1)))


def rounds(run: RunRecord) -> dict[str, Any]:
    """The round that was reported and the one of the released rule, each with its macro F1."""
    scored = run.evaluations[(run.evaluations["part"] == "valid") & (run.evaluations["view"] == "global")]
    scored = scored.set_index("round").fillna(dict.fromkeys(METRICS, 0.0))
    merit = scored[METRICS].sum(axis=1) + [precision(line["confusion"]) for line in run.lines(scored["offset"])]
    chosen = {"ours": run.selections[0].round, "released": int(merit[merit.index > 0].idxmax())}
    f1 = scored["macro_f1"]
    return {
        "name": run.folder.name,
        **{rule: {"round": number, "macro_f1": round(100 * f1[number], 1)} for rule, number in chosen.items()},
    }


def main(study: Path) -> None:
    """Write the figures of every finished run of a study."""
    runs = [read_run(folder.parent) for folder in sorted(unpack(study).glob("*/events.jsonl"))]
    found = {"notes": ["python benchmarks/released_rule.py; validation images"], "runs": [rounds(run) for run in runs]}
    write_text(study / "released_rule.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("study", type=Path)
    main(parser.parse_args().study)
