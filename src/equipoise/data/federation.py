"""A federation: hospitals with their training, validation and test images, and what all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from equipoise.core.errors import first_few
from equipoise.data.data_config import DataConfig
from equipoise.data.feature_store import Features
from equipoise.data.splits import PARTS
from equipoise.data.store import Store, Task

if TYPE_CHECKING:
    import pandas as pd

    from equipoise.data.from_python import Column
    from equipoise.data.pixels import Images, Layout


@dataclass(frozen=True, eq=False)
class Split:
    """Some images of one site, in a store.

    Args:
        store: where the images are
        rows: int64 (n,), rows of the store
        labels: int64 (n,), class of each image; zeros for segmentation
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

    @property
    def task(self) -> Task:
        """What is learned of the images."""
        return self.store.index.task

    def masks(self, positions: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The structures at the pixels of the images at `positions` (b,): uint8 (b, H, W); for segmentation only."""
        return self.store.masks(self.rows[np.asarray(positions, dtype=np.int64)])

    def groups(self) -> np.ndarray:
        """The patient or lesion of each image (n,): the volume, where images are slices."""
        names: np.ndarray = np.array(self.store.index.groups)[self.store.index.positions(self.rows)]
        return names

    def class_counts(self, num_classes: int) -> np.ndarray:
        """Images of each class, or pixels of each structure for segmentation: int64 (num_classes,)."""
        if self.task == "segmentation":
            index = self.store.index
            of_pixels: np.ndarray = index.pixel_counts[index.positions(self.rows)].sum(axis=0)
            return of_pixels
        return np.bincount(self.labels, minlength=num_classes).astype(np.int64)

    def stretches(self) -> Iterator[np.ndarray]:
        """All rows, then all labels, in stretches that fit into memory."""
        yield self.rows
        yield self.labels

    def sample_digest(self) -> bytes:
        """Identifies the images, by a sample where they are very many."""
        return self.store.sample_digest(self.rows)


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

    def tells(self, part: str, num_classes: int, least: int = 0) -> bool:
        """Whether the site has images in a part that it may tell of: `least` of some class at least."""
        if least <= 1 or part not in self.splits:
            return part in self.splits
        split = self.splits[part]
        return (
            len(split) >= least
            if split.task == "segmentation"
            else bool((split.class_counts(num_classes) >= least).any())
        )

    def class_counts(self, num_classes: int, part: str = "train") -> np.ndarray:
        """Images (for segmentation, pixels) of each class in a part: int64 (num_classes,); zeros without the part."""
        if part not in self.splits:
            return np.zeros(num_classes, dtype=np.int64)
        return self.splits[part].class_counts(num_classes)


@dataclass(frozen=True, eq=False)
class Federation:
    """Hospitals that learn together.

    Args:
        sites: in fixed order; those without a training part only validate and test
        common: one validation and test set for all, or None where sites have their own
        cohorts: unseen cohorts, each with a test part only
        warnings: what a user should know about this data, such as lesions shared between parts
        config: the settings that make this federation again
        task: "segmentation" where images have masks; then `classes` are structures, the background first
        features: what its splits hold in place of pixels, where a frozen encoder has seen the images

    >>> import equipoise as eq
    >>> eq.load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    Federation('phantom': 3 classes, 2 sites: site 1, site 2)
    """

    name: str
    classes: tuple[str, ...]
    sites: tuple[Site, ...]
    image_size: int
    channels: int
    common: Site | None = None
    cohorts: tuple[Site, ...] = ()
    warnings: tuple[str, ...] = ()
    config: DataConfig | None = None
    task: Task = "classification"
    features: Features | None = None

    @classmethod
    def from_arrays(
        cls,
        images: Images,
        labels: Column | None = None,
        sites: Column | int | None = None,
        split: Column | None = None,
        group: Column | None = None,
        classes: Sequence[str] | None = None,
        *,
        masks: Images | None = None,
        names: Sequence[str] | None = None,
        subgroups: Mapping[str, Column] | None = None,
        layout: Layout | None = None,
        **settings: Any,
    ) -> Federation:
        """A federation of images that the program holds.

        >>> import numpy as np
        >>> random = np.random.default_rng(0)
        >>> images = random.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
        >>> sites = ["Bern"] * 30 + ["Graz"] * 30
        >>> fed = Federation.from_arrays(images, random.integers(0, 2, 60), sites, classes=["benign", "malignant"])
        >>> fed.table().groupby("site").sum().sum(axis=1).to_dict()
        {'Bern': 30, 'Graz': 30}

        Args:
            images: numpy or torch (n, H, W, 3), (n, 3, H, W) or grey (n, H, W); whole numbers from 0 to 255 or floats
                from 0 to 1. A list may hold images of different sizes, then `size=` says how large they become.
                `equipoise.data.pixels` states how channels are found.
            labels: (n,) class of each image: names, or whole numbers that count `classes` from 0
            sites: (n,) the site of each image; a number draws that many sites (`partition=`, `alpha=` say how)
            split: (n,) train, valid or test; without it, 70 / 10 / 20 % of each site's images, drawn by group
            group: (n,) the patient or lesion of each image: a group is never drawn into two splits
            classes: the names of the classes, in order; by default the labels themselves, sorted
            masks: (n, H, W) the structure at each pixel, instead of labels: whole numbers that count `classes` from 0,
                the background; of two classes also 0 and 255. `classes` are background and foreground by default
            names: (n,) what the images are called; by default their positions
            subgroups: what else is known of each image, such as `{"sex": sexes, "age": ages}`, for
                `Result.evaluate(by="sex")`; None or "" where it is unknown
            layout: "channels_first" or "channels_last", where the rule finds the wrong one
            **settings: any setting of the table `data`, such as `size=64`, `imbalance=10` or `partition_seed=1`

        Raises:
            UserError: when the images cannot make a federation
        """
        from equipoise.data.from_python import from_arrays

        return from_arrays(
            images, labels, sites, split, group, classes,
            masks=masks, names=names, subgroups=subgroups, layout=layout, **settings,
        )  # fmt: skip

    @classmethod
    def from_frame(
        cls,
        table: pd.DataFrame,
        path: str = "path",
        label: str = "label",
        site: str | None = None,
        group: str | None = None,
        split: str | None = None,
        root: Path | str | None = None,
        classes: Sequence[str] | None = None,
        *,
        mask: str | None = None,
        subgroups: Sequence[str] = (),
        **settings: Any,
    ) -> Federation:
        """A federation of the image files that a pandas table lists.

        The table becomes a manifest in the data folder, and the files are read, checked and packed as for
        `manifest:FILE`.

        Args:
            path: the column with the files' paths; relative ones start at `root`, or at the working folder
            label, site, group, split: the columns with the meanings of `from_arrays`
            classes: the names of the classes, in order; by default the labels, sorted
            mask: the column with the paths of masks, which take the place of labels
            subgroups: further columns to keep with the images, such as `["sex", "age"]`, for `scores(by="sex")`
            **settings: any setting of the table `data`, such as `size=224` or `crop="squash"`

        >>> import pandas as pd
        >>> from PIL import Image
        >>> table = pd.DataFrame({"file": [f"{n}.png" for n in range(20)], "dx": ["nevus", "melanoma"] * 10})
        >>> for number, file in enumerate(table["file"]):
        ...     Image.new("RGB", (32, 32), (number, 0, 0)).save(file)
        >>> Federation.from_frame(table, path="file", label="dx", size=32).classes
        ('melanoma', 'nevus')
        """
        from equipoise.data.from_python import from_frame

        return from_frame(table, path, label, site, group, split, root, classes, mask, subgroups, **settings)

    @classmethod
    def from_datasets(
        cls,
        datasets: Mapping[str, Any],
        classes: Sequence[str] | None = None,
        *,
        layout: Layout | None = None,
        **settings: Any,
    ) -> Federation:
        """A federation of torch datasets of (image, label).

        Each dataset is read once, without further augmentation: give datasets without random transforms.

        Args:
            datasets: by site, `(train, valid, test)` with None for one that is missing, or one dataset whose split is
                drawn
            classes, layout, **settings: as in `from_arrays`

        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.rand(20, 3, 32, 32), torch.arange(20) % 2)
        >>> fed = Federation.from_datasets({"Bern": (data, None, data), "Graz": (data, None, data)})
        >>> fed.table().sum().sum()
        np.int64(80)
        """
        from equipoise.data.from_python import from_datasets

        return from_datasets(datasets, classes, layout=layout, **settings)

    def table(self) -> pd.DataFrame:
        """The number of images by site and split (rows) and class (columns).

        A partition that is drawn is shown as a run with seed 1 draws it; `partition_seed` makes it one for all runs.
        """
        import pandas as pd

        rows = [(place.name, part) for place in self.places() for part in PARTS if part in place.splits]
        counts = [
            place.class_counts(len(self.classes), part)
            for place in self.places()
            for part in PARTS
            if part in place.splits
        ]
        index = pd.MultiIndex.from_tuples(rows, names=["site", "split"])
        return pd.DataFrame(np.stack(counts), index=index, columns=pd.Index(self.classes, name="class"))

    def __repr__(self) -> str:
        """Name, classes and sites alone: the arrays of images would fill the screen."""
        sites = first_few(site.name for site in self.sites)
        return f"Federation({self.name!r}: {len(self.classes)} classes, {len(self.sites)} sites: {sites})"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return str(self.table().to_html())

    def class_counts(self, part: str = "train") -> np.ndarray:
        """Images (or pixels) of each class in a part, over all sites and the common set, not cohorts: int64 (C,)."""
        places = (*self.sites, self.common) if self.common else self.sites
        counts: np.ndarray = np.sum([place.class_counts(len(self.classes), part) for place in places], axis=0)
        return counts

    def places(self) -> tuple[Site, ...]:
        """Everyone with images: sites, the common set, unseen cohorts."""
        common = () if self.common is None else (self.common,)
        return (*self.sites, *common, *self.cohorts)

    def training_sites(self, least: int = 0) -> tuple[Site, ...]:
        """The sites with training images that they may tell of, in order."""
        return tuple(site for site in self.sites if site.tells("train", len(self.classes), least))

    def pooled(self) -> Federation:
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
