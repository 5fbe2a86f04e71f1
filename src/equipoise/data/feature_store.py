"""Features of a store's images, which a frozen encoder computed once. They lie beside the store, and a run reads them
in place of the images."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.core.storage import write_text
from equipoise.data.store import Store, StoreIndex

FEATURES, ABOUT, IMAGES_SEEN = "features.npy", "features.json", "images-seen.npy"
BEGUN, DONE = "begun.json", "done.npy"
Shape = tuple[int, int, int]
#: bytes of the hash that an image is found again by
HASH = 16


@dataclass(frozen=True)
class Features:
    """What a federation has in place of pixels.

    Args:
        shape: channels, height and width of one image's features; pooled features (D,) are (D, 1, 1)
        views: augmented views of each image, stored after the plain one
        pipelines: how many pipelines made these views in turn
        encoder: digest of the encoder, weights included
        parameters: of the whole encoder
        seconds: that the encoder took for one image; None where that is not known
    """

    shape: Shape
    views: int = 0
    pipelines: int = 1
    encoder: str = ""
    parameters: int = 0
    seconds: float | None = None


class FeatureStore(Store):
    """Features in a folder beside the store of the images that they were computed from.

    Args:
        folder: a folder that `equipoise data features` or a run wrote
        pictures: the store of the images
    """

    def __init__(self, folder: Path | str, pictures: Store) -> None:
        super().__init__(folder)
        self._pictures = pictures

    def __reduce__(self) -> Any:
        return FeatureStore, (self.folder, self._pictures)

    @property
    def pictures(self) -> Store:
        return self._pictures

    def exists(self) -> bool:
        return (self.folder / ABOUT).is_file()

    @cached_property
    def about(self) -> dict[str, Any]:
        """What made these features, and how long it took."""
        try:
            found = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._unusable(str(error)) from error
        assert isinstance(found, dict)
        return found

    @property
    def index(self) -> StoreIndex:  # type: ignore[override]
        """The columns of the images' store: a row means the same image in both."""
        return self._pictures.index

    @cached_property
    def packed(self) -> np.ndarray:
        """All features, float (N, 1 + views, C, H, W), as a read-only memory map."""
        try:
            packed = np.load(self.folder / FEATURES, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise self._unusable(str(error)) from error
        if (
            packed.dtype not in (np.float16, np.float32)
            or packed.ndim != 5
            or len(packed) != len(self._pictures.packed)
        ):
            raise self._unusable(f"it holds {packed.dtype} {packed.shape}, not the features of these images")
        return packed

    @property
    def shape(self) -> Shape:
        return self.packed.shape[2:]

    def images(self, rows: np.ndarray | torch.Tensor) -> torch.Tensor:
        """The features of `rows` (b,), in that order: float (b, 1 + views, C, H, W)."""
        return torch.from_numpy(self.packed[np.asarray(rows, dtype=np.int64)])


class Draft:
    """Features that are being computed. A killed computation leaves its draft, and the next one goes on from there.

    Features are written with plain writes: those fail with an error on a full disk, where a memory map would kill the
    process.

    Args:
        folder: where the draft lies
        wanted: what identifies the computation; a draft of another one is deleted
        count: number of images
        shape: of the features of one image, views first
    """

    def __init__(self, folder: Path, wanted: dict[str, Any], count: int, shape: Sequence[int], dtype: np.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self._shape = (count, *shape)
        begun = folder / BEGUN
        if not begun.is_file() or json.loads(begun.read_text()) != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._empty(FEATURES, self._shape, dtype)
            self._empty(DONE, (count, shape[0]), np.dtype(bool))
            write_text(begun, json.dumps(wanted))
        self.done = np.load(folder / DONE)
        self._features = open(folder / FEATURES, "r+b")  # noqa: SIM115 closed by `close`
        self._notes = open(folder / DONE, "r+b")  # noqa: SIM115
        self._header = os.fstat(self._features.fileno()).st_size - math.prod(self._shape) * dtype.itemsize
        self._notes_header = os.fstat(self._notes.fileno()).st_size - self.done.size

    def _empty(self, name: str, shape: Sequence[int], dtype: np.dtype) -> None:
        """A file of zeros that take no room yet."""
        with open(self.folder / name, "wb") as file:
            header = np.lib.format.header_data_from_array_1_0(np.empty(0, dtype)) | {"shape": tuple(shape)}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + math.prod(shape) * dtype.itemsize)

    def write(self, rows: np.ndarray, view: int, values: np.ndarray) -> None:
        """Keep one view's features (b, C, H, W) of the images `rows` (b,)."""
        views, size = self._shape[1], math.prod(self._shape[2:]) * self.dtype.itemsize
        for row, value in zip(rows.tolist(), np.ascontiguousarray(values.astype(self.dtype))):
            self._features.seek(self._header + (row * views + view) * size)
            self._features.write(value.tobytes())
        self._features.flush()
        self.done[rows, view] = True
        for row in rows.tolist():
            self._notes.seek(self._notes_header + row * views + view)
            self._notes.write(b"\x01")
        self._notes.flush()

    def close(self) -> None:
        """Let go of the files."""
        self._features.close()
        self._notes.close()

    def finish(self, folder: Path, seen: np.ndarray, about: dict[str, Any]) -> None:
        """Put the draft into its place; with its last file, the folder is complete."""
        self.close()
        np.save(self.folder / IMAGES_SEEN, seen)
        write_text(self.folder / ABOUT, json.dumps(about))
        (self.folder / BEGUN).unlink()
        (self.folder / DONE).unlink()
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(self.folder, folder)
