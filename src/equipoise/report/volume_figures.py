"""Dice of single patients: boxes by site, and a table with the worst cases first; for segmentation."""

from __future__ import annotations

import pandas as pd

from equipoise.engine.volume_scores import VOLUMES, read_volume_scores
from equipoise.report import plotting as plot
from equipoise.report.plotting import Figure, Panel, Trace
from equipoise.report.record import RunRecord
from equipoise.report.run_tables import SITE_COLUMNS
from equipoise.report.sheet import Sheet, sheet

#: lines of the table of worst cases
MOST_CASES = 15
#: sites of one page of boxes
MOST_SITES = 30


def patients(run: RunRecord) -> pd.DataFrame:
    """One row per patient and structure: the numbers of the view a site is left with, means over reported rounds.

    On test images, or where there are none on validation images; no row where the run kept no such numbers.
    """
    file = run.folder / VOLUMES
    if not file.exists():
        return pd.DataFrame()
    found = read_volume_scores(file)
    found = found[(found["view"] == run.end_view) & found["dice"].notna()]
    tested = found[found["split"] == "test"]
    found = tested if len(tested) else found[found["split"] == "valid"]
    places = ["site", "place", "group", "slices", "structure"]
    return found.groupby(places, sort=False)[["dice", "iou", "hd95", "asd"]].mean().reset_index()


def dice_boxes(run: RunRecord) -> Figure | None:
    """A box per site with a mark per patient, a page per structure."""
    found = patients(run)
    if not len(found):
        return None
    pages = {}
    for structure, own in found.groupby("structure", sort=False):
        sites = list(own["site"].unique())[:MOST_SITES]
        rows = [own[own["site"] == site] for site in sites]
        traces = [_box(patient, site, place) for place, (site, patient) in enumerate(zip(sites, rows))]
        axis = {"range": [-3, 103], "title": "Dice (%)"}
        pages[str(structure)] = [Panel(traces, axis, plot.rows_axis(sites), height=110 + 44 * len(sites))]
    told = "Dice of each patient by site: a mark is a patient, a box the middle half of them."
    return plot.paged("Structure", pages, "volumes", told, 300)


def _box(own: pd.DataFrame, site: str, place: int) -> Trace:
    told = [
        f"{plot.plain(site)}, patient {group}: Dice {100 * dice:.1f} %, {slices} {'slices' if slices > 1 else 'slice'}"
        for group, dice, slices in zip(own["group"], own["dice"], own["slices"])
    ]
    return {
        "type": "box",
        "orientation": "h",
        "x": plot.numbers(own["dice"], 100),
        "y": [place] * len(own),
        "name": plot.plain(site),
        "text": told,
        "hovertemplate": "%{text}<extra></extra>",
        "boxpoints": "all",
        "jitter": 0.5,
        "pointpos": 0,
        "marker": {"size": 5, "color": plot.ACCENT},
        "line": {"color": plot.INK, "width": 1.2},
        "fillcolor": plot.SOFT,
        "showlegend": False,
    }


def worst_cases(run: RunRecord) -> Sheet | None:
    """The patients with the lowest Dice, the worst one first."""
    found = patients(run)
    if not len(found):
        return None
    worst = found.sort_values("dice", kind="stable").head(MOST_CASES)
    columns = {column.title: worst[column.name].map(column.told) for column in SITE_COLUMNS if column.name in worst}
    names = {
        "Site": worst["site"],
        "Patient": worst["group"],
        "Structure": worst["structure"],
        "Slices": worst["slices"].map(str),
    }
    caption = f"The {len(worst)} worst of {len(found)} cases by Dice. Names of patients are hashes."
    return sheet(caption, names, columns)
