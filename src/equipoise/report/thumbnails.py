"""Pictures of a run: examples of right and wrong predictions, and overlays of predicted and true masks.

Examples lie in the page itself. The phantom's images are drawn, so they are shown unless `report.images` hides them.
Real images are hidden unless it shows them. Overlays lie in the run's folder and nowhere else: reports link to them, so
that a report may be passed on.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.data.federation import Federation, Split
from equipoise.engine.image_scores import FILE, Predictions, hashed_names
from equipoise.engine.payload_files import safe_name
from equipoise.engine.prediction import Predictor, load_predictor, sites_with_models
from equipoise.engine.runs import config_of
from equipoise.evidence.recomputed import read_predictions
from equipoise.report.measured import is_dense
from equipoise.report.record import RunRecord, setting
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.volume_figures import patients

FOLDER = "overlays"
#: pixels per side of an example and of an overlay
SIDE, LARGE = 72, 192
#: classes with examples, the rarest ones; examples of each that are right and wrong; sites with overlays
MOST_CLASSES, MOST_EACH, MOST_SITES = 8, 4, 12
#: outlines of the truth and of the prediction
TRUTH, PREDICTED = (0, 200, 83), (255, 64, 129)
RANKS = ("worst", "middle", "best")
THUMBNAIL = Markup('<img src="{}" width="{}" height="{}" class="{}" alt="{}" title="{}">')


def _split(federation: Federation, place: str, part: str) -> Split | None:
    return next((one.splits.get(part) for one in federation.places() if one.name == place), None)


# ---- examples ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A picture with its truth and what the model took it for; `source` is a data address."""

    truth: str
    told: str
    confidence: float
    site: str
    source: str

    @property
    def right(self) -> bool:
        """Whether the model was right."""
        return self.truth == self.told

    @property
    def shown(self) -> Markup:
        """The picture for a page."""
        text = f"{self.truth} of {self.site}, taken for {self.told}, confidence {100 * self.confidence:.0f} %"
        return THUMBNAIL.format(self.source, SIDE, SIDE, "right" if self.right else "wrong", text, text)


def examples_sheet(run: RunRecord) -> Sheet | None:
    """A line for each class; None without examples."""
    found = examples_of(run)
    classes = list(dict.fromkeys(one.truth for one in found))
    cells = {
        title: [Markup("").join(one.shown for one in found if one.truth == name and one.right == right)
                for name in classes]
        for title, right in (("Right", True), ("Wrong", False))
    }  # fmt: skip
    caption = "The most confident right predictions of each class, and the most confident wrong ones (dashed frame). "
    return (
        sheet(f"{caption}The mouse tells what the model took an image for.", {"Class": classes}, cells)
        if found
        else None
    )


def examples_of(run: RunRecord) -> list[Example]:
    """The most confident right and wrong predictions of each class; none where pictures are not allowed."""
    if not allowed(run) or is_dense(run) or not (run.folder / FILE).exists():
        return []
    try:
        config = config_of(run.folder)
        federation = load_federation(config.data, config.seed)
        predictions = read_predictions(run.folder)
    except UserError:  # the images are elsewhere: the report stands without them
        return []
    columns = predictions.columns
    chosen = predictions.where((columns["split"] == run.part) & (columns["view"] == run.end_view))
    rare = run.training_images.sum().sort_values(kind="stable").index[:MOST_CLASSES]
    return [example for name in rare for example in _of_class(chosen, str(name), federation, run.part)]


def allowed(run: RunRecord) -> bool:
    """Whether pictures of the run's data may be shown."""
    wish = setting(run.start.config, "report", "images") or "auto"
    return wish == "shown" or (wish == "auto" and setting(run.start.config, "data", "name") == "phantom")


