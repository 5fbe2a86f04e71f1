"""Packed images: one memory-mapped uint8 file (N, C, H, W) beside a JSON index that says what each row is."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from equipoise.core.errors import UserError, first_few
from equipoise.core.storage import locked, write_text
from equipoise.data.duplicates import EqualRows

FORMAT = 1
IMAGES, MASKS, INDEX = "images.npy", "masks.npy", "index.json"
#: columns that the first stores did not have
ADDED_LATER = ("pooled", "extra", "equal", "pixels")
Task = Literal["classification", "segmentation"]
#: so many images stand for all of a part where its content is identified
SAMPLED = 512


@dataclass(frozen=True)
class StoreIndex:
    """What a store holds: facts about the data set, and one entry per image in each column.

    Args:
        splits: part that the data set's authors gave each image ("train", "valid", "test", or "" for none)
        clean: part in a given split without shared groups, where the data set has one, else ""
        pooled: part in the authors' split of all images together; empty where that is `splits`
        rows: row of each image in the packed file
        cohorts: names of the sites that are unseen cohorts
        common: validation and test parts belong to the federation, not to its sites
        extra: what else the data set tells of each image, such as age and sex, as text; by title
        equal: sets of rows with equal images, where these were looked for
        pixels: of each image, its pixels of each class, where the classes are structures that masks show
        facts: what people may want to know: where the images come from, what was left out
        checksum: of the listing the store was built from
    """

    source: str
    classes: tuple[str, ...]
    names: tuple[str, ...]
    labels: np.ndarray
    sites: tuple[str, ...]
    groups: tuple[str, ...]
    splits: tuple[str, ...]
    clean: tuple[str, ...]
    rows: np.ndarray
    ratios: tuple[float, float, float] = (0.7, 0.1, 0.2)
    cohorts: tuple[str, ...] = ()
    common: bool = False
    pooled: tuple[str, ...] = ()
    extra: dict[str, tuple[str, ...]] = field(default_factory=dict)
    equal: EqualRows = ()
    pixels: tuple[tuple[int, ...], ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    checksum: str = ""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def task(self) -> Task:
        """What is learned of the images: their classes, or where structures lie in them."""
        return "segmentation" if self.pixels else "classification"

    @cached_property
    def pixel_counts(self) -> np.ndarray:
        """Pixels of each structure in each image: int64 (N, C)."""
        return np.array(self.pixels, dtype=np.int64).reshape(len(self), len(self.classes))

    def positions(self, rows: np.ndarray) -> np.ndarray:
        """The places (n,) in the columns of images by their rows (n,) in the packed file."""
        return np.searchsorted(self.rows, rows)

    def warnings(self, with_names: bool = True) -> list[str]:
        """What a user should know of these images. Names of files may name patients, so a server gets the warning
        without them."""
        left_out, others = self.facts.get("left_out", ()), self.facts.get("warnings", ())
        if not left_out:
            return list(others)
        what = "image was" if len(left_out) == 1 else "images were"
        told = f"{len(left_out)} missing or unreadable {what} left out"
        names = f": {first_few(left_out)}" if with_names else ""
        # Stores of an earlier layout hold the sentence, names and all, among the others.
        return [*(text for text in others if " missing or unreadable images were left out" not in text), told + names]


class Store:
    """Images in a prepared folder. Only the rows asked for are read, and a copy sent to another process
    carries the folder's name, not the images.

    Args:
        folder: a folder written by `write_store` or by `equipoise.data.prepare`
    """

    #: whether the images lie on this machine
    readable = True

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def __reduce__(self) -> tuple[type["Store"], tuple[Path]]:
        return Store, (self.folder,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and self.folder == other.folder

    def __hash__(self) -> int:
        return hash(self.folder)

    def __repr__(self) -> str:
        return f"Store({str(self.folder)!r})"

    @property
    def pictures(self) -> "Store":
        """The store of the images themselves, where this one holds what was computed from them."""
        return self

    def exists(self) -> bool:
        """Whether a complete store lies in the folder."""
        return (self.folder / INDEX).is_file()

    @cached_property
    def index(self) -> StoreIndex:
        """The columns of the JSON index."""
        try:
            content = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._unusable(str(error)) from error
        if content.pop("format", None) != FORMAT:
            raise self._unusable("it was written by another version")
        facts = content.pop("facts")
        columns: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in content.items()
        }
        columns["extra"] = {title: tuple(values) for title, values in columns.get("extra", {}).items()}
        for key in ("equal", "pixels"):
            columns[key] = tuple(map(tuple, columns.get(key, ())))
        for key in ("labels", "rows"):
            columns[key] = np.asarray(columns[key], dtype=np.int64)
        return StoreIndex(**columns, facts=facts)

    @cached_property
    def packed(self) -> np.ndarray:
        """All images, uint8 (N, C, H, W), as a read-only memory map."""
        try:
            packed = np.load(self.folder / IMAGES, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise self._unusable(str(error)) from error
        if packed.dtype != np.uint8 or packed.ndim != 4:
            raise self._unusable(f"it holds {packed.dtype} {packed.shape}, not packed images")
        return packed

    @cached_property
    def packed_masks(self) -> np.ndarray:
        """The structure at every pixel, uint8 (N, H, W), as a read-only memory map; for segmentation only."""
        try:
            return np.load(self.folder / MASKS, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise self._unusable(str(error)) from error

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        return self.packed.shape[1:]

    def images(self, rows: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The images of `rows` (b,), in that order: uint8 (b, C, H, W)."""
        return torch.from_numpy(self.packed[np.asarray(rows, dtype=np.int64)])

    def masks(self, rows: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The structures at the pixels of `rows` (b,), in that order: uint8 (b, H, W); for segmentation only."""
        return torch.from_numpy(self.packed_masks[np.asarray(rows, dtype=np.int64)])

    def sample_digest(self, rows: np.ndarray) -> bytes:
        """Identifies the images of `rows` by some of them: all of a few, evenly spaced ones of many."""
        masks = self.packed_masks if (self.folder / MASKS).exists() else None
        spaced = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), SAMPLED)).astype(np.int64))
        digest = hashlib.sha256()
        for row in np.asarray(rows)[spaced]:
            digest.update(self.packed[row].tobytes())
            if masks is not None:
                digest.update(masks[row].tobytes())
        return digest.digest()

    def _unusable(self, reason: str) -> UserError:
        return UserError(f"the store {self.folder} cannot be used: {reason}; delete it and prepare it again")


def with_masks(index: StoreIndex, masks: np.ndarray, classes: tuple[str, ...]) -> StoreIndex:
    """The index of images whose masks (N, H, W), by the rows of the packed file, show structures and no class."""
    counts = (np.bincount(masks[row].ravel(), minlength=len(classes)) for row in index.rows)
    pixels = tuple(tuple(count.tolist()) for count in counts)
    return replace(index, classes=classes, labels=np.zeros(len(index), dtype=np.int64), pixels=pixels)


def write_index(folder: Path, index: StoreIndex) -> None:
    """Write the JSON index of a store, last of all: a folder with an index is complete."""
    content = asdict(index) | {"labels": index.labels.tolist(), "rows": index.rows.tolist(), "format": FORMAT}
    for name in ADDED_LATER:  # without them, earlier versions can read the store
        if not content[name]:
            del content[name]
    write_text(folder / INDEX, json.dumps(content))


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes from building the store in `folder` meanwhile, where the system has file locks.

    Raises:
        UserError: when the folder cannot be written, for example on a full disk
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(f"{folder.name}.lock"), wait=True):
            yield
    except OSError as error:
        raise UserError(
            f"cannot write prepared images to {folder.parent}: {error}; make room there, or set data.store or "
            "EQUIPOISE_DATA to another folder"
        ) from error
