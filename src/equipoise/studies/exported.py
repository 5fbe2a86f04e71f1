"""A study's tables as CSV, LaTeX and Markdown, all in per cent."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from equipoise.report.latex import latex_text
from equipoise.report.tables import METRIC_TITLES
from equipoise.studies.cost import cost
from equipoise.studies.grid import METRICS, Metric
from equipoise.studies.results import StudyResults
from equipoise.studies.rows import RowResult, Spreads
from equipoise.studies.table import SideTable, StudyTable, heading, number, side_tables, tables_of

#: kinds of models, as documentation names them
VIEW_TITLES = {"trained": "after local training", "global": "global", "personal": "personal"}
COSTS = ("model_bytes", "flops_per_image", "sent_per_round", "received_per_round", "seconds_per_round", "seconds")


def to_csv(results: StudyResults) -> str:
    """A line per row and data set, and one per unseen cohort; empty where not known."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [f"{metric}{suffix}" for metric in METRICS for suffix in ("", "_std", "_paper")]
    writer.writerow(["study", "data", "tables", "cohort", "method", "view", "seeds", *columns, *COSTS, "rule"])
    for row in (row for row in results.rows if row.runs):
        for line in _csv_lines(results, row):
            writer.writerow([*line, results.rule])
    return out.getvalue()


def _csv_lines(results: StudyResults, row: RowResult) -> Iterator[list[Any]]:
    seeds = " ".join(str(run.cell.seed) for run in row.runs)

    def labels(cohort: str, view: str) -> list[str]:
        return [results.study.name, row.data, "; ".join(row.row.tables), cohort, row.row.name, view, seeds]

    own = cost(results, row)
    yield [*labels("", row.view), *_csv_scores(row.scores, row.row.paper), *(own[key] for key in COSTS)]
    for cohort, view in row.places("cohort").items():
        scores = row.scores_of(view, "cohort", cohort)
        yield [*labels(cohort, view), *_csv_scores(scores, row.row.paper_cohort), *(None for _ in COSTS)]


def _csv_scores(scores: Spreads, paper: Mapping[Metric, float]) -> list[float | None]:
    cells: list[float | None] = []
    for metric in METRICS:
        score = scores.get(metric)
        cells += [score.mean, score.std] if score else [None, None]
        cells.append(paper.get(metric))
    return cells


# ---- LaTeX -----------------------------------------------------------------------------------------------------


def to_latex(results: StudyResults) -> str:
    r"""Every table that has something to show as a `table` for `\usepackage{booktabs}`, the best of a column in bold,
    notes beneath; then those of sites, unseen cohorts, images and costs."""
    tables: list[StudyTable | SideTable] = []
    for data in results.data_names:
        tables += [*tables_of(results, data), *side_tables(results, data)]
    parts = ["% needs \\usepackage{booktabs}\n"]
    for place, table in enumerate(tables, start=1):
        label = f"{results.study.name}-{place}"
        parts.append(_latex_scores(table, label) if isinstance(table, StudyTable) else _latex_side(table, label))
    return "\n".join(parts)


def _latex_scores(table: StudyTable, label: str) -> str:
    lines = []
    for row in table.rows:
        cells = []
        for column in table.columns:
            text = latex_text(table.cell(row, column))
            cells.append(rf"\textbf{{{text}}}" if table.is_best(row, column) else text)
        lines.append((row.row.name, cells))
    return _latex(label, table.caption, table.heads, lines, " ".join(table.notes()))


def _latex_side(table: SideTable, label: str) -> str:
    lines = [(name, [latex_text(text) for text in cells]) for name, cells in table.lines]
    return _latex(label, table.caption, table.heads, lines, " ".join(table.notes), table.first)


def _latex(
    label: str,
    caption: str,
    heads: Sequence[str],
    lines: Sequence[tuple[str, list[str]]],
    beneath: str = "",
    first: str = "Method",
) -> str:
    """A `table` whose cells are LaTeX already, and whose other texts are not."""
    note = [rf"\par {latex_text(beneath)}"] if beneath else []
    return "\n".join(
        [
            r"\begin{table}",
            r"\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{latex_text(caption)}}}\label{{tab:{label}}}",
            r"\begin{tabular}{l" + "r" * len(heads) + "}",
            r"\toprule",
            " & ".join(map(latex_text, [first, *heads])) + r" \\",
            r"\midrule",
            *(" & ".join([latex_text(name), *cells]) + r" \\" for name, cells in lines),
            r"\bottomrule",
            r"\end{tabular}",
            *note,
            r"\end{table}",
            "",
        ]
    )


# ---- Markdown --------------------------------------------------------------------------------------------------


def to_markdown(results: StudyResults) -> str:
    """Every table that has a score, for documentation: the main score of each kind of model, the others, the paper's;
    then those of sites, unseen cohorts and costs."""
    parts: list[str] = []
    for data in results.data_names:
        for table in tables_of(results, data):
            parts += [table.caption, _markdown_scores(table), " ".join(table.notes())]
        for side in side_tables(results, data):
            parts += [side.caption, _markdown(side.heads, side.lines, side.first.lower())]
            parts += [" ".join(side.notes)] if side.notes else []
    return "\n\n".join(parts) + "\n"


def _markdown_scores(table: StudyTable) -> str:
    results, rest = table.results, table.columns[1:]
    views = _markdown_views(table)
    main = [f"{METRIC_TITLES[results.study.primary]}, {VIEW_TITLES[view]}" for view in views]
    lines = []
    for row in table.rows:
        scores = [
            number(row.scores_of(view).get(results.study.primary)) + (table.mark(row) if view == row.view else "")
            for view in views
        ]
        lines.append((row.row.name, [*scores, *(table.cell(row, column) for column in rest)]))
    return _markdown([*main, *(heading(results, column) for column in rest)], lines)


def _markdown_views(table: StudyTable) -> list[str]:
    """The kinds of model whose main score is shown: those that rows have, after local training only where the study
    reports them."""
    views = [view for view in VIEW_TITLES if view != "trained" or table.results.study.scope == "trained"]
    return [view for view in views if any(row.scores_of(view) for row in table.rows)] or views


def _markdown(heads: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]], first: str = "method") -> str:
    rows = [[first, *heads], ["---", *("---:" for _ in heads)], *([name, *cells] for name, cells in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
