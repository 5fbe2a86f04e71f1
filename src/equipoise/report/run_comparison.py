"""What opens a report of runs: one finding in a sentence, the figure that shows it, and runs side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from equipoise.cells import added, dense
from equipoise.report import plotting as plot
from equipoise.report.curves import flat, metric_curves, retrogress
from equipoise.report.evidence_tables import resampled
from equipoise.report.measured import in_words, is_dense, main_metric, unit_of
from equipoise.report.plotting import Figure, Panel
from equipoise.report.record import RunRecord
from equipoise.report.run_figures import with_confusion
from equipoise.statistics import share_interval, weighted_interval

MOST_SITES = 8
MOST_CLASSES = 12
UNSEEN = "never seen at the site"


def same_federation(runs: Sequence[RunRecord]) -> bool:
    """True when every run trained on the same sites with the same counts."""
    first = runs[0].start
    return all(run.start.sites == first.sites and run.start.classes == first.classes for run in runs)


# ---- the numbers -------------------------------------------------------------------------------------------------


def class_recall(run: RunRecord) -> pd.DataFrame:
    """By class the `recall` over the federation of the view a site is left with, its 95 % interval, images `of` it.

    Pooled where there are confusion matrices, else the mean over the sites that know the class.
    """
    classes = run.start.classes
    shown = with_confusion(run)
    pooled, of_site = (shown[shown["scope"] == scope]["confusion"].tolist() for scope in ("pooled", "site"))
    if pooled or of_site:
        counts = added(pooled[:1] or of_site).astype(float)
        low, high = share_interval(counts.diagonal(), counts.sum(axis=1))
        if is_dense(run):  # pixels of one image are not independent
            low, high = np.full_like(low, np.nan), np.full_like(high, np.nan)
        with np.errstate(invalid="ignore"):
            recall = counts.diagonal() / counts.sum(axis=1)
        columns = {"recall": recall, "low": low, "high": high, "of": counts.sum(axis=1)}
        return pd.DataFrame(columns, classes).dropna(subset="recall")
    own = run.results[(run.results["view"] == run.end_view) & (run.results["recall"].str.len() > 0)]
    known = pd.DataFrame(own["recall"].tolist(), columns=classes, dtype=float).mean().dropna()
    return pd.DataFrame({"recall": known, "low": np.nan, "high": np.nan, "of": np.nan})


def unseen_recall(run: RunRecord) -> tuple[float, float, float, int] | None:
    """(low, recall, high, images) over images of classes that their own site has no training images of.

    None for masks, and where no scored site lacks a class that it has to find.
    """
    if is_dense(run):
        return None
    train, shown, found, of = run.training_images, with_confusion(run), 0.0, 0.0
    for row in shown[(shown["scope"] == "site") & shown["site"].isin(train.index)].itertuples():
        counts, lacking = np.array(row.confusion, dtype=float), train.loc[row.site].to_numpy() == 0
        found, of = found + counts.diagonal()[lacking].sum(), of + counts[lacking].sum()
    if not of:
        return None
    low, high = share_interval(np.array([found]), np.array([of]))
    return float(low[0]), found / of, float(high[0]), round(of)


def balanced(run: RunRecord) -> tuple[float, float, float] | None:
    """(low, value, high): the main metric, mean over sites, of the view a site is left with; None without scores.

    The interval is over groups of images where the run kept predictions, else over single images. It says nothing of
    other seeds.
    """
    main = main_metric(run).name
    if main not in run.results:
        return None
    own = run.results[run.results["view"] == run.end_view]
    means = own[own["scope"] == "mean"][main].dropna()
    sites = own[(own["scope"] == "site") & own["confusion"].notna()]["confusion"]
    if not len(means):
        return None
    if is_dense(run):  # pixels of one image are not independent
        return float("nan"), float(means.iloc[0]), float("nan")
    for scored in resampled(run):
        if (scored.view, scored.scope) == (run.end_view, "mean"):
            bounds = scored.intervals[main]
            return bounds.low, float(means.iloc[0]), bounds.high
    found, of, weights = [], [], []
    for matrix in sites:
        counts = dense(matrix).astype(float)
        there = counts.sum(axis=1) > 0
        found.append(counts.diagonal()[there])
        of.append(counts.sum(axis=1)[there])
        weights.append(np.full(there.sum(), 1 / max(there.sum(), 1) / len(sites)))
    if not found:
        return float("nan"), float(means.iloc[0]), float("nan")
    low, middle, high = weighted_interval(*map(np.concatenate, (found, of, weights)))
    shift = float(means.iloc[0]) - middle  # the log's own number stands, were it rounded
    return low + shift, float(means.iloc[0]), high + shift


def chance(run: RunRecord) -> float | None:
    """The balanced accuracy of guessing, mean over sites: one in so many classes as a site has to score."""
    if is_dense(run):
        return None
    part = run.results["part"].iloc[0] if len(run.results) else "test"
    scored = run.results[(run.results["view"] == run.end_view) & (run.results["scope"] == "site")]["site"]
    return chance_at(run.images[part], scored.unique())


def chance_at(images: pd.DataFrame, sites: Iterable[str]) -> float | None:
    """The same at some of the sites, from their images of each class."""
    present = (images[images.index.isin(list(sites))] > 0).sum(axis=1)
    present = present[present > 0]
    return float((1 / present).mean()) if len(present) else None


# ---- the finding -------------------------------------------------------------------------------------------------


def finding(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """One sentence on what the runs found, on the rarest class where it was scored."""
    known = {label: own for label, run in zip(labels, runs) if (own := balanced(run))}
    if not known:
        return ""
    part = "" if {*runs[0].results["part"]} <= {"test"} else " on validation images"
    rare = _rarest(runs, labels)
    if len(runs) == 1:
        low, value, high = known[labels[0]]
        over = f" (95 % interval {100 * low:.0f} to {100 * high:.0f})" if low == low else ""
        if is_dense(runs[0]):
            return f"{main_metric(runs[0]).title} of {labels[0]}, mean over sites{part}: {100 * value:.0f} %."
        text = f"Over its sites, {labels[0]} finds {100 * value:.0f} % of an average class{over}{part}"
        guess = chance(runs[0])
        text += f", where guessing finds {100 * guess:.0f} %" if guess else ""
        if rare:
            name, recalls = rare
            text += f". It finds {100 * recalls[labels[0]]:.0f} % of the rarest class, {name}"
        return f"{text}."
    if rare and len(rare[1]) > 1 and not is_dense(runs[0]):
        name, recalls = rare[0], pd.Series(rare[1]).sort_values(ascending=False, kind="stable")
        others = ", ".join(f"{label} {100 * value:.0f} %" for label, value in recalls.iloc[1:4].items())
        lead = f"Of the rarest class, {name}, {recalls.index[0]} finds {100 * recalls.iloc[0]:.0f} %; {others}{part}"
        return f"{lead}.{_unseen_in_words(runs, labels)} One run each cannot tell luck from method."
    ranked = sorted(known, key=lambda label: -known[label][1])
    told = "; ".join(f"{label} {100 * known[label][1]:.0f} %" for label in ranked[:4])
    return f"{main_metric(runs[0]).title} over sites{part}: {told}. One run each cannot tell luck from method."


def _unseen_in_words(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """A sentence on classes that the image's own site lacks; empty where no run was scored on any."""
    known = {label: own[1] for label, run in zip(labels, runs) if (own := unseen_recall(run))}
    recalls = pd.Series(known).sort_values(ascending=False, kind="stable")
    if len(recalls) < 2:
        return ""
    first, *others = (f"{label} {100 * value:.0f} %" for label, value in recalls.items())
    return f" Of classes that a site has never seen, its model finds: {first}; {', '.join(others[:5])}."


