"""Which of the four papers' 31 result tables are made, from the study files and the results that are there."""

from __future__ import annotations

import json
from pathlib import Path

from equipoise.studies.study_file import load_study, study_names

RESULTS = Path(__file__).resolve().parents[1] / "results"
#: by paper: how its studies' names begin, and what each of its tables shows
PAPERS: dict[str, tuple[str, dict[str, str]]] = {
    "PRR": (
        "prr-",
        {
            "Table II": "methods on dermoscopy",
            "Table III": "methods on prostate MRI",
            "Table IV": "components",
            "Table V": "frequencies in PFA",
            "Table VI": "steps of DET",
            "Table VII": "low-frequency band",
            "Table VIII": "thresholds of DET",
            "Table IX": "beta and tau of CPA",
            "Table X": "unseen cohort",
            "Table XI": "losses for imbalance",
            "Table XII": "cost",
        },
    ),
    "FedNPR": (
        "fednpr-",
        {
            "Table III": "methods on skin and CT",
            "Table IV": "components",
            "Table V": "number of clusters",
            "Table VI": "NPR on other methods",
            "Table VII": "weight of NPR",
        },
    ),
    "FedIIC": (
        "fediic-",
        {"Table 1": "methods on three data sets", "Table 2": "components", "Table 3": "parameters"},
    ),
    "FedBM": (
        "fedbm-",
        {
            "Table I": "methods on OCT-C8",
            "Table II": "methods on Kvasir v2",
            "Table III": "methods on HAM10000",
            "Table IV": "methods on PBC",
            "Table V": "methods on FEMNIST",
            "Table VI": "components",
            "Table VII": "share of prompts, classifier",
            "Table VIII": "classifier",
            "Table IX": "parts of the generator",
            "Table X": "weight of diversity",
            "Table XI": "weight of batch-norm term",
            "Table XII": "text encoders",
        },
    ),
}
#: a table of the same runs as another one
SAME = {("PRR", "Table X"): "Table II"}
#: why a table cannot be whole whatever is run
ABSENT = {
    ("PRR", "Table III"): "the prostate images are not at hand",
    ("FedNPR", "Table III"): "BCN's centre and the CT images are not at hand",
    ("FedIIC", "Table 1"): "ISIC 2019 as a whole and the CT images are not at hand",
    ("FedIIC", "Table 2"): "on HAM10000 in place of ISIC 2019",
    ("FedIIC", "Table 3"): "on HAM10000 in place of ISIC 2019; needs a GPU",
    ("FedBM", "Table VI"): "on other images than the paper's; needs a GPU",
    ("FedBM", "Table I"): "the images are not at hand",
    ("FedBM", "Table II"): "the images are not at hand",
    ("FedBM", "Table V"): "the images are not at hand",
    ("FedBM", "Table XII"): "the images and text encoders are not at hand",
}


def coverage() -> list[tuple[str, str, str, str, str]]:
    """Paper, table, subject, how much is made, and why not all."""
    rows: dict[tuple[str, str], set[tuple[str, str]]] = {}
    made: set[tuple[str, str]] = set()
    for name in study_names():
        paper = next((paper for paper, (prefix, _) in PAPERS.items() if name.startswith(prefix)), None)
        if paper is None:
            continue
        for row in load_study(name).rows:
            for table in row.tables:
                rows.setdefault((paper, table), set()).add((name, row.name))
        summary = RESULTS / name / "summary.json"
        if summary.exists():
            made |= {(name, row["method"]) for row in json.loads(summary.read_text(encoding="utf-8"))["rows"]}
    found = []
    for paper, (_, tables) in PAPERS.items():
        for table, subject in tables.items():
            wanted = rows.get((paper, SAME.get((paper, table), table)), set())
            done = len(wanted & made)
            why = ABSENT.get((paper, table), "" if wanted and done == len(wanted) else "needs a GPU")
            state = "made" if done and done == len(wanted) and not why else "in part" if done else "open"
            found.append((paper, table, subject, f"{state} ({done} of {len(wanted)} rows)" if wanted else state, why))
    return found
