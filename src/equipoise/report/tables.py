"""The numbers of a report: headline rows from the results of runs, and the same rows as CSV and LaTeX."""

import csv
import io
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from equipoise.report.events import Metrics, Result, Selection
from equipoise.report.latex import latex_text
from equipoise.report.record import RunRecord


@dataclass(frozen=True)
class Column:
    """One measured column: where its value is found, how it is headed, and which end of it is good."""

    key: str
    title: str
    higher_is_better: bool = True


COLUMNS = (
    Column("balanced_accuracy", "Balanced accuracy"),
    Column("macro_f1", "Macro F1"),
    Column("accuracy", "Accuracy"),
    Column("balanced_auc", "Balanced AUC"),
    Column("worst_class_recall", "Worst class recall"),
    Column("worst_site", "Worst site"),
    Column("spread", "Spread over sites", higher_is_better=False),
    Column("ece", "ECE", higher_is_better=False),
)
SITE_COLUMNS = tuple(column for column in COLUMNS if column.key not in ("worst_site", "spread"))
METRIC_TITLES = {column.key: column.title for column in COLUMNS} | {"loss": "Loss"}
SCOPE_TITLES = {"mean": "mean over sites", "pooled": "pooled", "cohort": "cohort", "site": "site"}
#: headings that fit a narrow terminal
SHORT_TITLES = {
    "balanced_accuracy": "bal.\nacc.",
    "macro_f1": "macro\nF1",
    "accuracy": "acc.",
    "balanced_auc": "bal.\nAUC",
    "worst_class_recall": "worst\nclass",
    "worst_site": "worst\nsite",
    "spread": "s.d.\nsites",
}


GroupKey = tuple[str, str, str | None]
"""Part, scope and site: rows with the same key measure the same kind of thing."""
RivalKey = tuple[GroupKey, Hashable]
"""The same, and the classes and places that were measured: rows with the same key may be compared."""


@dataclass(frozen=True)
class HeadlineRow:
    """One line of a results table; `values` holds fractions by column key, None where not measured.

    `site` is the site or cohort that was scored; in a mean, the one site that it is the mean of, if only one was.
    `label` tells the run from others in the table in the fewest words.
    """

    run: str
    method: str
    label: str
    part: str
    rule: str
    round: int | None
    view: str
    scope: str
    site: str | None
    values: Metrics
    worst_site_name: str | None = None
    measured: Hashable = None
    """The classes, and the places whose images were measured: other rows are rivals if theirs are the same."""

    @property
    def scope_title(self) -> str:
        """The scope in words, with the site or cohort it is about."""
        if self.scope == "mean" and self.site:
            return self.site
        return f"{SCOPE_TITLES[self.scope]} {self.site or ''}".rstrip()

    @property
    def group(self) -> GroupKey:
        """What kind of thing the row measures."""
        return (self.part, self.scope, None if self.scope == "mean" else self.site)

    @property
    def rival_key(self) -> RivalKey:
        """What the row measures, and on which images."""
        return self.group, self.measured


def run_labels(runs: Sequence[RunRecord], methods: bool = True) -> list[str]:
    """A short name per run, all different: the method (if `methods` will do), the run's name, its folder's, or its name
    with a number."""
    kinds = [[run.start.run for run in runs], [run.folder.resolve().name for run in runs]]
    for labels in [[run.start.method for run in runs], *kinds] if methods else kinds:
        if len(set(labels)) == len(labels):
            return labels
    return [f"{run.start.run} ({number})" for number, run in enumerate(runs, start=1)]


def headline(runs: Sequence[RunRecord]) -> list[HeadlineRow]:
    """Per run, view and scope (mean over sites, pooled, cohorts) one row; a lone site has no pooled row."""
    rows = []
    for run, name, label in zip(runs, run_labels(runs, methods=False), run_labels(runs)):
        for result in sorted(run.results, key=lambda result: result.view):
            redundant = result.scope == "pooled" and len(_site_results(run, result.view)) == 1
            if result.scope != "site" and not redundant:
                rows.append(_row(run, result, name, label))
    return rows


def site_rows(run: RunRecord) -> list[HeadlineRow]:
    """One row per view and site or cohort."""
    results = sorted(run.results, key=lambda result: result.view)
    return [_row(run, result, run.start.run, run.start.method) for result in results if result.site is not None]


def best_values(rows: Sequence[HeadlineRow]) -> dict[tuple[RivalKey, str], float]:
    """The best test value per column among rows that measure the same thing, where these differ."""
    best = {}
    for column in COLUMNS:
        rivals: dict[RivalKey, list[float]] = {}
        for row in rows:
            value = row.values.get(column.key)
            if row.part == "test" and value is not None:
                rivals.setdefault(row.rival_key, []).append(value)
        choose = max if column.higher_is_better else min
        best.update({(key, column.key): choose(values) for key, values in rivals.items() if len(set(values)) > 1})
    return best


def unlike(rows: Sequence[HeadlineRow]) -> str:
    """What to say where rows of one kind are of different classes or sites; nothing where all compare."""
    measured: dict[GroupKey, set[Hashable]] = {}
    for row in rows:
        measured.setdefault(row.group, set()).add(row.measured)
    if all(len(found) == 1 for found in measured.values()):
        return ""
    return "Some runs are of other classes or sites: their scores do not compare, and bold is among equals only."