def _rarest(runs: Sequence[RunRecord], labels: Sequence[str]) -> tuple[str, dict[str, float]] | None:
    """The class with the fewest training images that was scored, and its recall by run; None where runs differ."""
    if not same_federation(runs):
        return None
    recalls = {label: class_recall(run)["recall"] for label, run in zip(labels, runs)}
    images = max((run.training_images.sum() for run in runs), key=lambda counts: counts.sum())
    scored = [name for name in images.sort_values(kind="stable").index if any(name in own for own in recalls.values())]
    if not scored:
        return None
    return scored[0], {label: float(own[scored[0]]) for label, own in recalls.items() if scored[0] in own}


def leading(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """The runs ranked by balanced accuracy with intervals and chance, and the recall of the rarest classes."""
    panels = [_ranked(runs, labels)] if len(runs) > 1 else []
    panels.append(_rare_classes(runs, labels))
    ranked = f"The runs ranked by {in_words(runs[0])}, with the accuracy of guessing; and recall"
    told = f"{ranked if len(runs) > 1 else 'Recall'} of each class over the federation."
    told += "" if is_dense(runs[0]) else " Bars are 95 % intervals of the images; they say nothing of other seeds."
    return plot.figure([panel for panel in panels if panel], "lead", told, 320)


def _ranked(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel | None:
    known = [(own, label, place) for place, (run, label) in enumerate(zip(runs, labels)) if (own := balanced(run))]
    known.sort(key=lambda each: -each[0][1])
    traces = [
        plot.dots(
            [100 * value],
            [row],
            label,
            plot.PALETTE[place % len(plot.PALETTE)],
            [
                f"{plot.plain(label)}: {100 * value:.1f} %"
                + (f" ({100 * low:.1f} to {100 * high:.1f})" if low == low else "")
            ],
            symbol=plot.SYMBOLS[place % len(plot.SYMBOLS)],
            ends=[(100 * low, 100 * high)] if low == low else (),
            size=11,
        )
        for row, ((low, value, high), label, place) in enumerate(known)
    ]
    if not known:
        return None
    guess = chance(runs[0])
    axis = {"rangemode": "tozero"}
    rows = plot.rows_axis([label for _, label, _ in known])
    title = f"{main_metric(runs[0]).title} (%), mean over sites"
    return Panel(traces, axis, rows, title, 130 + 34 * len(known), **plot.chance_line(guess and 100 * guess))


def _with_unseen(recalls: pd.DataFrame, run: RunRecord) -> pd.DataFrame:
    """The recall of each class, and of all classes that the image's own site lacks."""
    if not (own := unseen_recall(run)):
        return recalls
    row = pd.DataFrame([{"recall": own[1], "low": own[0], "high": own[2], "of": own[3]}], [UNSEEN])
    return pd.concat([row, recalls])


def _rare_classes(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel | None:
    """Recall per class, rarest class on top, a mark per run; above them, that of classes which the site lacks."""
    recalls = [_with_unseen(class_recall(run), run) for run in runs]
    images = max((run.training_images.sum() for run in runs), key=lambda counts: counts.sum())
    known = {name for own in recalls for name in own.index}
    classes = images[images.index.isin(known)].sort_values(kind="stable")[:MOST_CLASSES]
    if UNSEEN in known:
        classes = pd.concat([pd.Series({UNSEEN: 0}), classes])
    if not len(classes):
        return None
    traces, step, unit = [], min(0.16, 0.6 / len(runs)), unit_of(runs[0].start)
    for place, (label, found) in enumerate(zip(labels, recalls)):
        own = found[found.index.isin(classes.index)]
        shift = step * (place - (len(runs) - 1) / 2)
        hover = [
            f"{plot.plain(label)}: {100 * row.recall:.1f} % of {plot.plain(str(row.Index))}"
            + (f", {row.of:,.0f} {unit} ({100 * row.low:.1f} to {100 * row.high:.1f})" if row.low == row.low else "")
            for row in own.itertuples()
        ]
        ends = [(100 * row.low, 100 * row.high) if row.low == row.low else None for row in own.itertuples()]
        traces.append(
            plot.dots(
                plot.numbers(own["recall"], 100),
                [classes.index.get_loc(name) + shift for name in own.index],
                label,
                plot.PALETTE[place % len(plot.PALETTE)] if len(runs) > 1 else plot.ACCENT,
                hover,
                symbol=plot.SYMBOLS[place % len(plot.SYMBOLS)],
                ends=ends,
                key=len(runs) > 1,
            )
        )
    rows = plot.rows_axis([f"{name} ({count:,})" for name, count in classes.items()])
    rows |= {"showgrid": True} if len(runs) > 1 else {}
    axis = {"range": [-3, 103]}
    title = f"Recall of each class (%), rarest on top, in brackets training {unit}"
    return Panel(traces, axis, rows, title, 120 + (34 if len(runs) < 5 else 46) * len(classes))


# ---- side by side ------------------------------------------------------------------------------------------------


def overlaid_learning(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """The first metric of every run on validation data: the mean over sites, then each site they share."""
    curves = [metric_curves(run, main_metric(run).name, run.round_view) for run in runs]
    if all(each.empty for each in curves):
        return None
    shared = [site for site in curves[0] if all(site in each for each in curves)]
    panels = {"Mean over sites": [each.mean(axis=1) for each in curves]}
    if 1 < len(shared) <= MOST_SITES:
        panels |= {site: [each[site] for each in curves] for site in shared}
    told = (
        f"{main_metric(runs[0]).title} (%) on validation data, the runs overlaid: the model a site is left with when a "
        "round ends (personal where rounds measured it, else global)."
    )
    return plot.figure([_overlaid(own, labels, plot.plain(title)) for title, own in panels.items()], "learning", told)


def overlaid_retrogress(runs: Sequence[RunRecord], labels: Sequence[str]) -> Figure | None:
    """Mean drop of the first metric after each communication, a line per run; None where all are zero."""
    curves = [retrogress(run).mean(axis=1) for run in runs]
    if flat(pd.concat(curves, axis=1)):
        return None
    title = f"Drop in {in_words(runs[0])} (points)"
    panel = _overlaid(curves, labels, title, shapes=[plot.line_at(0, "y", "solid")])
    told = f"Retrogress, mean over sites: the drop in validation {in_words(runs[0])} after each communication."
    return plot.figure([panel], "retrogress", told)


def _overlaid(curves: Sequence[pd.Series], labels: Sequence[str], title: str, **more: Any) -> Panel:
    """A line per run; when the colours are used up they come again with another dash."""
    traces = []
    for place, (own, label) in enumerate(zip(curves, labels)):
        colour = plot.PALETTE[place % len(plot.PALETTE)]
        dash = ("solid", "dash", "dot")[place // len(plot.PALETTE) % 3]
        traces.append(plot.curve(own, label, colour, 100, 2, dash))
    return Panel(traces, plot.round_axis(), {}, title, **more)
