"""A study's results as files: `summary.json`, CSV, LaTeX and Markdown tables, all in per cent."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from equipoise.report.latex import latex_text
from equipoise.report.summary import duration, traffic
from equipoise.report.tables import METRIC_TITLES
from equipoise.study import remarks
from equipoise.study.config import METRICS, Metric
from equipoise.study.results import StudyResults
from equipoise.study.rows import RowResult, Spreads
from equipoise.study.statistics import Spread

#: the p-value below which a difference is marked
SIGNIFICANT = 0.05
#: kinds of models, as documentation names them
VIEW_TITLES = {"trained": "after local training", "global": "global", "personal": "personal"}


def summary(results: StudyResults) -> dict[str, Any]:
    """Everything as plain values, for `summary.json`."""
    study = results.study
    return {
        "study": study.name,
        "title": study.title,
        "rule": results.rule,
        "scope": study.scope,
        "part": study.part,
        "primary": study.primary,
        "paper": study.paper,
        "differs": [*study.differs, *results.deviations],
        "warnings": remarks.warnings(results.rows),
        "rows": [_row_summary(results, row) for row in results.rows if row.runs],
        "tests": {
            data: [asdict(comparison) for comparison in comparisons]
            for data, comparisons in results.comparisons.items()
            if comparisons
        },
        "mean_ranks": results.ranking.means,
        "not_run": remarks.not_run(results),
        "later": remarks.later(results),
        "unfinished": list(results.unfinished),
        "damaged": list(results.damaged),
    }


def _row_summary(results: StudyResults, row: RowResult) -> dict[str, Any]:
    views = list(dict.fromkeys(view for run in row.runs for view in run.views))
    entry: dict[str, Any] = {"method": row.row.name, "runs": row.row.method}
    if row.data:
        entry["data"] = row.data
    return entry | {
        **_plain(row.scores),
        "view": row.view,
        "seeds": sorted(run.cell.seed for run in row.runs),
        "rounds": max(run.record.last_round for run in row.runs),
        "selected_rounds": [run.record.selected_round for run in row.runs],
        "validation": asdict(row.validation) if row.validation else None,
        "paper": dict(row.row.paper),
        "note": row.row.note,
        "views": {view: _plain(row.scores_of(view)) for view in views},
        "sites": {site: _plain(row.scores_of(view, "site", site)) for site, view in row.places("site").items()},
        "cohorts": {
            cohort: _plain(row.scores_of(view, "cohort", cohort)) | {"paper": dict(row.row.paper_cohort)}
            for cohort, view in row.places("cohort").items()
        },
        "recall": {name: asdict(each) for name, each in row.recall.items()},
        "cost": cost(results, row),
    }


def _plain(spreads: Spreads) -> dict[str, Any]:
    """Every metric, None where it could not be measured."""
    return {metric: asdict(spreads[metric]) if metric in spreads else None for metric in METRICS}


def cost(results: StudyResults, row: RowResult) -> dict[str, Any]:
    """Size, operations, traffic and time of a row, and the last two relative to the row `fedavg`, if there is one.

    Runs that share a device wait for each other: their times do not compare methods.
    """
    base = next((r for r in results.of(row.data) if r.row.name == "fedavg" and r.runs), None)
    sent, received = row.traffic("sent"), row.traffic("received")
    net = row.runs[0].cost
    return {
        "parameters": net.parameters if net else row.runs[0].record.start.parameters,
        "model_bytes": net.model_bytes if net else None,
        "flops_per_image": net.flops if net else None,
        "sent_per_round": sent,
        "received_per_round": received,
        "seconds_per_round": row.seconds.mean if row.seconds else None,
        "seconds": row.duration.mean if row.duration else None,
        "together": row.together,
        "relative_seconds": _ratio(row.seconds, base.seconds) if base and base.together == row.together == 1 else None,
        "relative_traffic": _relative_traffic(row, base) if base else None,
    }


def _ratio(own: Spread | None, base: Spread | None) -> float | None:
    return own.mean / base.mean if own and base and base.mean else None


def _relative_traffic(row: RowResult, base: RowResult) -> float | None:
    own, whole = (sum(each.traffic(way) or 0 for way in ("sent", "received")) for each in (row, base))
    return own / whole if whole else None


# ---- text ------------------------------------------------------------------------------------------------------


def number(value: Spread | None) -> str:
    """Mean and deviation with two decimals; a dash when there is none."""
    if value is None:
        return "–"
    return f"{value.mean:.2f}" + ("" if value.std is None else f" ± {value.std:.2f}")


def marks(results: StudyResults, row: RowResult) -> str:
    """A dagger where the t-test, a double dagger where also Wilcoxon's, tells the row from the best one."""
    for comparison in results.comparisons[row.data]:
        if comparison.other == row.row.name:
            t_test, wilcoxon = (
                p is not None and p < SIGNIFICANT for p in (comparison.t_test_holm, comparison.wilcoxon_holm)
            )
            return ("‡" if wilcoxon else "†") if t_test else ""
    return ""


