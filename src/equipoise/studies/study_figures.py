"""The figures of a study: scores with the paper's beside them, learning curves with bands over seeds, rare classes,
retrogress, ranks, and what methods cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from equipoise.contract.config import EvaluationConfig
from equipoise.metrics import METRICS
from equipoise.report import plotting as plot
from equipoise.report.curves import metric_curves, retrogress
from equipoise.report.run_facts import METRIC_TITLES
from equipoise.report.wording import byte_unit, traffic
from equipoise.statistics import Spread
from equipoise.studies.results import StudyResults
from equipoise.studies.rows import RowResult, RunResult

PAPER = plot.PALETTE[1]
MOST_CLASSES = 6
MOST_METRICS = 5
ROW_HEIGHT = 0.22


def scores(results: StudyResults, rows: Sequence[RowResult]) -> Figure | None:
    """The study's metrics by row: mean and deviation, each seed as a dash, the paper's number as a diamond."""
    rows = [row for row in rows if row.runs]
    measured = [metric for metric in results.study.metrics if any(metric in row.scores for row in rows)]
    metrics = measured[:MOST_METRICS]
    if not metrics:
        return None
    figure, panels = _by_row(rows, len(metrics))
    alone = {row.scores[metric].std is None for row in rows for metric in metrics if metric in row.scores}
    for ax, metric in zip(panels, metrics):
        for place, row in enumerate(rows):
            if metric not in row.scores:
                continue
            _dot(ax, row.scores[metric], place)
            seeds = list(row.values(metric, by_site=False).values())
            if len(seeds) > 1:
                ax.plot(seeds, [place] * len(seeds), "|", color=plot.ACCENT_LIGHT, markersize=8, zorder=1.5)
            if metric in row.row.paper:
                ax.plot(row.row.paper[metric], place, "D", color="none", markeredgecolor=PAPER, markersize=5)
        ax.set(title=METRIC_TITLES[metric], xlabel="%")
    entries = [("ours: mean and deviation over seeds", "o", plot.ACCENT, plot.ACCENT)] if False in alone else []
    if True in alone:
        entries.append(("ours, one seed", "o", "white", plot.ACCENT))
    if any(row.row.paper for row in rows):
        entries.append(("paper", "D", "none", PAPER))
    handles = [Line2D([], [], linestyle="none", marker=m, color=c, markeredgecolor=e) for _, m, c, e in entries]
    figure.legend(handles, [text for text, *_ in entries], loc="outside upper left", ncols=3)
    return figure


# ---- curves ------------------------------------------------------------------------------------------------------


def learning(results: StudyResults, rows: Sequence[RowResult]) -> Figure | None:
    """A panel per row: the primary metric on validation data, its band over seeds; the other rows in grey."""
    metric = results.study.primary
    chosen_from = {row.row.name: first_eligible(row) for row in rows}
    return _small_multiples(
        rows,
        lambda run, row: metric_curves(run.record, metric, curve_view(run, row)),
        f"{METRIC_TITLES[metric]} (%)",
        chosen_from=chosen_from,
    )


def first_eligible(row: RowResult) -> int:
    """The first round that a row could choose; 1 where it chooses none."""
    settings = [EvaluationConfig.model_validate(run.record.start.config.get("evaluation", {})) for run in row.runs]
    return min((each.first_round for each in settings if each.rule == "best"), default=1)


def curve_view(run: RunResult, row: RowResult) -> str:
    """The models whose curve stands for a row: those it reports; if rounds did not measure them, what chose the round.

    Models that sites make by fine-tuning wait for the final test unless they choose the round themselves.
    """
    scored = run.record.evaluations
    measured = {*scored["view"][scored["part"] == "valid"]}
    deciding = [selection.view for selection in run.record.selections]
    return next((view for view in (row.view, *deciding) if view in measured), row.view)


def retrogress_panels(results: StudyResults, rows: Sequence[RowResult]) -> Figure | None:
    """A panel per row: the mean drop after communication, its band over seeds; the other rows in grey."""
    metric = retrogress_metric(results)
    return _small_multiples(
        rows, lambda run, row: retrogress(run.record, metric), "Drop (points)", about_zero=True, chosen_from={}
    )


def retrogress_metric(results: StudyResults) -> str:
    """The score whose drop is drawn: the primary one, unless it has none."""
    with_retrogress = [metric.name for metric in METRICS if metric.has_retrogress]
    primary = results.study.primary
    return primary if primary in with_retrogress else with_retrogress[0]


def _small_multiples(
    rows: Sequence[RowResult],
    curves_of: Callable[[RunResult, RowResult], pd.DataFrame],
    label: str,
    *,
    chosen_from: Mapping[str, int],
    about_zero: bool = False,
) -> Figure | None:
    """A panel per row that has curves: with a line at zero, or without the steep first rounds, which are cut below;
    dotted is the round from which one was chosen."""
    found = {row.row.name: [100 * curves_of(run, row).mean(axis=1) for run in row.runs] for row in rows}
    curves = {name: pd.concat(own, axis=1).dropna(axis=1, how="all") for name, own in found.items() if own}
    curves = {name: own for name, own in curves.items() if not own.empty}
    if not curves:
        return None
    means = {name: own.mean(axis=1) for name, own in curves.items()}
    figure, panels = plot.small_panels(list(curves), label, 5, 0.3, 1.55)
    for ax, (name, own) in zip(panels, curves.items()):
        if about_zero:
            ax.axhline(0, color=plot.MUTED, linewidth=0.8)
        for other, mean in means.items():
            if other != name:
                plot.draw_curve(ax, mean, color=plot.FAINT, linewidth=0.8)
        if chosen_from.get(name, 1) > 1:
            ax.axvline(chosen_from[name], color=plot.MUTED, linewidth=0.8, linestyle=":")
        band = _band(own)
        if len(band):
            ax.fill_between(band.index, band["low"], band["high"], color=plot.ACCENT_LIGHT, linewidth=0, alpha=0.6)
        plot.draw_curve(ax, means[name], color=plot.ACCENT, linewidth=1.7)
    if not about_zero:
        panels[0].set_ylim(bottom=_floor(curves.values()))
    return figure


def _floor(rows: Iterable[pd.DataFrame]) -> float | None:
    """Where an axis in per cent may begin: below all curves and bands, but for the first tenth of their rounds."""
    lowest = []
    for curves in rows:
        later = curves[curves.index > max(curves.index) / 10]
        lowest += [later.min(axis=None), _band(curves)["low"].reindex(later.index).min()]
    return max(0.0, np.nanmin(lowest) - 3) if np.isfinite(lowest).any() else None


def _band(curves: pd.DataFrame) -> pd.DataFrame:
    """One standard deviation to either side of the mean, in the rounds that all seeds have; none with one seed."""
    known = curves.dropna() if curves.shape[1] > 1 else curves[:0]
    mean, deviation = known.mean(axis=1), known.std(axis=1)
    return pd.DataFrame({"low": mean - deviation, "high": mean + deviation})


def over_data(results: StudyResults) -> Figure | None:
    """A panel per row: its main score on each data set, in the study's order; the other rows in grey."""
    metric, names = results.study.primary, results.data_names
    found: dict[str, dict[int, Spread]] = {}
    for row in results.rows:
        if metric in row.scores:
            found.setdefault(row.row.name, {})[names.index(row.data)] = row.scores[metric]
    if len(names) < 2 or not found:
        return None
    figure, panels = plot.small_panels(list(found), f"{METRIC_TITLES[metric]} (%)", 5, 0.6, 1.55)
    for ax, (name, own) in zip(panels, found.items()):
        for other in (each for each in found if each != name):
            ax.plot(list(found[other]), [each.mean for each in found[other].values()], color=plot.FAINT, linewidth=0.8)
        deviations = [each.std or 0.0 for each in own.values()]
        means = [each.mean for each in own.values()]
        ax.errorbar(list(own), means, yerr=deviations, color=plot.ACCENT, marker="o", markersize=3.5, linewidth=1.5)
        ax.set_xlabel("")
        ax.set_xticks(range(len(names)), [plot.plain(name, 12) for name in names], rotation=45, ha="right")
    return figure


