"""The figures of a study: rows ranked with intervals and the paper's numbers, curves, rare classes, ranks, costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from equipoise.contract.tables import EvaluationConfig
from equipoise.metrics import METRICS
from equipoise.report import plotting as plot
from equipoise.report.curves import flat
from equipoise.report.measured import TITLES
from equipoise.report.plotting import Figure, Panel, Trace
from equipoise.report.run_comparison import chance_at
from equipoise.report.wording import byte_unit, traffic
from equipoise.statistics import Spread
from equipoise.studies.grid import listed
from equipoise.studies.results import StudyResults, retrogress_metric
from equipoise.studies.rows import RowResult, RunResult
from equipoise.studies.study_intervals import HIGHER_IS_BETTER, StudyIntervals

MOST_CLASSES = 12
#: rows of one panel; a study with more of them shows these, the best
MOST_ROWS = 60


def ranked(results: StudyResults) -> Figure | None:
    """Rows ranked by each score of the study: mean and interval over seeds, each seed, the paper's number, chance."""
    pages, metrics = {}, [results.study.primary, *results.study.metrics]
    for data in results.data_names:
        for metric in dict.fromkeys(metrics):
            rows = [row for row in results.of(data) if metric in row.scores]
            title = TITLES[metric]
            if rows:
                pages[f"{title}, {data}" if data else title] = [_ranked(rows, metric, results.intervals[data])]
    return plot.paged("Ranked by", pages)


def _ranked(rows: Sequence[RowResult], metric: str, evidence: StudyIntervals | None) -> Panel:
    bounds = {row.row.name: bounds_of(row, metric, evidence) for row in rows}
    rows = sorted(rows, key=lambda row: row.scores[metric].mean, reverse=HIGHER_IS_BETTER[metric])[:MOST_ROWS]
    traces: list[Trace] = []
    for alone, name in ((False, "mean, 95 % interval"), (True, "one seed")):
        own = [(place, row) for place, row in enumerate(rows) if (row.scores[metric].std is None) == alone]
        scores = [row.scores[metric] for _, row in own]
        if own:
            traces.append(
                plot.dots(
                    plot.numbers(score.mean for score in scores),
                    [place for place, _ in own],
                    name,
                    plot.ACCENT,
                    [
                        f"{plot.plain(row.row.name)}: {spread_told(score, bounds[row.row.name])}"
                        for (_, row), score in zip(own, scores)
                    ],
                    hollow=alone,
                    ends=[bounds[row.row.name] for _, row in own],
                )
            )
    seeds = [(value, place, seed) for place, row in enumerate(rows) for seed, value in _seeds(row, metric)]
    if seeds:
        values, places, _ = zip(*seeds)
        told = [f"seed {seed}: {value:.2f}" for value, _, seed in seeds]
        marks = plot.dots(plot.numbers(values), places, "each seed", plot.SOFT, told, symbol="line-ns", size=8)
        traces.insert(0, marks)
    papers = [(row.row.paper[metric], place) for place, row in enumerate(rows) if metric in row.row.paper]
    if papers:
        values, places = zip(*papers)
        told = [f"paper: {value}" for value in values]
        traces.append(plot.dots(values, places, "the paper's number", plot.SECOND, told, symbol="diamond", hollow=True))
    names = plot.rows_axis([f"{row.row.name}{' (pooled)' * row.pooled}" for row in rows]) | {"showgrid": len(rows) > 1}
    title = f"{TITLES[metric]} (%)" + (f", the first {MOST_ROWS}" if len(rows) == MOST_ROWS else "")
    height = 90 + 24 * len(rows)
    return Panel(traces, {}, names, title, height, **plot.chance_line(guessing(rows, metric)))


def _seeds(row: RowResult, metric: str) -> list[tuple[object, float]]:
    values = row.values(metric, by_site=False)
    return list(values.items()) if len(values) > 1 else []


def guessing(rows: Sequence[RowResult], metric: str) -> float | None:
    """The score of guessing, in per cent, where there is one that no data changes."""
    known_to_all = next((own.guessing for own in METRICS if own.name == metric), None)
    if known_to_all is not None:
        return 100 * known_to_all
    if metric != METRICS[0].name:
        return None
    known = [value for row in rows if (value := _chance(row)) is not None]
    return 100 * float(np.mean(known)) if known else None


def _chance(row: RowResult) -> float | None:
    """The balanced accuracy of guessing at the sites of a row's first run."""
    run, views = row.runs[0], {*row.lines["view"]}
    view = "personal" if "personal" in views else run.told["round_view"]
    own = row.lines[(row.lines["seed"] == run.cell.seed) & (row.lines["scope"] == "site") & (row.lines["view"] == view)]
    return chance_at(run.start.images[own["part"].iloc[0]], own["site"]) if len(own) else None


