"""Computes the features of all images of a store once, in batches and on the device at hand."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from equipoise.core.errors import UserError
from equipoise.core.streams import generator
from equipoise.data.augment import Augmentation, AugmentConfig, build_augmentation
from equipoise.data.feature_store import ABOUT, FEATURES, HASH, IMAGES_SEEN, Draft, Features, FeatureStore
from equipoise.data.federation import Federation, Site, Split
from equipoise.data.store import Store, claimed
from equipoise.nets.encoders import Encoder, build_encoder
from equipoise.nets.net_config import NetConfig

#: images that an encoder sees at a time; a short batch is filled up, so that no image depends on its neighbours
BATCH = 64
#: part of the key: raise it when the same settings would give other features
VERSION = 1


def with_features(
    federation: Federation, net: NetConfig, augment: AugmentConfig, device: str = "cpu", progress: bool = False
) -> Federation:
    """The federation with features in place of its images, computed now where they are missing.

    Images of hospitals elsewhere cannot be read here: their splits stay unchanged.
    """
    if federation.task != "classification":
        raise UserError(f"{federation.name} has masks, and the net adapter classifies images; choose another net")
    encoder = build_encoder(net, federation.channels)
    own = encoder.augment(augment, federation.channels)
    pixels = build_augmentation(own, federation.image_size, federation.channels)
    shape = encoder.shape(federation.channels, pixels.size)
    told = Features(shape, net.views, len(pixels.views), encoder.digest, encoder.parameters)
    work = _Work(encoder, pixels, net.views, net.stored, shape, torch.device(device), progress)
    stores: dict[Store, FeatureStore] = {}

    def computed(split: Split) -> Split:
        if not split.store.readable:
            return split
        if split.store not in stores:
            stores[split.store] = work.of(split.store)
        return replace(split, store=stores[split.store])

    def at(site: Site) -> Site:
        return Site(site.name, {part: computed(split) for part, split in site.splits.items()})

    return replace(
        federation,
        sites=tuple(map(at, federation.sites)),
        common=None if federation.common is None else at(federation.common),
        cohorts=tuple(map(at, federation.cohorts)),
        features=replace(told, seconds=_seconds(stores.values())),
    )


def _seconds(stores: Iterable[FeatureStore]) -> float | None:
    """Seconds that an image took, where so many were computed that this says something."""
    told = [store.about for store in stores]
    computed = sum(about["computed"] for about in told)
    return sum(about["seconds"] for about in told) / computed if computed >= BATCH else None


@dataclass(frozen=True)
class _Work:
    """One way of making features, which any store can go through."""

    encoder: Encoder
    pixels: Augmentation
    views: int
    stored: str
    shape: tuple[int, int, int]
    device: torch.device
    progress: bool

    def of(self, pictures: Store) -> FeatureStore:
        """The features of a store's images, from its side or computed now."""
        key = _digest(self._alike(), self._of_views(), *_identity(pictures))
        name = self.encoder.name.rpartition("/")[2].replace(":", "-")
        folder = pictures.folder.with_name(f"{pictures.folder.name}-features-{name}-{key}")
        store = FeatureStore(folder, pictures)
        if not store.exists():
            with claimed(folder):
                if not store.exists():  # another process may have computed them meanwhile
                    self._build(pictures, folder, key)
        return store

    def _alike(self) -> str:
        """Identifies what makes the plain features of an image: equal for equal images of all stores."""
        return _digest(VERSION, self.encoder.digest, *_told(self.pixels.plain), self.stored)

    def _of_views(self) -> str:
        return _digest(self.views, *map(_told, self.pixels.views)) if self.views else ""

    def _build(self, pictures: Store, folder: Path, key: str) -> None:
        count = len(pictures.packed)
        draft = Draft(
            folder.with_name(f"{folder.name}.partial"),
            {"key": key, "device": self.device.type, "shape": list(self.shape)},
            count,
            (1 + self.views, *self.shape),
            np.dtype(self.stored),
        )
        module = self.encoder.module.to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        computed = 0
        with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), disable=not self.progress) as bar:
            task = bar.add_task(
                f"features by {self.encoder.name}", total=draft.done.size, completed=int(draft.done.sum())
            )
            seen = _seen(pictures)
            known = int(draft.done[:, 0].sum())
            bar.advance(task, self._copied(draft, seen, pictures.folder.parent) - known)
            began = time.perf_counter()
            for rows, view, images in self._batches(pictures, draft):
                # On a GPU, features in full float32: they equal a CPU's up to rounding.
                with torch.inference_mode(), _full_precision():
                    found = module(_filled(images, self.device))[: len(rows)]
                draft.write(rows, view, found.cpu().numpy())
                computed += len(rows)
                bar.advance(task, len(rows))
        seconds = time.perf_counter() - began
        draft.finish(
            folder,
            seen,
            {
                "alike": self._alike(),
                "encoder": self.encoder.name,
                "digest": self.encoder.digest,
                "pixels": self.pixels.size,
                "shape": list(self.shape),
                "views": self.views,
                "pipelines": len(self.pixels.views),
                "device": self.device.type,
                "computed": computed,
                "seconds": round(seconds, 3),
            },
        )

    def _copied(self, draft: Draft, seen: np.ndarray, root: Path) -> int:
        """Take plain features of equal images from other stores; gives how many."""
        wanted: dict[bytes, list[int]] = {}
        for row in np.flatnonzero(~draft.done[:, 0]).tolist():
            wanted.setdefault(bytes(seen[row]), []).append(row)
        for about in sorted(root.glob(f"*/{ABOUT}")):
            if json.loads(about.read_text()).get("alike") != self._alike() or not wanted:
                continue
            features = np.load(about.with_name(FEATURES), mmap_mode="r")
            others = {bytes(value): row for row, value in enumerate(np.load(about.with_name(IMAGES_SEEN)))}
            pairs = [(row, others[image]) for image in wanted.keys() & others.keys() for row in wanted.pop(image)]
            pairs.sort()
            for start in range(0, len(pairs), BATCH):
                rows, sources = np.array(pairs[start : start + BATCH]).T
                draft.write(rows, 0, features[sources, 0])
        return int(draft.done[:, 0].sum())

    def _batches(self, pictures: Store, draft: Draft) -> Iterator[tuple[np.ndarray, int, Tensor]]:
        """Batches that are not done: rows, view and images as the encoder takes them.

        Each block of images has a seed for each view, so that views are the same after a kill.
        """
        missing = np.flatnonzero(~draft.done[:, 0])
        for start in range(0, len(missing), BATCH):
            rows = missing[start : start + BATCH]
            yield rows, 0, self.pixels.plain(pictures.images(rows).to(self.device), None)
        for block in range(0, len(pictures.packed), BATCH):
            rows = np.arange(block, min(block + BATCH, len(pictures.packed)))
            for view in range(self.views):
                if not draft.done[rows, 1 + view].all():
                    random = generator(self.device, 0, "features", block // BATCH, view)
                    pipeline = self.pixels.view(view % len(self.pixels.views))
                    yield rows, 1 + view, pipeline(pictures.images(rows).to(self.device), random)


def _full_precision() -> AbstractContextManager[None]:
    """The context in which convolutions on a GPU run in float32, and repeat bit for bit."""
    return torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)


def _filled(images: Tensor, device: torch.device) -> Tensor:
    """Images (b, C, H, W) as a batch of the usual size, the last repeated."""
    missing = BATCH - len(images)
    whole = images if not missing else torch.cat([images, images[-1:].expand(missing, -1, -1, -1)])
    return whole.to(device).contiguous(memory_format=torch.channels_last)


def _seen(pictures: Store) -> np.ndarray:
    """A hash of each image, uint8 (N, 16)."""
    hashes = (hashlib.blake2b(image.tobytes(), digest_size=HASH).digest() for image in pictures.packed)
    return np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(-1, HASH)


def _identity(pictures: Store) -> tuple[Any, ...]:
    """What changes with a store's images."""
    rows = np.arange(len(pictures.packed))
    return pictures.packed.shape, pictures.index.checksum, pictures.sample_digest(rows).hex()


def _told(transform: Any) -> tuple[Any, ...]:
    """What a transform does to an image."""
    return transform.steps, transform.statistics


def _digest(*parts: Any) -> str:
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:12]
