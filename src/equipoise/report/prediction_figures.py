"""Figures of single predictions: ROC, precision against recall, reliability and decision curves, class by class."""

from __future__ import annotations

import numpy as np
import pandas as pd

from equipoise.engine.image_scores import FILE
from equipoise.evidence.curve_frames import curve_frame
from equipoise.evidence.recomputed import read_predictions
from equipoise.report import plotting as plot
from equipoise.report.plotting import Figure, Panel, Trace
from equipoise.report.record import RunRecord
from equipoise.report.run_figures import MOST_CLASSES

#: with more images than this, curves would take long
MOST_IMAGES = 100_000
#: points of a curve that a screen can tell apart
MOST_POINTS = 120
EVERY = "all images"
CAPTION = (
    "Curves of a class against the others: ROC, precision and recall, reliability of all classes together, and net "
    "benefit by the threshold at which one acts. Thick: all images; thin: sites; dashed: chance, honest confidence, or "
    "treating everybody."
)


def prediction_curves(run: RunRecord) -> Figure | None:
    """A page per class, the rarest first, of the view a site is left with; None without kept predictions."""
    if not (run.folder / FILE).exists():
        return None
    predictions = read_predictions(run.folder)
    chosen = predictions.where(predictions.columns["view"] == run.end_view)
    if not 0 < len(chosen) <= MOST_IMAGES:
        return None
    kinds = ("roc", "precision-recall", "reliability", "net-benefit")
    roc, precision, reliable, benefit = (curve_frame(chosen, kind, run.part) for kind in kinds)
    if "class" not in roc:
        return None
    counts = run.training_images.sum().sort_values(kind="stable")
    calibration = _panel(reliable[reliable.get("scaling", "") == "as it is"], "Reliability", "confidence", "accuracy")
    pages = {}
    for name in [name for name in counts.index if (roc["class"] == name).any()][:MOST_CLASSES]:
        own = [frame[frame["class"] == name] for frame in (roc, precision, benefit)]
        panels = [
            _panel(own[0], "ROC", "share of false alarms", "sensitivity"),
            _panel(own[1], "Precision and recall", "recall", "precision"),
            calibration,
            _decision(own[2]),
        ]
        pages[plot.plain(str(name), 60)] = panels
    return plot.paged("Class", pages, "predictions", CAPTION, 320)


def _panel(curves: pd.DataFrame, title: str, x: str, y: str) -> Panel:
    """Curves between 0 and 1, with the diagonal that stands for chance, or for honest confidence."""
    shapes = [] if x == "recall" else [_diagonal()]
    across, up = ({"title": text, "range": [-0.02, 1.02]} for text in (x, y))
    return Panel(_traces(curves), across, up, title, 290, shapes)


def _decision(curves: pd.DataFrame) -> Panel:
    traces = _traces(curves)
    pooled = curves[curves["site"] == ("" if (curves["site"] == "").any() else curves["site"].iloc[0])]
    if len(pooled):
        treat = pd.Series(pooled["treat_all"].to_numpy(), np.round(pooled["x"].to_numpy(), 3))
        traces.append(_named(plot.curve(treat, "treat everybody", plot.MUTED, 1, 1.2, "dash")))
    top = max(0.02, float(curves["y"].max()) * 1.1) if len(curves) else 1
    axis = {"title": "net benefit", "range": [-top / 4, top]}
    zero = [plot.line_at(0, "y", "dot")]
    return Panel(traces, {"title": "threshold", "range": [0, 1]}, axis, "Decision curve", 290, zero)


def _traces(curves: pd.DataFrame) -> list[Trace]:
    """A line per site under the one of all images; without a legend of sites where they are many."""
    sites = [site for site in curves["site"].unique() if site]
    look, traces = plot.colours(sites), []
    for site in [*sites[: plot.MOST_LINES], *([""] if (curves["site"] == "").any() else [])]:
        own = curves[curves["site"] == site]
        kept = np.unique(np.linspace(0, len(own) - 1, min(len(own), MOST_POINTS)).round().astype(int))
        own = own.iloc[kept]
        points = pd.Series(own["y"].to_numpy(), np.round(own["x"].to_numpy(), 3))
        several = bool(len(sites) > 1)
        colour = look.get(site, plot.ACCENT) if several and site else plot.INK
        key = bool(not site or len(sites) <= len(plot.PALETTE))
        traces.append(_named(plot.curve(points, site or EVERY, colour, 1, 1 if several and site else 2.6, key=key)))
    return traces


def _named(trace: Trace) -> Trace:
    return trace | {"hovertemplate": "%{x:.2f}, %{y:.2f}<extra>%{fullData.name}</extra>"}


def _diagonal() -> dict[str, object]:
    line = {"color": plot.MUTED, "width": 1, "dash": "dash"}
    return {"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1, "line": line, "layer": "below"}