# ---- rows --------------------------------------------------------------------------------------------------------


def rare_classes(rows: Sequence[RowResult]) -> Figure | None:
    """Recall of the rarest classes by row, mean and deviation over seeds."""
    rows = [row for row in rows if row.recall]
    if not rows:
        return None
    totals = rows[0].runs[0].record.training_images.sum().to_dict()
    known = [name for name in totals if any(name in row.recall for row in rows)]
    classes = sorted(known, key=lambda name: totals[name])[:MOST_CLASSES]
    figure, panels = _by_row(rows, len(classes))
    for ax, name in zip(panels, classes):
        for place, row in enumerate(rows):
            if name in row.recall:
                value = row.recall[name]
                ax.plot([0, value.mean], [place, place], color=plot.ACCENT_LIGHT, linewidth=1.2)
                _dot(ax, value, place)
        ax.set(title=f"{plot.plain(name, 16)} ({totals[name]:,})", xlim=(-3, 103), xlabel="Recall (%)")
    return figure


def rank_plot(results: StudyResults) -> Figure | None:
    """Rows by mean rank; every block (data set, or site) is a dot."""
    means = results.ranking.means
    if not means:
        return None
    names = sorted(means, key=means.__getitem__)
    figure = plot.canvas(plot.FULL_WIDTH, 0.8 + ROW_HEIGHT * len(names))
    ax = figure.subplots()
    for place, name in enumerate(names):
        ranks = list(results.ranking.ranks[name].values())
        ax.plot(ranks, _stacked(ranks, place), "o", color=plot.ACCENT_LIGHT, markersize=4)
        ax.plot(means[name], place, "o", color=plot.ACCENT, markersize=6.5)
        margin = (1.01, place)  # beside the axes: dots would lie under it elsewhere
        ax.annotate(f"{means[name]:.2f}", margin, xycoords=ax.get_yaxis_transform(), va="center", fontsize=7.5)
    _name_rows(ax, names)
    ax.set(xlabel="Rank (1 is best)", xlim=(0.5, len(names) + 0.5))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure


