"""How often a table tells a row apart from its best one where no row differs: the best is chosen by the scores that are
then tested, which Holm's correction does not cover.

    python benchmarks/best_row.py

Scores are drawn: a part that the rows of a seed share, and one of each row's own, both normal and of the same size.
Writes `results/benchmarks/best_row.json`, which `docs/studies.md` quotes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from equipoise.statistics import compare_with_best
from equipoise.studies.score_tables import SIGNIFICANT

TABLES = ((5, 3), (10, 3), (32, 3), (10, 5), (32, 5))
REPEATS = 1000


def share_with_a_difference(rows: int, seeds: int, repeats: int = REPEATS) -> float:
    """The share of drawn tables in which the corrected t-test tells at least one row apart from the best."""
    random = np.random.default_rng((rows, seeds))
    found = 0
    for _ in range(repeats):
        scores = random.normal(size=(rows, seeds)) + random.normal(size=seeds)
        values = {f"row {row}": dict(enumerate(own.tolist())) for row, own in enumerate(scores)}
        found += any((comparison.t_test_holm or 1.0) < SIGNIFICANT for comparison in compare_with_best(values))
    return found / repeats


def main() -> None:
    """Draw the tables and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the first table, drawn 20 times, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "benchmarks")
    options = parser.parse_args()
    repeats, tables = (20, TABLES[:1]) if options.quick else (REPEATS, TABLES)
    drawn = [
        {"rows": rows, "seeds": seeds, "share": share_with_a_difference(rows, seeds, repeats)} for rows, seeds in tables
    ]
    for line in drawn:
        print(line)
    (options.out / "best_row.json").write_text(json.dumps({"repeats": repeats, "tables": drawn}, indent=1) + "\n")


if __name__ == "__main__":
    main()