def bounds_of(row: RowResult, metric: str, evidence: StudyIntervals | None) -> tuple[float, float] | None:
    """The interval of a row's mean: over images and seeds where runs kept predictions, else over seeds.

    None where neither is known.
    """
    found = evidence.bounds(row.row.name, metric) if evidence else None
    return found or interval(row.scores[metric])


def interval(score: Spread) -> tuple[float, float] | None:
    """The interval of a mean over seeds, within what scores can be; None for one seed."""
    margin = score.margin
    return None if margin is None else (max(score.mean - margin, 0.0), min(score.mean + margin, 100.0))


def spread_told(score: Spread, ends: tuple[float, float] | None = None) -> str:
    """A mean with its interval in words."""
    ends = ends or interval(score)
    seeds = f"{score.n} seeds" if score.n > 1 else "one seed"
    return f"{score.mean:.2f} % ({ends[0]:.1f} to {ends[1]:.1f}, {seeds})" if ends else f"{score.mean:.2f} %, {seeds}"


# ---- curves ------------------------------------------------------------------------------------------------------


def learning(results: StudyResults, rows: Sequence[RowResult]) -> Figure | None:
    """All rows' validation curves of the primary metric, then a page for each row with its band over seeds."""
    return _curves(results, rows, curve_view, f"{TITLES[results.study.primary]} (%), validation", False)


def first_eligible(row: RowResult) -> int:
    """The first round that a row could choose; 1 where it chooses none."""
    settings = [EvaluationConfig.model_validate(run.start.config.get("evaluation", {})) for run in row.runs]
    return min((each.first_round for each in settings if each.rule == "best"), default=1)


def curve_view(run: RunResult, row: RowResult) -> str:
    """The models whose curve stands for a row: those it reports; if rounds did not measure them, what chose the round.

    Models that sites make by fine-tuning wait for the final test unless they choose the round themselves.
    """
    deciding = [view for view, _ in run.told["chosen"]]
    return next((view for view in (row.view, *deciding) if view in run.told["measured"]), row.view)


def retrogress_curves(results: StudyResults, rows: Sequence[RowResult]) -> Figure | None:
    """The mean drop after communication of all rows, then of each row."""
    title = f"Drop in {TITLES[retrogress_metric(results.study.primary)]} (points)"
    return _curves(results, rows, lambda run, row: "drop", title, True)


def _curves(
    results: StudyResults,
    rows: Sequence[RowResult],
    view_of: Callable[[RunResult, RowResult], str],
    title: str,
    about_zero: bool,
) -> Figure | None:
    """A page with the mean curve of every row; then one per row, with its band and the round from which it chooses."""
    known = {row.row.name: [(run.cell.label, view_of(run, row)) for run in row.runs] for row in rows}
    found = {name: [own for own in columns if own in results.curves] for name, columns in known.items()}
    curves = {name: 100 * results.curves[own].dropna(how="all") for name, own in found.items()}
    curves = {name: own for name, own in curves.items() if not own.empty}
    if not curves or (about_zero and all(flat(own) for own in curves.values())):
        return None
    means = {name: own.mean(axis=1) for name, own in curves.items()}
    order = sorted(means, key=lambda name: -means[name].iloc[-1])
    colours = dict(zip(order, plot.PALETTE))
    zero = [plot.line_at(0, "y", "solid")] if about_zero else []
    every = [
        plot.curve(means[name], name, colours.get(name, plot.FAINT), width=1.8, key=name in colours)
        for name in reversed(order)
    ]
    pages = {"all rows": [Panel(every, plot.round_axis(), {}, title, 340, zero)]}
    eligible = {row.row.name: first_eligible(row) for row in rows}
    for name, own in curves.items() if len(curves) > 1 else ():
        ends = band(own)
        traces = [plot.band(ends["low"], ends["high"])] if len(ends) else []
        best = order[0] if name != order[0] else order[1]
        traces += [plot.curve(means[best], best, plot.MUTED), plot.curve(means[name], name, plot.ACCENT, width=2.6)]
        marks = [plot.line_at(eligible[name], dash="dot")] if eligible[name] > 1 and not about_zero else []
        pages[plot.plain(name, 60)] = [Panel(traces, plot.round_axis(), {}, title, 340, [*zero, *marks])]
    return plot.paged("Curves of", pages)


def band(curves: pd.DataFrame) -> pd.DataFrame:
    """One standard deviation to either side of the mean, in the rounds that all seeds have; none with one seed."""
    known = curves.dropna() if curves.shape[1] > 1 else curves[:0]
    mean, deviation = known.mean(axis=1), known.std(axis=1)
    return pd.DataFrame({"low": mean - deviation, "high": mean + deviation})


# ---- rows --------------------------------------------------------------------------------------------------------


