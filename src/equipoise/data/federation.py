"""A federation: hospitals with their training, validation and test images, and what all of them share."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from equipoise.data.splits import PARTS
from equipoise.data.store import Store


@dataclass(frozen=True, eq=False)
class Split:
    """Some images of one site, in a store.

    Args:
        store: where the images are
        rows: int64 (n,), rows of the store
        labels: int64 (n,), class of each image
    """

    store: Store
    rows: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.labels):
            raise ValueError(f"{len(self.rows)} rows but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.rows)

    def images(self, positions: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The images at `positions` (b,) of this split: uint8 (b, C, H, W). Reads no other image."""
        return self.store.images(self.rows[np.asarray(positions, dtype=np.int64)])


@dataclass(frozen=True, eq=False)
class Site:
    """A hospital: its name and the parts it has, any of "train", "valid" and "test", none of them empty."""

    name: str
    splits: Mapping[str, Split]

    def __post_init__(self) -> None:
        unknown = set(self.splits) - set(PARTS)
        if unknown:
            raise ValueError(f"site {self.name!r} has unknown parts {sorted(unknown)}")
        object.__setattr__(self, "splits", {part: split for part, split in self.splits.items() if len(split)})

    def class_counts(self, num_classes: int, part: str = "train") -> np.ndarray:
        """Images of each class in a part: int64 (num_classes,); zeros where the site has no such part."""
        labels = self.splits[part].labels if part in self.splits else np.zeros(0, dtype=np.int64)
        return np.bincount(labels, minlength=num_classes).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Federation:
    """Hospitals that learn together.

    Args:
        sites: in fixed order; those without a training part only validate and test
        common: one validation and test set for all, or None where sites have their own
        cohorts: unseen cohorts, each with a test part only
        warnings: what a user should know about this data, such as lesions shared between parts
    """

    name: str
    classes: tuple[str, ...]
    sites: tuple[Site, ...]
    image_size: int
    channels: int
    common: Site | None = None
    cohorts: tuple[Site, ...] = ()
    warnings: tuple[str, ...] = ()

    def class_counts(self, part: str = "train") -> np.ndarray:
        """Images of each class in a part, over all sites and the common set, not the cohorts: int64 (C,)."""
        places = (*self.sites, self.common) if self.common else self.sites
        return np.sum([place.class_counts(len(self.classes), part) for place in places], axis=0)

    def places(self) -> tuple[Site, ...]:
        """Everyone with images: sites, the common set, unseen cohorts."""
        common = () if self.common is None else (self.common,)
        return (*self.sites, *common, *self.cohorts)

    def training_sites(self) -> tuple[Site, ...]:
        """The sites with training images, in order."""
        return tuple(site for site in self.sites if "train" in site.splits)

    def pooled(self) -> "Federation":
        """The same data with all training images at one site named "pooled", for central learning.

        Validation and test parts stay with their sites.
        """
        train = [site.splits["train"] for site in self.training_sites()]
        if len({split.store for split in train}) != 1:
            raise ValueError("pooling needs training images that lie in one store")
        rows = np.concatenate([split.rows for split in train])
        labels = np.concatenate([split.labels for split in train])
        pool = Site("pooled", {"train": Split(train[0].store, rows, labels)})
        rest = (
            Site(site.name, {part: split for part, split in site.splits.items() if part != "train"})
            for site in self.sites
        )
        return replace(self, sites=(pool, *(site for site in rest if site.splits)))
