"""The numbers of a run, or of several side by side: frames with a line per model and place that was scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd
from markupsafe import Markup

from equipoise.mask_metrics import MASK_METRICS
from equipoise.metrics import METRICS
from equipoise.report.measured import EVERY, main_metric
from equipoise.report.record import TOLD, RunRecord
from equipoise.report.sheet import Sheet, tabular
from equipoise.report.wording import percent


class Column(NamedTuple):
    """One measured column, how it is headed, and which end of it is good."""

    name: str
    title: str
    heading: str
    higher_is_better: bool = True
    share: bool = True

    def told(self, value: float | None) -> str:
        """A value as tables show it: shares in per cent, distances in their unit."""
        return percent(None if value is None else value if self.share else value / 100)


_MEASURED = [Column(m.name, m.title, m.heading, m.higher_is_better, m.share) for m in EVERY if m.in_tables]
_OVER_SITES = [
    Column("worst_site", "Worst site", "worst\nsite"),
    Column("spread", "Spread over sites", "s.d.\nsites", higher_is_better=False),
]
#: the columns of a report: figures over sites stand before the errors
COLUMNS = [
    *(column for column in _MEASURED if column.higher_is_better),
    *_OVER_SITES,
    *(column for column in _MEASURED if not column.higher_is_better),
]
#: the columns of each task
OF_TASKS = [{metric.name for metric in metrics if metric.in_tables} for metrics in (METRICS, MASK_METRICS)]
#: what a frame of results holds besides metrics from outside
KNOWN = {*TOLD, *(metric.name for metric in EVERY), *(column.name for column in _OVER_SITES), "n"}
SITE_COLUMNS = [column for column in COLUMNS if column not in _OVER_SITES]
SCOPE_TITLES = {"mean": "mean over sites", "pooled": "pooled", "cohort": "cohort", "site": "site"}
#: lines that agree in these measure the same kind of thing
GROUP = ["part", "scope", "group_site"]


def run_labels(runs: Sequence[RunRecord], methods: bool = True) -> list[str]:
    """A short name per run, all different: the method (if `methods` will do), the run's name, its folder's, or its name
    with a number."""
    kinds = [[run.start.run for run in runs], [run.folder.resolve().name for run in runs]]
    for labels in [[run.start.method for run in runs], *kinds] if methods else kinds:
        if len(set(labels)) == len(labels):
            return labels
    return [f"{run.start.run} ({number})" for number, run in enumerate(runs, start=1)]


def headline(runs: Sequence[RunRecord]) -> pd.DataFrame:
    """Per run, view and scope (mean over sites, pooled, cohorts) one line; a lone site has no pooled line.

    `title` is the scope in words, `worst` the name of the worst site, `label` tells the run from others in the fewest
    words, and `measured` are the classes and places that were scored.
    """
    names, labels = run_labels(runs, methods=False), run_labels(runs)
    every = [told(run).assign(run=name, label=label) for run, name, label in zip(runs, names, labels)]
    rows = pd.concat(every, ignore_index=True)
    return rows[(rows["scope"] != "site") & ~((rows["scope"] == "pooled") & rows["alone"])]


def told(run: RunRecord) -> pd.DataFrame:
    """All results of a run by view, with figures over sites; a mean of one site alone is named after it."""
    if "told" not in run.made:
        run.made["told"] = _told(run)
    return run.made["told"]


def _told(run: RunRecord) -> pd.DataFrame:
    rows = run.results.sort_values("view", kind="stable", ignore_index=True)
    rows = rows.reindex(columns=[*rows.columns.union([column.name for column in COLUMNS], sort=False), "worst"])
    of_site = rows[rows["scope"] == "site"]
    sites = dict(iter(of_site.groupby("view")))
    for view, own in sites.items():
        mean = (rows["view"] == view) & (rows["scope"] == "mean")
        known = own[main_metric(run).name].dropna()
        if len(own) == 1:
            rows.loc[mean, ["site", "spread"]] = [own["site"].iloc[0], float("nan")]
        elif len(known):
            rows.loc[mean, "worst_site"] = known.min()
            rows["worst"] = rows["worst"].astype(object).mask(mean, own["site"][known.idxmin()])
    rows["method"], rows["group_site"] = run.start.method, rows["site"].mask(rows["scope"] == "mean", "")
    rows["alone"] = [len(sites.get(view, ())) == 1 for view in rows["view"]]
    measured = {view: (tuple(run.start.classes), frozenset(own["site"])) for view, own in sites.items()}
    rows["measured"] = [measured.get(view, (tuple(run.start.classes), frozenset())) for view in rows["view"]]
    titles = rows["scope"].map(SCOPE_TITLES) + (" " + rows["site"]).where(rows["site"] != "", "")
    rows["title"] = titles.mask((rows["scope"] == "mean") & (rows["site"] != ""), rows["site"])
    return rows


def columns_of(rows: pd.DataFrame, columns: Sequence[Column] = COLUMNS) -> list[Column]:
    """The columns of the tasks whose metrics some rows have, and of metrics from outside."""
    present = {name for name in rows if rows[name].notna().any()}
    absent = [names for names in OF_TASKS if not names & present]
    other = set().union(*absent) if len(absent) < len(OF_TASKS) else OF_TASKS[1]
    from_outside = [name for name in rows if name in present - KNOWN and rows[name].dtype == float]
    found = [Column(name, name.replace("_", " ").capitalize(), name.replace("_", "\n")) for name in from_outside]
    return [*(column for column in columns if column.name not in other), *found]


def unlike(rows: pd.DataFrame) -> str:
    """What to say where rows of one kind are of different classes or sites; nothing where all compare."""
    if (rows.groupby(GROUP)["measured"].nunique() <= 1).all():
        return ""
    return "Some runs have other classes or sites: their scores cannot be compared."


def group_titles(rows: pd.DataFrame) -> tuple[pd.DataFrame, dict[int, str]]:
    """Lines that measure the same kind of thing together, and over which of them stands what they measure."""
    rows = rows.sort_values("scope", key=lambda scope: scope.map([*SCOPE_TITLES].index), kind="stable")
    rows = pd.concat([own for _, own in rows.groupby(["scope", "part", "group_site"], sort=False)] or [rows])
    parts = {"test": "test", "valid": "validation (no test results)"}
    titles = [
        f"{SCOPE_TITLES[scope].capitalize()}{f' {site}' if site else ''}, {parts[part]}"
        for part, scope, site in zip(rows["part"], rows["scope"], rows["group_site"])
    ]
    return rows, {place: title for place, title in enumerate(titles) if title not in titles[:place]}


def scores_sheet(
    caption: str, rows: pd.DataFrame, names: dict[str, str], columns: Sequence[Column] = COLUMNS, **more: Any
) -> Sheet:
    """Lines of results in per cent, named by what stands in some of their columns: {heading: column}."""
    index = pd.MultiIndex.from_frame(rows[[*names.values()]], names=[*names])
    cells = pd.DataFrame(
        {column.title: rows[column.name].map(column.told) for column in columns_of(rows, columns)}, dtype=object
    )
    return Sheet(caption, cells.set_axis(index), **more)


def with_worst_site(shown: Sheet, rows: pd.DataFrame) -> Sheet:
    """The sheet with the name of the worst site under its score."""
    worst = next(column.title for column in COLUMNS if column.name == "worst_site")
    named = [
        Markup("{}<small>{}</small>").format(text, name) if pd.notna(name) else text
        for text, name in zip(shown.cells[worst], rows["worst"])
    ]
    return replace(shown, cells=shown.cells.assign(**{worst: named}))


def to_csv(rows: pd.DataFrame) -> str:
    """The rows as CSV, fractions in full precision, empty where not measured."""
    labels = ["run", "method", "part", "rule", "round", "view", "scope", "site"]
    return rows[[*labels, *(column.name for column in columns_of(rows))]].to_csv(index=False, lineterminator="\n")


def to_latex(rows: pd.DataFrame) -> str:
    r"""The rows as a `tabular` for `\usepackage{booktabs}`, in per cent."""
    several = rows["run"].nunique() > 1
    told = rows.assign(
        method=rows["method"] + " (" + rows["run"] + ")" if several else rows["method"],
        title=[title + ("" if part == "test" else ", validation") for title, part in zip(rows["title"], rows["part"])],
    )
    return tabular(scores_sheet("", told, {"Method": "method", "View": "view", "Scope": "title"})) + "\n"
