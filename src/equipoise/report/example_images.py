"""Examples of right and wrong predictions as small pictures in the page, only where the data's owner allows it.

The phantom's images are drawn, so they are shown unless `report.images` hides them. Real images are hidden unless it
shows them. Pictures are found by the hashes that a run's predictions have for names.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.data.federation import Federation
from equipoise.engine.image_scores import FILE, Predictions, hashed_names
from equipoise.engine.runs import config_of
from equipoise.evidence.recomputed import read_predictions
from equipoise.report.measured import is_dense
from equipoise.report.record import RunRecord, setting

#: pixels per side
SIDE = 72
#: classes, the rarest ones, and examples of each that are right and wrong
MOST_CLASSES, MOST_EACH = 8, 4


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
    split = "test" if len(run.finals) else "valid"
    columns = predictions.columns
    chosen = predictions.where((columns["split"] == split) & (columns["view"] == run.end_view))
    rare = run.training_images.sum().sort_values(kind="stable").index[:MOST_CLASSES]
    return [example for name in rare for example in _of_class(chosen, str(name), federation, split)]


def allowed(run: RunRecord) -> bool:
    """Whether pictures of the run's data may be shown."""
    wish = setting(run.start.config, "report", "images") or "auto"
    return wish == "shown" or (wish == "auto" and setting(run.start.config, "data", "name") == "phantom")


def _of_class(predictions: Predictions, name: str, federation: Federation, split: str) -> Iterator[Example]:
    columns, label = predictions.columns, predictions.classes.index(name)
    told = columns["probabilities"].argmax(axis=1)
    confidence = columns["probabilities"].max(axis=1)
    for right in (True, False):
        rows = np.flatnonzero((columns["label"] == label) & ((told == label) == right))
        _, first = np.unique(columns["image"][rows], return_index=True)  # a global model meets an image at one site
        rows = rows[np.sort(first)]
        for row in rows[np.argsort(-confidence[rows], kind="stable")][:MOST_EACH]:
            source = _picture(federation, str(columns["place"][row]), split, str(columns["image"][row]))
            if source:
                guess = predictions.classes[told[row]]
                yield Example(name, guess, float(confidence[row]), str(columns["site"][row]), source)


def _picture(federation: Federation, place: str, part: str, image: str) -> str:
    """The picture of an image by its hash; empty where the place does not hold it."""
    split = next((own.splits.get(part) for own in federation.places() if own.name == place), None)
    if split is None:
        return ""
    at = np.flatnonzero(hashed_names(split)[0] == image)
    if not len(at):
        return ""
    pixels = split.images(at[:1])[0].permute(1, 2, 0).numpy()
    out = io.BytesIO()
    Image.fromarray(pixels.squeeze()).resize((SIDE, SIDE)).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
