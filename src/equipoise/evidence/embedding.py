"""The features that a run's models give its images, and their maps to a plane: PCA, t-SNE."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equipoise.core.errors import UserError, install
from equipoise.data import load_federation
from equipoise.data.federation import Split
from equipoise.engine.checkpoint import fingerprint
from equipoise.engine.events import first_event
from equipoise.engine.image_scores import hashed_names
from equipoise.engine.prediction import Predictor, load_predictor, sites_with_models
from equipoise.engine.runs import config_of, with_encoder
from equipoise.nets.net import Net

#: images that a model sees at a time
BATCH = 256
#: ways to draw features in a plane
MAPS = ("pca", "t-sne")
PERPLEXITY = 30.0


@dataclass(frozen=True)
class Embedding:
    """Features (n, D) of a run's images under its reported models, and what each image is (n,).

    Args:
        personal: whether each site's images went through that site's own model
    """

    run: str
    classes: tuple[str, ...]
    features: np.ndarray
    label: np.ndarray
    site: np.ndarray
    split: np.ndarray
    image: np.ndarray
    personal: bool

    def save(self, path: Path) -> None:
        """Write everything as a compressed npz."""
        columns = {name: getattr(self, name) for name in ("features", "label", "site", "split", "image")}
        with path.open("wb") as file:
            np.savez_compressed(file, classes=np.array(self.classes), **columns)


def embedding_of(run: Path, most: int | None = None) -> Embedding:
    """The features of all images of a finished run; of very many, of `most`, evenly spaced in each part of a site.

    The run's global model gives them; where there is none, each site's personal model, to that site's images alone.
    """
    config = config_of(run)
    federation = load_federation(config.data, config.seed)
    known = first_event(run / "events.jsonl")
    trained_on = with_encoder(config, federation)[1]  # features of a frozen encoder, or the images
    if known.get("data") != fingerprint(trained_on):
        raise UserError(f"the images of {run} are not there any more, or have changed; put them back, or train again")
    if federation.task != "classification":
        raise UserError(f"{run} is of {federation.task}: features of single images are of classification alone")
    owners = sites_with_models(run)
    shared = None if owners and not _has_global(run) else load_predictor(run)
    total = sum(len(split) for place in federation.places() for split in place.splits.values())
    share = 1.0 if most is None else min(1.0, most / total)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in ("features", "label", "site", "split", "image")}
    for place in federation.places():
        if shared is None and place.name not in owners:
            continue
        predictor = shared or load_predictor(run, place.name)
        for part, split in place.splits.items():
            chosen = np.unique(np.linspace(0, len(split) - 1, max(1, round(share * len(split)))).astype(np.int64))
            rows["features"].append(np.concatenate([*_features(predictor, split, chosen)]))
            rows["label"].append(split.labels[chosen])
            rows["site"].append(np.full(len(chosen), place.name))
            rows["split"].append(np.full(len(chosen), part))
            rows["image"].append(hashed_names(split)[0][chosen])
    joined = {name: np.concatenate(values) for name, values in rows.items()}
    return Embedding(config.composition, federation.classes, **joined, personal=shared is None)


def _has_global(run: Path) -> bool:
    try:
        load_predictor(run)
    except UserError:
        return False
    return True


def _features(predictor: Predictor, split: Split, positions: np.ndarray) -> Iterator[np.ndarray]:
    """The pooled features (b, D) that the head of the predicting net gets, batch by batch."""
    seen: list[Tensor] = []
    nets = [module for module in predictor.parts.modules() if isinstance(module, Net) and module.has_head]
    if not nets:
        raise UserError(f"the net {predictor.config.net.name} does not tell its features from its head")
    hooks = [net.body.register_forward_hook(lambda body, inputs, output: _noted(seen, output)) for net in nets]
    try:
        for batch in np.array_split(positions, max(1, -(-len(positions) // BATCH))):
            seen.clear()
            with torch.no_grad():
                predictor(split.images(batch))
            yield seen[-1].float().flatten(1).numpy()
    finally:
        for hook in hooks:
            hook.remove()


def _noted(seen: list[Tensor], found: Tensor) -> None:
    seen.append(found.detach().mean((2, 3)) if found.ndim == 4 else found.detach())


def mapped(features: np.ndarray, kind: str, seed: int = 0) -> np.ndarray:
    """Features (n, D) in a plane (n, 2)."""
    if kind not in MAPS:
        raise UserError(f"there is no map {kind!r} of features; there are {', '.join(MAPS)}")
    main = principal(features, min(50, *features.shape))
    if kind == "pca":
        return np.pad(main[:, :2], ((0, 0), (0, max(0, 2 - main.shape[1]))))
    try:
        manifold = import_module("sklearn.manifold")
    except ImportError:
        raise UserError(f"t-SNE needs scikit-learn: {install('embed')}; or draw by --map pca") from None
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    found: np.ndarray = manifold.TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(main)
    return found


def principal(features: np.ndarray, components: int) -> np.ndarray:
    """The first principal components (n, k); each has the sign that makes its largest loading positive."""
    centred = features.astype(np.float64) - features.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:components]
    signs = np.sign(np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], 1))
    return centred @ (axes * np.where(signs == 0, 1, signs)).T
