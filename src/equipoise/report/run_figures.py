"""The figures of one run: what was learnt, by round, class and site, who held which data, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from equipoise.cells import dense
from equipoise.report import plotting as plot
from equipoise.report.curves import flat, metric_curves, retrogress, work_curves
from equipoise.report.log_lines import Start
from equipoise.report.measured import in_words, main_metric, metrics_of
from equipoise.report.plotting import Figure, Panel, Trace
from equipoise.report.record import RunRecord
from equipoise.report.run_tables import SCOPE_TITLES
from equipoise.report.wording import byte_unit, traffic

BUBBLES = (
    "Training images of each class at each site. The area of a bubble is the count; a cross marks a class that the "
    "site lacks."
)
#: rows of one page of a figure; the reader turns the pages
MOST_ROWS = 30
#: sites that get a page, the largest ones
MOST_SITES = 200
#: classes of a heat map, the commonest ones
MOST_CLASSES = 40


def learning_curves(run: RunRecord) -> Figure | None:
    """Validation metrics against rounds, panels by view and metric, a line per site and one for the mean."""
    names = list(run.evaluations["site"][run.evaluations["part"] == "valid"].unique())
    panels = []
    for view in ("global", "personal"):
        chosen = {number for own in run.selections if own.view == view and own.rule == "best" for number in own.rounds}
        marks = [plot.line_at(number, dash="dot") for number in sorted(chosen)[: plot.MOST_LINES]]
        for metric in (metric for metric in metrics_of(run) if metric.in_curves):
            curves = metric_curves(run, metric.name, view)
            title = metric.title + (" (%)" if metric.scale == 100 else "")
            if not curves.empty:
                traces = plot.site_curves(curves, metric.scale, names)
                named = f"{title}, {view} model"
                panels.append(Panel(traces, plot.round_axis(), {}, named, shapes=marks))
    return plot.figure(
        panels,
        "learning",
        "Learning curves on validation data. Thin lines are sites; the thick line is the mean over the sites scored in "
        "that round. Round 0 is the initial model; a dotted line marks the selected round.",
    )


def retrogress_curves(run: RunRecord) -> Figure | None:
    """Drop of the first metric after each communication, per site and as the mean; None where all are zero."""
    drops = retrogress(run)
    if flat(drops):
        return None
    traces = plot.site_curves(drops, 100)
    zero = [plot.line_at(0, "y", "solid")]
    return plot.figure(
        [Panel(traces, plot.round_axis(), {}, f"Drop in {in_words(run)} (points)", shapes=zero)],
        "retrogress",
        f"Retrogress: {in_words(run)} of a site’s model right after local training minus that of the model it holds "
        "when the round ends, on the same validation data. Above zero, communication made the model worse.",
    )


def work_figure(run: RunRecord) -> Figure | None:
    """Training loss, and seconds of work, per site and round, with the time of the whole round."""
    loss, seconds = work_curves(run, "loss"), work_curves(run, "seconds")
    panels = []
    if not loss.empty:
        panels.append(Panel(plot.site_curves(loss), plot.round_axis(), {}, "Training loss"))
    if not seconds.empty:
        wall = run.rounds["seconds"]
        traces = plot.site_curves(seconds, mean=False)
        traces.append(plot.curve(wall, "whole round", plot.INK, width=2, dash="dash"))
        panels.append(Panel(traces, plot.round_axis(), {"rangemode": "tozero"}, "Seconds per round"))
    told = "Mean training loss of each site, and its seconds of work; dashed: of the whole round."
    return plot.figure(panels, "work", told)


def federation_bubbles(run: RunRecord | Start) -> Figure | None:
    """Training images per site and class: a bubble's area is the count; a cross marks a class that a site lacks."""
    counts = run.training_images
    if counts.empty:
        return None
    shown = counts[counts.sum().sort_values(ascending=False, kind="stable").index[:MOST_CLASSES]]
    most = max(counts.to_numpy().max(), 1)
    pages = {label: [_bubbles(rows, most)] for label, rows in pages_of(shown).items()}
    return plot.paged("Sites", pages, "federation", BUBBLES, 300)