def over_data(results: StudyResults) -> Figure | None:
    """The main score of every row on every data set."""
    metric, names = results.study.primary, results.data_names
    if len(names) < 2:
        return None
    scores = {
        name: {row.row.name: row.scores[metric] for row in results.of(name) if metric in row.scores} for name in names
    }
    return _map(scores, list(dict.fromkeys(name for own in scores.values() for name in own)))


def rare_classes(rows: Sequence[RowResult]) -> Figure | None:
    """Recall of each class by row, the rarest class first."""
    rows = [row for row in rows if row.recall][:MOST_ROWS]
    if not rows:
        return None
    totals = rows[0].runs[0].start.training_images.sum().to_dict()
    known = sorted((name for name in totals if any(name in row.recall for row in rows)), key=lambda name: totals[name])
    scores = {
        f"{name} ({totals[name]:,})": {row.row.name: row.recall[name] for row in rows if name in row.recall}
        for name in known[:MOST_CLASSES]
    }
    return _map(scores, [row.row.name for row in rows])


def _map(scores: dict[str, dict[str, Spread]], rows: Sequence[str]) -> Figure | None:
    """A heat map of scores by column and row."""
    if not rows:
        return None
    values = [[own[row].mean if row in own else np.nan for own in scores.values()] for row in rows]
    hover = [
        [
            f"{plot.plain(row)}, {plot.plain(name)}: {spread_told(own[row]) if row in own else ''}"
            for name, own in scores.items()
        ]
        for row in rows
    ]
    trace = plot.heat(np.array(values), list(rows), list(scores), np.array(hover))
    return plot.figure([Panel([trace], **plot.heat_axes(), height=110 + 24 * len(rows))])


def rank_plot(results: StudyResults) -> Figure | None:
    """Rows by mean rank; every block (data set, or site) is a light dot."""
    means = results.ranking.means
    if not means:
        return None
    names = sorted(means, key=means.__getitem__)[:MOST_ROWS]
    blocks: dict[tuple[float, int], list[str]] = {}
    for place, name in enumerate(names):
        for block, rank in results.ranking.ranks[name].items():
            blocks.setdefault((rank, place), []).append(block)
    ranks, places = zip(*blocks)
    told = [f"rank {rank:g}: {plot.plain(listed(own), 200)}" for (rank, _), own in blocks.items()]
    light = plot.dots(ranks, places, f"each {results.ranked_over}", plot.SOFT, told)
    light["marker"]["size"] = [min(6 + 2 * len(own), 18) for own in blocks.values()]  # equal ranks make a larger dot
    traces = [light]
    told = [f"{plot.plain(name)}: mean rank {means[name]:.2f}" for name in names]
    traces.append(
        plot.dots([round(means[name], 3) for name in names], [*range(len(names))], "mean rank", plot.ACCENT, told)
    )
    axis = {"range": [0.5, len(means) + 0.5]}
    return plot.figure([Panel(traces, axis, plot.rows_axis(names), "Rank (1 is best)", 90 + 24 * len(names))])


def cost(rows: Sequence[RowResult]) -> Figure | None:
    """Seconds of a round, grey where runs waited for each other, and bytes that a site sends and receives, by row."""
    rows = [row for row in rows if row.runs][:MOST_ROWS]
    if not rows:
        return None
    shared = any(row.together > 1 for row in rows)
    axis, height = plot.rows_axis([row.row.name for row in rows]), 90 + 24 * len(rows)
    look = {"type": "bar", "orientation": "h", "y": [*range(len(rows))], "textposition": "none"}
    look |= {"hovertemplate": "%{text}<extra></extra>"}
    seconds = [row.cost["seconds_per_round"] for row in rows]
    clock = look | {"x": plot.numbers(seconds), "text": [f"{each:.2f} s" for each in seconds], "showlegend": False}
    clock |= {"marker": {"color": plot.FAINT if shared else plot.ACCENT}}
    moved = {way: [row.cost[f"{way}_per_round"] or 0.0 for row in rows] for way in ("sent", "received")}
    divisor, unit = byte_unit(max(max(own) for own in moved.values()))
    wires = [
        look
        | {
            "x": plot.numbers(own, 1 / divisor),
            "name": f"{way} by a site",
            "showlegend": True,
            "marker": {"color": colour},
        }
        | {"text": ["all images" if row.pooled else f"{traffic(size)} {way}" for row, size in zip(rows, own)]}
        for (way, own), colour in zip(moved.items(), (plot.ACCENT, plot.SECOND))
    ]
    told = "Seconds per round on a shared device" if shared else "Seconds per round"
    return plot.figure(
        [Panel([clock], {}, axis, told, height), Panel(wires, {}, axis, f"Traffic per round ({unit})", height)]
    )
