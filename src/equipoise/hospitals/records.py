"""Parcels as Flower's records: the header and the shapes as a ConfigRecord, tensors as an ArrayRecord.

Flower moves every array in separate requests, so tensors travel joined, one flat array per kind of number.
"""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from equipoise.contract.protocol import Tensors
from equipoise.hospitals.parcels import Parcel, UnreadableParcel

HEADER, TENSORS = "header", "tensors"


class RecordMaker:
    """Makes parcels records. Parcels with the same tensors share the arrays, which are serialised and hashed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], tuple[ArrayRecord, str]] = {}

    def make(self, parcel: Parcel) -> RecordDict:
        """A parcel as the content of a Flower message."""
        key = tuple(parcel.tensors)
        if key not in self._made:
            self._made[key] = _joined(parcel.tensors)
        arrays, contents = self._made[key]
        note = ConfigRecord({"text": parcel.text, "contents": contents, "signature": parcel.signature})
        return RecordDict({HEADER: note, TENSORS: arrays})


def to_records(parcel: Parcel) -> RecordDict:
    """One parcel as the content of a Flower message."""
    return RecordMaker().make(parcel)


def _joined(tensors: Tensors) -> tuple[ArrayRecord, str]:
    """All tensors in one array for each kind of number, and where each lies."""
    joined: dict[str, list[np.ndarray]] = {}
    contents: list[list[Any]] = []
    for digest, tensor in tensors.items():
        array = tensor.numpy()
        joined.setdefault(array.dtype.name, []).append(array.reshape(-1))
        contents.append([digest, array.dtype.name, list(array.shape)])
    arrays = {kind: Array(np.concatenate(parts)) for kind, parts in joined.items()}
    return ArrayRecord(arrays), json.dumps(contents)


def from_records(records: RecordDict) -> Parcel:
    """The inverse of `to_records`.

    Raises:
        UnreadableParcel: when the records are not what `to_records` makes
    """
    try:
        note, arrays = records.config_records[HEADER], records.array_records[TENSORS]
        flat = {kind: _read(array) for kind, array in arrays.items()}
        return Parcel(str(note["text"]), _split(flat, json.loads(str(note["contents"]))), bytes(note["signature"]))  # type: ignore[arg-type]
    except UnreadableParcel:
        raise
    except Exception as problem:  # a stranger's message must not end the round
        raise UnreadableParcel(f"it is damaged ({type(problem).__name__})") from None


def _read(array: Array) -> np.ndarray:
    return np.load(io.BytesIO(array.data), allow_pickle=False)


def _split(flat: dict[str, np.ndarray], contents: list[list[Any]]) -> Tensors:
    """Cut joined arrays into tensors, in the order in which they were joined."""
    tensors: Tensors = {}
    start = dict.fromkeys(flat, 0)
    for digest, kind, shape in contents:
        size = math.prod(shape)
        piece = flat[kind][start[kind] : start[kind] + size]
        if len(piece) != size:
            raise UnreadableParcel("it holds fewer numbers than its header says")
        start[kind] += size
        tensors[digest] = torch.from_numpy(piece.reshape(shape)).clone()  # into separate memory, aligned
    return tensors
