"""What a reader of a study has to know besides its scores: the finding, warnings, and which runs are lacking."""

from __future__ import annotations

from collections.abc import Sequence

from equipoise.data.splits import SHARED
from equipoise.report.measured import TITLES
from equipoise.statistics import SIGNIFICANT, compare_with_best
from equipoise.studies.database import LEFT_OUT
from equipoise.studies.grid import grid
from equipoise.studies.results import StudyResults
from equipoise.studies.rows import RowResult, RunResult, holders
from equipoise.studies.study_intervals import HIGHER_IS_BETTER


def warnings(rows: Sequence[RowResult]) -> list[str]:
    """The warnings of all runs of these rows, each text once, after the runs that it holds for."""
    found: dict[str, list[RunResult]] = {}
    for run in (run for row in rows for run in row.runs):
        for text in run.told["warnings"]:
            found.setdefault(text, []).append(run)
    whose = {text: holders(rows, runs) for text, runs in found.items()}
    return [f"{who[0].upper() + who[1:] if who == 'all runs' else who}: {text}" for text, who in whose.items()]


def caveats(rows: Sequence[RowResult]) -> list[str]:
    """Those of the warnings that stand under a table: of groups shared between training and evaluation, and of sites
    that were left out of rounds."""
    return [text for text in warnings(rows) if SHARED in text or LEFT_OUT in text]


def not_run(results: StudyResults) -> list[str]:
    """What the first wave lacks: rows without a finished run, and seeds of others, less the runs already begun."""
    begun = {run.cell.label for run in results.runs} | {*results.unfinished, *results.damaged}
    seeds: dict[tuple[str, str], list[int]] = {}
    for cell in grid(results.study, results.folder):
        if cell.label not in begun:
            seeds.setdefault((cell.data_name, cell.row.name), []).append(cell.seed)
    found = []
    for row in results.rows:
        own = sorted(seeds.get((row.data, row.row.name), ()))
        named = f" ({'seed' if len(own) == 1 else 'seeds'} {', '.join(map(str, own))})" if row.runs else ""
        found += [f"{row.full_name}{named}"] if own else []
    return found


def later(results: StudyResults) -> list[str]:
    """Rows that the file keeps for the full grid and that have no run."""
    first = {(cell.data_name, cell.row.name) for cell in grid(results.study, results.folder)}
    return [row.full_name for row in results.rows if not row.runs and (row.data, row.row.name) not in first]


def runs_lacking(results: StudyResults) -> int:
    """How many runs are not finished: those of the first wave, and others that were begun."""
    finished = {run.cell.label for run in results.runs}
    return len({cell.label for cell in grid(results.study, results.folder)} - finished | set(results.unfinished))


def finding(results: StudyResults) -> str:
    """What a study found, in a sentence or two: its best row, and whether tests tell it from the next one."""
    metric, study = results.study.primary, results.study
    title = TITLES[metric]
    title = title if title.isupper() else title[0].lower() + title[1:]
    means = results.ranking.means
    if len(results.data_names) > 1 and means:
        first = min(means, key=means.__getitem__)
        return (
            f"{first} has the best mean rank by {title}: {means[first]:.2f} over {len(results.data_names)} data sets."
        )
    rows = [row for row in results.rows if metric in row.scores and not row.pooled]
    rows.sort(key=lambda row: row.scores[metric].mean, reverse=HIGHER_IS_BETTER[metric])
    if not rows:
        return ""
    best, score = rows[0], rows[0].scores[metric]
    ends = f" ({score.mean - score.margin:.1f} to {score.mean + score.margin:.1f})" if score.margin is not None else ""
    text = f"{best.row.name} has the best {title}, {score.mean:.1f} %{ends}"
    if len(rows) == 1:
        return f"{text}; no other row has finished."
    text += f"; next is {rows[1].row.name} with {rows[1].scores[metric].mean:.1f} %"
    if results.mixed:
        return f"{text}. Runs saw different images, so this is no comparison."
    values = {row.row.name: row.values(metric, study.pairs == "seeds and sites") for row in rows}
    tests = {
        test.other: test for test in compare_with_best(values, HIGHER_IS_BETTER[metric]) if test.best == best.row.name
    }
    test = tests.get(rows[1].row.name)
    if test is None or test.t_test_holm is None:
        return f"{text}. Too few seeds for a test: the order may be luck."
    if test.t_test_holm >= SIGNIFICANT:
        return f"{text}. The paired test cannot tell them apart (p = {test.t_test_holm:.2g})."
    return f"{text}. The paired test tells them apart (p = {test.t_test_holm:.2g})."