def _bubbles(counts: pd.DataFrame, most: int) -> Panel:
    sites, classes = plot.distinct(list(counts.index), 26), plot.distinct(list(counts.columns))
    values = counts.to_numpy()
    rows, columns = np.nonzero(values)
    lacking = np.nonzero(values == 0)
    sizes = np.round(34 * np.sqrt(values[rows, columns] / most) + 3, 1).tolist()
    texts = [f"{value:,}" for value in values[rows, columns]]
    there = {
        "type": "scatter",
        "mode": "markers+text" if values.size <= plot.MOST_NUMBERED else "markers",
        "x": columns.tolist(),
        "y": rows.tolist(),
        "marker": {"size": sizes, "color": plot.SOFT, "line": {"width": 1, "color": plot.ACCENT}},
        "text": texts,
        "textfont": {"size": 11},
        # a count that does not fit its bubble stands beside it
        "textposition": [f"middle {'center' if size > 7 * len(t) else 'right'}" for size, t in zip(sizes, texts)],
        "customdata": [[sites[row], classes[column]] for row, column in zip(rows, columns)],
        "hovertemplate": "%{customdata[0]}, %{customdata[1]}: %{text}<extra></extra>",
    }
    absent = plot.dots(lacking[1].tolist(), lacking[0].tolist(), "none", plot.MUTED, [], symbol="x-thin", size=6)
    absent |= {"hoverinfo": "skip", "hovertemplate": None, "showlegend": False}
    axis = {
        "tickvals": [*range(len(classes))],
        "ticktext": classes,
        "showgrid": False,
        "range": [-0.6, len(classes) - 0.4],
    }
    return Panel([there, absent], axis, plot.rows_axis(list(counts.index)), height=110 + 40 * len(sites))


def recall_map(run: RunRecord) -> Figure | None:
    """Recall per class at every site and over all, a page per view and per so many sites."""
    pages = {}
    for view in ("global", "personal"):
        own = _scored(run, view, "recall", ["pooled", "mean", "cohort", "site"])
        recall = pd.DataFrame(own["recall"].tolist(), _places(own), run.start.classes, dtype=float) * 100
        for label, rows in pages_of(recall).items() if len(own) else ():
            pages[f"{view} model{f', {label}' if label else ''}"] = [_recall_panel(rows, run)]
    told = "Recall of each class at each site, per cent. Grey: the site has no image of the class to score."
    return plot.paged("Recall of the", pages, "recall", told, 300)


def _recall_panel(recall: pd.DataFrame, run: RunRecord) -> Panel:
    common = run.training_images.sum().sort_values(ascending=False, kind="stable").index[:MOST_CLASSES]
    recall = recall[[name for name in recall if name in set(common)]]
    hover = np.array(
        [
            [f"{plot.plain(site)}, {plot.plain(name)}: {value:.1f} %" for name, value in zip(recall, values)]
            for site, values in zip(recall.index, recall.to_numpy())
        ]
    )
    trace = plot.heat(recall.to_numpy(), list(recall.index), list(recall), hover)
    return Panel([trace], **plot.heat_axes(), height=110 + 26 * len(recall))


def confusion_matrices(run: RunRecord) -> Figure | None:
    """Confusion of the view a site is left with, pooled, then by site; shaded by share of the true class."""
    shown = with_confusion(run)[: MOST_SITES + 1]
    pages = {
        label: [_confusion(dense(matrix).astype(float), run.start.classes)]
        for label, matrix in zip(plot.distinct(_places(shown), 60), shown["confusion"])
    }
    told = "Confusion matrices of the model a site is left with: the share of each true class, per cent. The mouse "
    return plot.paged("Images of", pages, "confusion", f"{told}tells counts.{averaged_note(run)}", 300)


def _confusion(counts: np.ndarray, classes: Sequence[str]) -> Panel:
    totals = counts.sum(axis=1)
    kept = np.sort(np.argsort(-totals, kind="stable")[:MOST_CLASSES])
    share = 100 * counts / np.where(totals, totals, np.nan)[:, None]
    names = [plot.plain(name, 40) for name in classes]
    hover = np.array(
        [
            [
                f"{names[true]} taken for {names[told]}: {counts[true, told]:,.4g} of {totals[true]:,.4g}"
                f" ({share[true, told]:.1f} %)"
                for told in kept
            ]
            for true in kept
        ]
    )
    labels = [classes[place] for place in kept]
    axes = plot.heat_axes()
    axes["x"] |= {"title": "predicted class"}
    axes["y"] |= {"title": "true class"}
    return Panel([plot.heat(share[np.ix_(kept, kept)], labels, labels, hover)], **axes, height=130 + 30 * len(kept))


