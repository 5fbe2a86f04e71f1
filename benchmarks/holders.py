"""How much the sites that were drawn weigh on a round: recall of classes whose images took part in it, and of others.

    python benchmarks/holders.py results/fedbm-pbc-0.05

Reads the events of a study's finished runs and writes `controls.json` beside them.
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

#: a class takes part in a round with at least this share of its training images
SHARE = 0.5
NOTES = [
    "from events.jsonl of the runs in this folder, validation images, per cent; python benchmarks/holders.py",
    "a class takes part in a round if at least half of its training images lie at sites that were drawn for it",
    "largest_share: the largest share of a class's training images that one site has",
]


def holders(run: RunRecord, first: int) -> dict[str, Any]:
    """Scores of a run's global model from round `first` on, by the classes that took part."""
    images, classes = run.training_images, run.start.classes
    share = images / images.sum()
    took_part = {
        number: (share[share.index.isin(own)].sum() >= SHARE).to_numpy()
        for number, own in run.work.groupby("round")["site"]
    }
    scored = run.evaluations[(run.evaluations["part"] == "valid") & (run.evaluations["view"] == "global")]
    scored = scored.set_index("round")
    rounds = [number for number in took_part if number >= first]
    present = np.array([took_part[number] for number in rounds])
    recall = 100 * np.array([line["recall"] for line in run.lines(scored["offset"][rounds])], dtype=float)
    f1 = 100 * scored["macro_f1"].fillna(0.0)[rounds].to_numpy()
    chosen = run.selections[0].round
    return {
        "name": run.folder.name,
        "largest_share": dict(zip(classes, (100 * share.max()).round(1).tolist())),
        "recall_of_classes_that_took_part": _mean(recall[present]),
        "recall_of_the_others": _mean(recall[~present]),
        "macro_f1": {
            "mean": _mean(f1),
            "std": round(float(f1.std(ddof=1)), 2),
            "step_from_round_to_round": _mean(np.abs(np.diff(f1))),
        },
        "macro_f1_by_classes_that_took_part": {
            str(number): {"mean": _mean(f1[present.sum(1) == number]), "rounds": int((present.sum(1) == number).sum())}
            for number in np.unique(present.sum(1))
        },
        "chosen": {
            "round": chosen,
            "macro_f1": round(100 * scored["macro_f1"].fillna(0.0)[chosen], 2),
            "classes_that_took_part": [name for name, there in zip(classes, took_part[chosen]) if there],
        },
    }


def _mean(values: np.ndarray) -> float | None:
    """None where there are no values: with all sites in each round every class takes part."""
    return round(float(values.mean()), 2) if values.size else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("study", type=Path, help="folder of a study whose runs have a common validation set")
    parser.add_argument("--first", type=int, default=11, help="the first round that counts")
    arguments = parser.parse_args()
    runs = [read_run(folder) for folder in sorted(unpack(arguments.study).iterdir())]
    content = {"notes": NOTES, "first_round": arguments.first, "runs": [holders(run, arguments.first) for run in runs]}
    write_text(arguments.study / "controls.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