def _of_class(predictions: Predictions, name: str, federation: Federation, part: str) -> Iterator[Example]:
    columns, label = predictions.columns, predictions.classes.index(name)
    told = columns["probabilities"].argmax(axis=1)
    confidence = columns["probabilities"].max(axis=1)
    for right in (True, False):
        rows = np.flatnonzero((columns["label"] == label) & ((told == label) == right))
        _, first = np.unique(columns["image"][rows], return_index=True)  # a global model meets an image at one site
        rows = rows[np.sort(first)]
        for row in rows[np.argsort(-confidence[rows], kind="stable")][:MOST_EACH]:
            split = _split(federation, str(columns["place"][row]), part)
            if split and len(at := np.flatnonzero(hashed_names(split)[0] == columns["image"][row])):
                guess = predictions.classes[told[row]]
                yield Example(name, guess, float(confidence[row]), str(columns["site"][row]), _address(split, at[:1]))


def _address(split: Split, at: np.ndarray) -> str:
    """An image as an address that holds all of it."""
    out = io.BytesIO()
    pixels = split.images(at)[0].permute(1, 2, 0).numpy()
    Image.fromarray(pixels.squeeze()).resize((SIDE, SIDE)).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


# ---- overlays ----------------------------------------------------------------------------------------------------


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

    @property
    def shown(self) -> Markup:
        """The thumbnail for a page."""
        text = f"{self.case.rank} patient of {self.case.site}, Dice {100 * self.dice:.0f} %"
        picture = THUMBNAIL.format(quote(self.source), 3 * LARGE // 4, 3 * LARGE // 4, "overlay", text, text)
        return picture + Markup("<br>Dice {:.1f} %").format(100 * self.dice)


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


def overlays_sheet(runs: Sequence[RunRecord], labels: Sequence[str], out: Path) -> Sheet | None:
    """A line for each patient, a column for each run; None without overlays. `out` is the folder of the report."""
    found = [*zip(*overlays_of(runs, out))]
    if not found:
        return None
    text = "Outlines of the truth (green) and of the prediction (pink): the worst, the middle and the best patient of "
    text += (
        f"each site by Dice{' in the first run' if len(runs) > 1 else ''}. The thumbnails stay in the folders of the "
    )
    if len(runs) > 1:
        names = {"Site": [row[0].case.site for row in found], "Patient": [row[0].case.rank for row in found]}
        columns = {label: [row[place].shown for row in found] for place, label in enumerate(labels)}
        return sheet(f"{text}runs.", names, columns)
    shown = {(one.case.site, one.case.rank): one.shown for (one,) in found}
    sites = list(dict.fromkeys(site for site, _ in shown))
    cells = {rank.capitalize(): [shown.get((site, rank), "") for site in sites] for rank in RANKS}
    return sheet(f"{text}run.", {"Site": sites}, cells)


def overlays_of(runs: Sequence[RunRecord], out: Path) -> list[list[Overlay]]:
    """The overlays of each run, of the same patients; made now where they are missing and the images are at hand."""
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
    models: dict[str | None, Predictor] = {}
    for case in cases:
        split = _split(federation, case.place, run.part)
        chosen = np.flatnonzero(hashed_names(split)[1] == case.group) if split else np.zeros(0, dtype=np.int64)
        if split is None or not len(chosen):
            continue
        site = case.site if case.site in personal else None
        if site not in models:
            models[site] = load_predictor(run.folder, site)
        folder.mkdir(exist_ok=True)
        thumbnail(models[site], split, chosen).save(folder / case.file)


def thumbnail(model: Predictor, split: Split, positions: np.ndarray) -> Image.Image:
    """The slice of a patient that shows most, with the outlines of truth and prediction."""
    sizes = (split.masks(positions) > 0).sum(dim=(1, 2))
    position = positions[[int(sizes.argmax())]]
    pixels = split.images(position)
    with torch.no_grad():
        images, truth = model.prepared(pixels, split.masks(position))
        predicted = model.logits_of(images).argmax(1)[0].to(torch.uint8)
    picture = np.array(Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).resize((LARGE, LARGE)))
    for classes, colour in ((truth[0], TRUTH), (predicted, PREDICTED)):
        large = Image.fromarray(classes.numpy().astype(np.uint8)).resize((LARGE, LARGE), Image.Resampling.NEAREST)
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