def site_pages(run: RunRecord) -> Figure | None:
    """A page per site: its learning curve before the mean over sites, and its recall of each class."""
    curves = 100 * metric_curves(run, main_metric(run).name, run.round_view)
    own = _scored(run, run.end_view, "recall", ["site"]).drop_duplicates("site").set_index("site")["recall"]
    largest = run.images["train"].sum(axis=1).sort_values(ascending=False, kind="stable").index
    sites = [site for site in largest if site in curves or site in own.index][:MOST_SITES]
    if len(sites) < 2:
        return None
    mean, pages = curves.mean(axis=1), {}
    for label, site in zip(plot.distinct(sites, 60), sites):
        panels = []
        if site in curves:
            traces = [
                plot.curve(mean, "mean over sites", plot.MUTED),
                plot.curve(curves[site], site, plot.ACCENT, 1, 3),
            ]
            panels.append(Panel(traces, plot.round_axis(), {}, f"{main_metric(run).title} (%), {run.round_view} model"))
        if site in own.index:
            panels.append(_recall_bars(run, own[site]))
        pages[label] = panels
    told = "One site: its learning on validation data before the mean over sites, and what it finds of each class."
    return plot.paged("Site", pages, "sites", told)


def _recall_bars(run: RunRecord, recall: Sequence[float | None]) -> Panel:
    found = pd.Series(recall, run.start.classes, dtype=float).dropna()[:MOST_CLASSES]
    trace: Trace = {"type": "bar", "orientation": "h", "x": plot.numbers(found, 100), "y": [*range(len(found))]}
    trace |= {"marker": {"color": plot.ACCENT}, "hovertemplate": "%{x} %<extra></extra>", "showlegend": False}
    axis = {"title": "recall (%)", "range": [0, 100]}
    return Panel([trace], axis, plot.rows_axis(list(found.index), 18), "Recall of each class", 90 + 24 * len(found))


def traffic_per_round(run: RunRecord) -> Figure | None:
    """What each site sends and receives per round; None where nothing moved."""
    means = run.work.groupby("site", sort=False, observed=True)[["sent", "received"]].mean()
    if not means.any(axis=None):
        return None
    divisor, unit = byte_unit(means.max(axis=None))
    pages = {}
    for label, rows in pages_of(means).items():
        traces = [
            {
                "type": "bar",
                "orientation": "h",
                "name": f"{way} by the site",
                "x": plot.numbers(rows[way] / divisor, 1, 3),
                "y": [*range(len(rows))],
                "text": [f"{way} {traffic(size)}" for size in rows[way]],
                "textposition": "none",
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": colour},
                "showlegend": True,
            }
            for way, colour in (("sent", plot.ACCENT), ("received", plot.SECOND))
        ]
        axis = {"title": f"{unit} per round"}
        height = 90 + 28 * len(rows)
        pages[label] = [Panel(traces, axis, plot.rows_axis(list(rows.index)), "Traffic of a site", height)]
    return plot.paged("Sites", pages, "traffic", "Mean traffic of each site per round.")


# ---- which results, and in which pages ---------------------------------------------------------------------------


def pages_of(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Pages of at most MOST_ROWS lines, named by their numbers where there are several."""
    starts = range(0, len(rows), MOST_ROWS)
    if len(starts) < 2:
        return {"": rows}
    return {f"{s + 1} to {min(s + MOST_ROWS, len(rows))} of {len(rows)}": rows.iloc[s : s + MOST_ROWS] for s in starts}


def with_confusion(run: RunRecord) -> pd.DataFrame:
    """The confusion matrices of the view a site is left with, those over all sites first."""
    return _scored(run, run.end_view, "confusion", ["pooled", "cohort", "site"])


def _scored(run: RunRecord, view: str, column: str, scopes: Sequence[str]) -> pd.DataFrame:
    """The results of a view that have this column, scopes in their order; of a single site no mean and no pool."""
    rows = run.results[(run.results["view"] == view) & (run.results[column].str.len() > 0)]
    rows = rows[rows["scope"].isin(scopes)]
    if (rows["scope"] == "site").sum() == 1:
        rows = rows[rows["site"] != ""]
    return rows.sort_values("scope", key=lambda scope: scope.map(scopes.index), kind="stable")


def averaged_note(run: RunRecord) -> str:
    """A sentence for the caption when matrices are means over rounds."""
    rows = with_confusion(run)
    numbers = sorted({*rows["rounds"][rows["scope"] != "cohort"]})
    if not numbers or numbers[-1] == 1:
        return ""
    cohorts = "; those of cohorts are of the last" if (rows["scope"] == "cohort").any() else ""
    return f" Each number is the mean over {'up to ' * (len(numbers) > 1)}{numbers[-1]} rounds{cohorts}."


def _places(rows: pd.DataFrame) -> list[str]:
    """The site of each result, or its scope in words."""
    return [site or SCOPE_TITLES[scope] for site, scope in zip(rows["site"], rows["scope"])]
