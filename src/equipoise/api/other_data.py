"""A finished model on the images of another federation: its predictions, its masks and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from equipoise.api import mask_frames
from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.data.federation import Federation, Site
from equipoise.data.splits import PARTS
from equipoise.engine.checkpoint import fingerprint
from equipoise.engine.events import first_event
from equipoise.engine.image_scores import ImageScores, Predictions, hashed_names, predictions_of
from equipoise.engine.prediction import Predictor, probabilities_of, sites_with_models
from equipoise.engine.runs import make_config

if TYPE_CHECKING:
    from equipoise.api.result import Result

#: images that a model sees at a time
BATCH = 256


def federation_like(result: Result, data: Mapping[str, Any], settings: Sequence[str] = ()) -> Federation:
    """Labelled images as a run's models take them: of the run's size, made square as the run's were.

    Args:
        data: what differs from that, as settings of the table `data`
        settings: the same as `key=value`
    """
    own = result.config.data
    table = {"size": first_event(result.path / "events.jsonl")["image_size"], "crop": own.crop}
    table |= {"colour_constancy": own.colour_constancy, "store": str(own.store) if own.store else None, **data}
    table = {key: value for key, value in table.items() if value is not None}
    keys = [text if text.startswith("data.") else f"data.{text}" for text in settings]
    return load_federation(make_config(None, keys, data=table).data, result.config.seed)


def predicted(result: Result, federation: Federation, site: str | None, split: str | None) -> Predictions:
    """What models predict for a federation's images, in the columns of the run's own predictions."""
    models = [site] if site is not None else _whose_models(result)
    if split not in (None, *PARTS):
        raise UserError(f"split = {split!r}; use train, valid or test, or leave it out for all images")
    if split is None:
        _refuse_own(result, federation)
    labels_here = _labels_here(result, federation)
    found: list[ImageScores] = []
    for owner in models:
        predictor = result.model(owner)
        _refuse_other_size(predictor, federation)
        view = "global" if owner is None else "personal"
        for place in _measured_at(federation, owner):
            for part, images in place.splits.items():
                if split in (None, part):
                    batches = np.array_split(np.arange(len(images)), max(1, -(-len(images) // BATCH)))
                    values = torch.cat([probabilities_of(predictor, images.images(batch)) for batch in batches])
                    whose, guesses = owner or place.name, values.argmax(1).numpy()
                    found.append(ImageScores(0, view, whose, place.name, part, images.labels, values.numpy(), guesses))
    if not found:
        raise UserError(f"{federation.name} has no {split} image to evaluate on; leave split out for all images")
    told = replace(predictions_of(found, federation), classes=result.classes)
    told.columns["label"] = labels_here[told.columns["label"]]
    if split is None:
        told.columns["split"] = np.full(len(told), "all")
    return told


def measured_masks(result: Result, federation: Federation | None, site: str | None, split: str | None) -> pd.DataFrame:
    """The scores of models for segmentation; without a federation, on the run's own validation and test images."""
    if split not in (None, *PARTS):
        raise UserError(f"split = {split!r}; use train, valid or test, or leave it out for all images")
    parts = [*PARTS] if split is None else [split]
    if federation is None:
        federation = load_federation(result.config.data, result.config.seed)
        parts = [part for part in parts if split is not None or part != "train"]
    elif split is None:
        _refuse_own(result, federation)
    owners = [site] if site is not None else _whose_models(result)
    models = [(owner, result.model(owner), _measured_at(federation, owner)) for owner in owners]
    for _, predictor, _ in models:
        _refuse_other_size(predictor, federation)
    return mask_frames.measured(models, federation, parts)


def _refuse_own(result: Result, federation: Federation) -> None:
    if fingerprint(federation) == result.record().start.data:
        raise UserError(
            "these are the images that the run learned from; evaluate on the others: --split test (split='test')"
        )


def _whose_models(result: Result) -> list[str | None]:
    """None for the global model, or the sites with personal ones where there is no global one."""
    try:
        result.model()
    except UserError:
        sites = sites_with_models(result.path)
        if not sites:
            raise
        return [*sites]
    return [None]


def _labels_here(result: Result, federation: Federation) -> np.ndarray:
    """The run's number of each class of another federation."""
    unknown = [name for name in federation.classes if name not in result.classes]
    if unknown:
        raise UserError(
            f"{federation.name} has classes that the run does not know: {', '.join(unknown)}; it knows "
            f"{', '.join(result.classes)}: rename the classes, or leave their images out"
        )
    return np.array([result.classes.index(name) for name in federation.classes])


def _measured_at(federation: Federation, owner: str | None) -> Sequence[Site]:
    """Where a model is measured: a site's own at the site of its name where there is one, any other everywhere."""
    own = [place for place in federation.sites if place.name == owner]
    return own or federation.places()


def _refuse_other_size(predictor: Predictor, federation: Federation) -> None:
    if (federation.channels, federation.image_size) != (predictor.channels, predictor.size):
        raise UserError(
            f"{federation.name} has images of {federation.image_size} pixels, the run's have {predictor.size}; load "
            f"the federation with size={predictor.size}"
        )


def names_by_hash(federation: Federation) -> tuple[dict[str, str], dict[str, str]]:
    """The names of a federation's images and groups by their hashes."""
    names: dict[str, str] = {}
    groups: dict[str, str] = {}
    for place in federation.places():
        for images in place.splits.values():
            index = images.store.index
            at = {int(row): position for position, row in enumerate(index.rows)}
            for row, image, group in zip(images.rows, *hashed_names(images)):
                names[image], groups[group] = index.names[at[int(row)]], index.groups[at[int(row)]]
    return names, groups
