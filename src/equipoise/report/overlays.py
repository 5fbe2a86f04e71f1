"""Overlays of prediction and truth, a few patients per site: thumbnails in the run's folder, and nowhere else.

Reports link to the thumbnails and hold no image, so that a report may be passed on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.data.federation import Federation, Split
from equipoise.engine.image_scores import hashed_names
from equipoise.engine.payload_files import safe_name
from equipoise.engine.prediction import Predictor, load_predictor, sites_with_models
from equipoise.engine.runs import config_of
from equipoise.report.measured import is_dense
from equipoise.report.record import RunRecord
from equipoise.report.volume_figures import patients

FOLDER = "overlays"
#: pixels per side of a thumbnail
SIDE = 192
#: outlines of the truth and of the prediction
TRUTH, PREDICTED = (0, 200, 83), (255, 64, 129)
MOST_SITES = 12
RANKS = ("worst", "middle", "best")


@dataclass(frozen=True)
class Case:
    """A patient whose overlay is shown, of the first run that a report is of."""

    site: str
    place: str
    group: str
    rank: str

    @property
    def file(self) -> str:
        """The name of the thumbnail."""
        return f"{safe_name(self.site)}-{self.group}.png"


@dataclass(frozen=True)
class Overlay:
    """A thumbnail of one run: where it is, from the report's folder, and the Dice of the patient."""

    case: Case
    source: str
    dice: float


def cases_of(run: RunRecord) -> list[Case]:
    """The worst, the middle and the best patient of each site, by Dice."""
    found = patients(run)
    if not len(found):
        return []
    cases = []
    by_patient = found.groupby(["site", "place", "group"], sort=False)["dice"].mean().reset_index()
    for _, own in list(by_patient.groupby("site", sort=False))[:MOST_SITES]:
        ranked = own.sort_values("dice", kind="stable")
        for at, rank in zip(dict.fromkeys((0, len(ranked) // 2, len(ranked) - 1)), RANKS):
            site, place, group = ranked.iloc[at][["site", "place", "group"]]
            cases.append(Case(site, place, group, rank))
    return cases


def overlays_of(runs: Sequence[RunRecord], out: Path) -> list[list[Overlay]]:
    """The overlays of each run, of the same patients; made now where they are missing and the images are at hand.

    Args:
        out: the folder of the report, from which sources start
    """
    if not all(is_dense(run) and run.finished for run in runs):
        return []
    cases = cases_of(runs[0])
    return [list(_linked(run, cases, out)) for run in runs] if cases else []


def _linked(run: RunRecord, cases: Sequence[Case], out: Path) -> Iterator[Overlay]:
    folder = run.folder / FOLDER
    if not all((folder / case.file).exists() for case in cases):
        try:
            _draw(run, cases, folder)
        except UserError:  # the images are elsewhere, or this method keeps no model: the report stands without overlays
            return
    dice = patients(run).groupby(["site", "group"])["dice"].mean()
    for case in cases:
        if (folder / case.file).exists() and (case.site, case.group) in dice.index:
            source = Path(os.path.relpath(folder / case.file, out)).as_posix()
            yield Overlay(case, source, float(dice[case.site, case.group]))


def _draw(run: RunRecord, cases: Sequence[Case], folder: Path) -> None:
    """Write the thumbnails of all cases."""
    config = config_of(run.folder)
    federation = load_federation(config.data, config.seed)
    personal = set(sites_with_models(run.folder)) if run.end_view == "personal" else set()
    part = "test" if len(run.finals) else "valid"
    models: dict[str | None, Predictor] = {}
    for case in cases:
        split = _split(federation, case.place, part)
        chosen = np.flatnonzero(hashed_names(split)[1] == case.group) if split else np.zeros(0, dtype=np.int64)
        if split is None or not len(chosen):
            continue
        site = case.site if case.site in personal else None
        model = models.setdefault(site, load_predictor(run.folder, site)) if site not in models else models[site]
        folder.mkdir(exist_ok=True)
        thumbnail(model, split, chosen).save(folder / case.file)


def _split(federation: Federation, place: str, part: str) -> Split | None:
    return next((one.splits.get(part) for one in federation.places() if one.name == place), None)


def thumbnail(model: Predictor, split: Split, positions: np.ndarray) -> Image.Image:
    """The slice of a patient that shows most, with the outlines of truth and prediction."""
    sizes = (split.masks(positions) > 0).sum(dim=(1, 2))
    position = positions[[int(sizes.argmax())]]
    pixels = split.images(position)
    with torch.no_grad():
        images, truth = model.prepared(pixels, split.masks(position))
        predicted = model.logits_of(images).argmax(1)[0].to(torch.uint8)
    picture = np.array(Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).resize((SIDE, SIDE)))
    for classes, colour in ((truth[0], TRUTH), (predicted, PREDICTED)):
        large = Image.fromarray(classes.numpy().astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        picture[outline(np.asarray(large))] = colour
    return Image.fromarray(picture)


def outline(classes: np.ndarray) -> np.ndarray:
    """The pixels (H, W) of structures that touch another class or the edge: bool.

    >>> outline(np.array([[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]])).sum()
    np.int64(4)
    """
    padded = np.pad(classes, 1)
    inner = padded[1:-1, 1:-1]
    neighbours = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    return np.any([inner != other for other in neighbours], axis=0) & (inner > 0)