def notes(results: StudyResults, rows: Sequence[RowResult], alone: bool = True) -> list[str]:
    """What stands under a table: selection rule, scope, how tests were made; and unless the table stands on a page that
    says so at its top, groups shared between training and test, and what differs from the paper."""
    study = results.study
    found = [results.rule, results.scope]
    if alone:
        found += [f"{text}." for text in remarks.leaks(rows)]
    counts = sorted({len(row.runs) for row in rows if row.runs})
    if counts and counts[-1] > 1:
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        found.append(f"Mean ± sample standard deviation over {seeds} seeds.")
    elif counts:
        found.append("One seed.")
    found += shared_times(rows)
    found += tests_notes(results, rows)
    if any(row.row.paper for row in rows) and study.paper:
        found.append(f"Paper: {study.paper}." + ("" if alone else " What differs from it stands at the top."))
    if alone:
        found += [f"{'Differs from the paper' if has_paper(results) else 'Note'}: {text}" for text in study.differs]
        found += [f"Differs from the study file: {text}." for text in results.deviations]
    found += [f"{row.row.name}: {row.row.note}" for row in rows if row.row.note]
    return found


def has_paper(results: StudyResults) -> bool:
    """True when the study names a paper, or has numbers of one."""
    return bool(results.study.paper) or any(row.paper or row.paper_cohort for row in results.study.rows)


def shared_times(rows: Sequence[RowResult]) -> list[str]:
    """What to know about the times of runs that shared a device; nothing where none did."""
    shared = max((row.together for row in rows), default=1)
    if shared == 1:
        return []
    return [f"Up to {shared} runs shared the device and waited for each other: times compare no methods."]


def tests_notes(results: StudyResults, rows: Sequence[RowResult]) -> list[str]:
    """What the marks of tests in a table of these rows mean, a sentence for each data set."""
    return [note for data in {row.data: None for row in rows} if (note := _tests_note(results, data))]


def _tests_note(results: StudyResults, data: str) -> str:
    """How tests were made; nothing where none was."""
    comparisons = [comparison for comparison in results.comparisons[data] if comparison.t_test is not None]
    if not comparisons:
        return ""
    number = "1 comparison" if len(comparisons) == 1 else f"{len(comparisons)} comparisons"
    pairs = sorted({comparison.pairs for comparison in comparisons})
    # The signed-rank test cannot give less, however clear the case: all n differences of one sign.
    least = 2.0 ** (1 - pairs[-1])
    return (
        f"† differs from {comparisons[0].best} by the paired t-test, ‡ by Wilcoxon's test too (p < {SIGNIFICANT}, Holm-"
        f"corrected over {number}; {results.study.pairs} paired, {pairs[-1]} pairs, with which "
        f"Wilcoxon's p before correction is at least {least:.2g})."
    )


def to_csv(results: StudyResults) -> str:
    """A line per row and data set; empty where not known."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [f"{metric}{suffix}" for metric in METRICS for suffix in ("", "_std", "_paper")]
    costs = ("model_bytes", "flops_per_image", "sent_per_round", "received_per_round", "seconds_per_round", "seconds")
    writer.writerow(["study", "data", "method", "view", "seeds", *columns, *costs, "rule"])
    for row in results.rows:
        if not row.runs:
            continue
        cells: list[Any] = []
        for metric in METRICS:
            score = row.scores.get(metric)
            cells += [score.mean, score.std] if score else [None, None]
            cells.append(row.row.paper.get(metric))
        own = cost(results, row)
        seeds = " ".join(str(run.cell.seed) for run in row.runs)
        labels = [results.study.name, row.data, row.row.name, row.view, seeds]
        writer.writerow([*labels, *cells, *(own[key] for key in costs), results.rule])
    return out.getvalue()


def to_latex(results: StudyResults) -> str:
    r"""Every table as a `table` for `\usepackage{booktabs}`, the best of each column in bold, notes beneath."""
    return "\n".join(
        _latex_table(results, data, table) for data in results.data_names for table in results.study.tables
    )


def _latex_table(results: StudyResults, data: str, table: str) -> str:
    rows = results.of(data, table)
    columns = shown_columns(results, rows)
    head = [METRIC_TITLES[metric] + (" (paper)" if paper else "") for metric, paper in columns]
    lines = [
        r"\begin{table}",
        rf"\caption{{{latex_text(caption(results, data, table))}}}",
        r"\begin{tabular}{l" + "r" * len(columns) + "}",
        r"\toprule",
        " & ".join(map(latex_text, ["Method", *head])) + r" \\",
        r"\midrule",
    ]
    for row in rows:
        cells = [latex_text(row.row.name)]
        for metric, paper in columns:
            text = latex_text(cell(results, row, metric, paper))
            best = not paper and results.is_best(row, rows, metric)
            cells.append(rf"\textbf{{{text}}}" if best else text)
        lines.append(" & ".join(cells) + r" \\")
    beneath = latex_text(" ".join(notes(results, rows)))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", rf"\par\footnotesize {beneath}", r"\end{table}", ""])


def cell(results: StudyResults, row: RowResult, metric: Metric, paper: bool) -> str:
    """One cell of a table: our score, marked where tests tell it from the best, or the paper's."""
    if paper:
        return f"{row.row.paper[metric]:.2f}" if metric in row.row.paper else "–"
    return number(row.scores.get(metric)) + (marks(results, row) if metric == results.study.primary else "")