def _stacked(ranks: Sequence[float], place: int) -> list[float]:
    """Heights about a row's place at which equal ranks do not hide each other, one above the next."""
    counts = Counter(ranks)
    step = min(0.2, 0.7 / max(counts.values()))
    seen: Counter[float] = Counter()
    heights = []
    for rank in ranks:
        heights.append(place + step * (seen[rank] - (counts[rank] - 1) / 2))
        seen[rank] += 1
    return heights


def cost(rows: Sequence[RowResult]) -> Figure | None:
    """Seconds of a round, grey where runs waited for each other, and bytes that a site sends and receives, by row."""
    rows = [row for row in rows if row.runs]
    if not rows:
        return None
    shared = any(row.together > 1 for row in rows)
    figure, (clock, wire) = _by_row(rows, 2)
    places = np.arange(len(rows))
    seconds = [row.cost["seconds_per_round"] for row in rows]
    clock.barh(places, seconds, 0.6, color=plot.FAINT if shared else plot.ACCENT)
    clock.set(title="Time on a shared device" if shared else "Time", xlabel="Seconds per round")
    sent, received = (np.array([row.cost[f"{way}_per_round"] or 0.0 for row in rows]) for way in ("sent", "received"))
    most = max(sent.max(), received.max())
    divisor, unit = byte_unit(most)
    wire.barh(places - 0.18, sent / divisor, 0.34, color=plot.ACCENT, label="sent by a site")
    wire.barh(places + 0.18, received / divisor, 0.34, color=plot.ACCENT_LIGHT, label="received")
    for place, row in enumerate(rows):
        if max(sent[place], received[place]) <= 0.01 * most:
            text = "all images" if row.pooled else f"{traffic(sent[place])} sent, {traffic(received[place])} received"
            look: dict[str, Any] = {"va": "center", "fontsize": 7.5, "color": plot.MUTED}
            wire.annotate(text, (0, place), (4, 0), textcoords="offset points", **look)
    wire.set(title="Traffic", xlabel=f"{unit} per round")
    figure.legend(*wire.get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def _dot(ax: Axes, score: Spread, place: int) -> None:
    """A mean with its deviation, cut where no score can be; hollow, where one seed has none."""
    face = "white" if score.std is None else plot.ACCENT
    bar = None if score.std is None else [[min(score.std, score.mean)], [min(score.std, 100 - score.mean)]]
    look = {"marker": "o", "markersize": 4.5, "markerfacecolor": face, "elinewidth": 1.4}
    ax.errorbar(score.mean, place, xerr=bar, color=plot.ACCENT, **look)  # type: ignore[arg-type]


def _by_row(rows: Sequence[RowResult], panels: int) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side that share the rows of the study as their vertical axis."""
    figure = plot.canvas(plot.FULL_WIDTH, 0.95 + ROW_HEIGHT * len(rows))
    axes = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
    _name_rows(axes[0], [row.row.name for row in rows])
    return figure, axes


def _name_rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), [plot.plain(name) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
