"""Which of the four papers' 31 result tables are made, from the study files and the results that are there.

`papers.toml` beside it names the tables, and the images that some of them lack.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from equipoise.studies.study_file import load_study, study_names

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"
PAPERS = tomllib.loads((HERE / "papers.toml").read_text(encoding="utf-8"))
#: why rows are missing where all images are at hand
LATER = "needs a GPU"


def coverage() -> list[tuple[str, str, str, str, str]]:
    """Paper, table, subject, how much is made, and why not all."""
    rows: dict[tuple[str, str], set[tuple[str, str]]] = {}
    made: set[tuple[str, str]] = set()
    for name in study_names():
        paper = next((paper for paper, own in PAPERS.items() if name.startswith(own["studies"])), None)
        if paper is None:
            continue
        for row in load_study(name).rows:
            for table in row.tables:
                rows.setdefault((paper, table), set()).add((name, row.name))
        summary = RESULTS / name / "summary.json"
        if summary.exists():
            made |= {(name, row["method"]) for row in json.loads(summary.read_text(encoding="utf-8"))["rows"]}
    found = []
    for paper, own in PAPERS.items():
        for table in own["tables"]:
            wanted = rows.get((paper, table.get("runs_of", table["table"])), set())
            done = len(wanted & made)
            missing = done < len(wanted) or not wanted
            why = table.get("lacks") or (LATER if missing else "")
            state = "made" if done and done == len(wanted) and not why else "in part" if done else "open"
            told = f"{state} ({done} of {len(wanted)} rows)" if wanted else state
            found.append((paper, table["table"], table["what"], told, why))
    return found