def shown_columns(results: StudyResults, rows: Sequence[RowResult]) -> list[tuple[Metric, bool]]:
    """The columns of a table: each metric of the study, and beside it the paper's where it has any."""
    columns: list[tuple[Metric, bool]] = []
    for metric in results.study.metrics:
        columns.append((metric, False))
        if any(metric in row.row.paper for row in rows):
            columns.append((metric, True))
    return columns


def caption(results: StudyResults, data: str, table: str) -> str:
    """What a table shows."""
    study = results.study
    texts = (table, study.title or study.name, data, f"{results.part.capitalize()}, per cent.")
    return ". ".join(text for text in texts if text)


def to_markdown(results: StudyResults) -> str:
    """A table by data set for documentation: the main score of each kind of model, the others, the paper's, time and
    traffic."""
    parts = []
    for data in results.data_names:
        rows = [row for row in results.of(data) if row.runs]
        columns = shown_columns(results, rows)
        head = _markdown_head(results, columns)
        lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
        lines += [_line(_markdown_cells(results, row, columns)) for row in rows]
        beneath = notes(results, rows)
        if any(row.row.name == "fedavg" for row in rows):
            beneath.append("Time and traffic are relative to fedavg.")
        parts += [data, "\n".join(lines), " ".join(beneath)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_head(results: StudyResults, columns: Sequence[tuple[Metric, bool]]) -> list[str]:
    main = [f"{METRIC_TITLES[results.study.primary]}, {VIEW_TITLES[view]}" for view in _markdown_views(results)]
    rest = [METRIC_TITLES[metric] + (", paper" if paper else "") for metric, paper in columns[1:]]
    return ["method", *main, *rest, "s per round", "relative", "sent", "relative"]


def _markdown_views(results: StudyResults) -> list[str]:
    """The kinds of model whose main score is shown: those after local training only where the study reports them."""
    return [view for view in VIEW_TITLES if view != "trained" or results.study.scope == "trained"]


def _markdown_cells(results: StudyResults, row: RowResult, columns: Sequence[tuple[Metric, bool]]) -> list[str]:
    views = [number(row.scores_of(view).get(results.study.primary)) for view in _markdown_views(results)]
    rest = [cell(results, row, metric, paper) for metric, paper in columns[1:]]
    own = cost(results, row)
    ratios = [f"x {own[key]:.2f}" if own[key] is not None else "–" for key in ("relative_seconds", "relative_traffic")]
    seconds, sent = f"{own['seconds_per_round']:.2f}", traffic(own["sent_per_round"] or 0)
    return [row.row.name, *views, *rest, seconds, ratios[0], sent, ratios[1]]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


COST_TITLES = (
    "Parameters",
    "Model",
    "FLOPs per image",
    "Sent per round",
    "Received per round",
    "Seconds per round",
    "Time per run",
    "Relative time",
    "Relative traffic",
)


def cost_cells(results: StudyResults, row: RowResult) -> list[str]:
    """Size, operations, traffic and time in words, under `COST_TITLES`."""
    own = cost(results, row)

    def told(key: str, form: Any) -> str:
        return form(own[key]) if own[key] is not None else "–"

    return [
        told("parameters", "{:,}".format),
        told("model_bytes", traffic),
        told("flops_per_image", "{:.3g}".format),
        told("sent_per_round", traffic),
        told("received_per_round", traffic),
        told("seconds_per_round", "{:.2f}".format),
        told("seconds", duration),
        told("relative_seconds", "{:.2f}".format),
        told("relative_traffic", "{:.2f}".format),
    ]