def _row(run: RunRecord, result: Result, name: str, label: str) -> HeadlineRow:
    values = {column.key: result.metrics.get(column.key) for column in SITE_COLUMNS}
    site, worst = result.site, None
    scored = _site_results(run, result.view)
    if result.scope == "mean" and len(scored) == 1:
        site = scored[0].site
    elif result.scope == "mean":
        worst, values["worst_site"] = _worst_site(scored)
        values["spread"] = result.extra.get("spread")
    return HeadlineRow(
        run=name,
        method=run.start.method,
        label=label,
        part=result.part,
        rule=result.rule,
        round=result.round,
        view=result.view,
        scope=result.scope,
        site=site,
        values=values,
        worst_site_name=worst,
        measured=(tuple(run.start.classes), frozenset(each.site for each in scored)),
    )


def _site_results(run: RunRecord, view: str) -> list[Result]:
    return [result for result in run.results if result.scope == "site" and result.view == view]


def _worst_site(results: Sequence[Result]) -> tuple[str | None, float | None]:
    """The site with the lowest balanced accuracy, and that value."""
    scores = {result.site: result.metrics.get("balanced_accuracy") for result in results}
    known = {site: score for site, score in scores.items() if score is not None}
    worst = min(known, key=lambda site: known[site], default=None)
    return worst, known.get(worst)


def selection_note(run: RunRecord) -> str:
    """How the reported round was chosen, in a sentence to print under a table."""
    if not run.finals:
        return f"{_why_no_test_results(run)}: these are the validation scores of {_rounds_shown(run)}."
    rules = {final.rule for final in run.finals}
    tested = {final.site for final in run.finals if final.scope == "site" and final.site}
    chosen = [_selection_sentence(selection, tested) for selection in run.selections if selection.rule in rules]
    if not chosen:
        chosen = [f"Rule {final.rule}, round {final.round}" for final in run.finals[:1]]
    return f"{'. '.join(chosen)}. Test data took no part in the choice."


def _why_no_test_results(run: RunRecord) -> str:
    if not run.finished:
        return "No test results yet"
    return "The test data was not measured" if run.has_test_data else "There is no test data"


def _rounds_shown(run: RunRecord) -> str:
    if run.selection and run.selection.sites:
        return "the rounds that sites chose"
    shown = max((result.round or 0 for result in run.results), default=0)
    averaged = run.selection and run.selection.rule == "mean_last"
    return f"the last rounds up to {shown}, averaged" if averaged else f"round {shown}"


def _selection_sentence(selection: Selection, tested: set[str]) -> str:
    score = f"{METRIC_TITLES.get(selection.metric, selection.metric).lower()} ({selection.view} view)"
    value = f"{score}, {percent(selection.score)} %"
    if selection.sites:
        rounds = ", ".join(f"{site} {choice.round}" for site, choice in selection.sites.items())
        others = f"; the others {selection.round}" if tested - selection.sites.keys() else ""
        return f"For each site the round that is best by its own validation {value} on average: {rounds}{others}"
    if selection.missing:
        value += f" (not measured at {', '.join(selection.missing)})"
    match selection.rule:
        case "mean_last" if selection.value is None:
            return f"No validation data: the mean over the last rounds up to {selection.round}"
        case _ if selection.value is None:
            return f"No validation data: the last round, {selection.round}"
        case "best":
            return f"Selected round {selection.round}, the best by validation {value}"
        case "last":
            return f"The last round, {selection.round}; its validation {value}"
        case "mean_last":
            return f"Mean over the last rounds up to {selection.round}, of which the last has validation {value}"
    return f"Rule {selection.rule}: round {selection.round}, validation {value}"


def percent(value: float | None) -> str:
    """A fraction in per cent with two decimals, a dash when unknown."""
    return "–" if value is None else f"{100 * value:.2f}"


def to_csv(rows: Sequence[HeadlineRow]) -> str:
    """The rows as CSV, fractions in full precision, empty where not measured."""
    labels = ("run", "method", "part", "rule", "round", "view", "scope", "site")
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*labels, *(column.key for column in COLUMNS)])
    for row in rows:
        values = [row.values.get(column.key) for column in COLUMNS]
        writer.writerow([*(getattr(row, label) for label in labels), *values])
    return out.getvalue()


def to_latex(rows: Sequence[HeadlineRow]) -> str:
    r"""The rows as a `tabular` for `\usepackage{booktabs}`, in per cent, the best of rivals in bold."""
    best = best_values(rows)
    several_runs = len({row.run for row in rows}) > 1
    lines = [
        r"\begin{tabular}{lll" + "r" * len(COLUMNS) + "}",
        r"\toprule",
        " & ".join(["Method", "View", "Scope", *(column.title for column in COLUMNS)]) + r" \\",
        r"\midrule",
    ]
    for row in rows:
        method = f"{row.method} ({row.run})" if several_runs else row.method
        scope = row.scope_title if row.part == "test" else f"{row.scope_title}, validation"
        cells = [latex_text(text) for text in (method, row.view, scope)]
        for column in COLUMNS:
            value = row.values.get(column.key)
            number = "--" if value is None else percent(value)
            winner = value is not None and best.get((row.rival_key, column.key)) == value
            cells.append(rf"\textbf{{{number}}}" if winner else number)
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])
