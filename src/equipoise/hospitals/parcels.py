"""What travels between a server and a site in another process: a JSON header, and tensors named by their digest.

The header maps entries of the payload to tensors, so tensors that the other side already holds need not travel. A
signature over the header covers the tensors, too. There is no pickle on disk or wire.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equipoise.contract.protocol import Payload, Tensors, Value, check_payload, flatten, unflatten

#: changes whenever server and sites of two versions could misunderstand each other
PROTOCOL = 3
#: kinds of numbers that travel, by name
KINDS = {
    str(kind).removeprefix("torch."): kind
    for kind in (
        *(torch.float16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    )
}
LARGEST_HALF = torch.finfo(torch.float16).max
#: fields of an entry that name a tensor
DIGESTS = ("digest", "scale")


class UnreadableParcel(Exception):
    """A parcel that is damaged, or not what its header says."""


class MissingTensors(Exception):
    """A parcel leaves out tensors that the receiver does not hold (any more)."""


@dataclass(frozen=True)
class Contents:
    """A payload made ready to travel.

    Attributes:
        entries: what the header says of each tensor
        tensors: what travels, by digest
        exact: the tensors by name, before any rounding
    """

    entries: dict[str, dict[str, str]]
    plain: dict[str, Any]
    tensors: Tensors
    exact: Tensors = field(default_factory=dict)


@dataclass
class Parcel:
    """One message or reply. `text` is the header's written (and signed) form."""

    text: str
    tensors: Tensors = field(default_factory=dict)
    signature: bytes = b""

    @property
    def header(self) -> dict[str, Any]:
        """The header's fields."""
        try:
            header = json.loads(self.text)
        except (ValueError, RecursionError) as problem:
            raise UnreadableParcel(f"its header is not JSON ({problem})") from None
        if not isinstance(header, dict):
            raise UnreadableParcel("its header is not a table")
        return header

    @property
    def size(self) -> int:
        """Bytes that travel."""
        return len(self.text) + sum(t.numel() * t.element_size() for t in self.tensors.values())

    def without(self, known: Collection[str]) -> Parcel:
        """The same parcel less the tensors that the receiver holds."""
        return Parcel(self.text, {d: t for d, t in self.tensors.items() if d not in known}, self.signature)


class Packer:
    """Makes tensors ready to travel, each once; several messages share a model.

    Args:
        half: round weights to half precision on the wire. Weights are the float32 tensors of a dict (a model). Tensors
            that stand alone are counts, sums and prototypes: they stay exact, as does a weight too large for that.
    """

    def __init__(self, half: bool = False):
        self.half = half
        self._packed: dict[tuple[int, bool], tuple[Tensor, Tensor, str]] = {}

    def prepare(self, payload: Mapping[str, Value]) -> Contents:
        """Make a payload ready to travel."""
        tensors, plain = flatten(payload)
        entries, by_digest = {}, {}
        for name, tensor in tensors.items():
            packed, digest = self._pack(tensor, self.half and "/" in name)
            entries[name] = {"digest": digest, "dtype": str(tensor.dtype).removeprefix("torch.")}
            by_digest[digest] = packed
        return Contents(entries, plain, by_digest, tensors)

    def _pack(self, tensor: Tensor, half: bool) -> tuple[Tensor, str]:
        key = id(tensor), half  # the tensor is kept, so that no other one gets its number
        if key not in self._packed:
            packed = tensor.detach().cpu().contiguous()
            if half and _fits_half(packed):
                packed = packed.half()
            self._packed[key] = tensor, packed, tensor_digest(packed)
        return self._packed[key][1:]


def prepare(payload: Mapping[str, Value], half: bool = False) -> Contents:
    """Make one payload ready to travel."""
    return Packer(half).prepare(payload)


def seal(contents: Contents, **fields: Any) -> Parcel:
    """A parcel with these header fields."""
    header = {"protocol": PROTOCOL, "entries": contents.entries, "plain": contents.plain, **fields}
    return Parcel(json.dumps(header, sort_keys=True), contents.tensors)


def open_parcel(
    parcel: Parcel, held: Mapping[str, Tensor] | None = None, exact: Mapping[str, Tensor] | None = None
) -> tuple[Payload, Tensors]:
    """The payload of a parcel, and all its tensors by digest.

    Args:
        held: tensors by digest that the receiver has from before
        exact: tensors by name that the parcel may tell changes of

    Raises:
        UnreadableParcel: when a tensor is not what the header says
        MissingTensors: when one was left out that is not held
    """
    header = parcel.header
    if header.get("protocol") != PROTOCOL:
        raise UnreadableParcel(f"it speaks protocol {header.get('protocol')}, this side {PROTOCOL}")
    for digest, tensor in parcel.tensors.items():
        if tensor_digest(tensor) != digest:
            raise UnreadableParcel("a tensor is not what the header says")
    known = {**(held or {}), **parcel.tensors}
    try:
        entries: dict[str, dict[str, str]] = header["entries"]
        wanted = [entry[key] for entry in entries.values() for key in DIGESTS if key in entry]
        missing = set(wanted) - known.keys()
        if missing:
            raise MissingTensors(f"{len(missing)} tensors were left out that are not at hand")
        widths: dict[tuple[str, str], Tensor] = {}  # many names of one tensor take no more memory than one
        tensors = {name: _unpacked(entry, known, (exact or {}).get(name), widths) for name, entry in entries.items()}
        payload = unflatten(tensors, header["plain"])
        check_payload(payload, "a parcel")
    except (KeyError, TypeError, AttributeError, AssertionError) as problem:
        raise UnreadableParcel(f"its header is incomplete ({problem})") from None
    return payload, {digest: known[digest] for digest in wanted}


def _unpacked(
    entry: Mapping[str, str],
    known: Mapping[str, Tensor],
    exact: Tensor | None,
    widths: dict[tuple[str, str], Tensor],
) -> Tensor:
    packed, dtype = known[entry["digest"]], KINDS[entry["dtype"]]
    if "change" not in entry:
        key = entry["digest"], entry["dtype"]
        widths[key] = widths[key] if key in widths else packed.to(dtype)
        return widths[key]
    if exact is None or exact.shape != packed.shape or exact.dtype != dtype:
        raise UnreadableParcel("it tells a change of a tensor that was not sent")
    scale = known[entry["scale"]] if "scale" in entry else None
    if scale is not None and scale.shape != packed.shape[:1]:
        raise UnreadableParcel("the scales of a tensor are not as many as its rows")
    return exact.detach().cpu() + widened(packed, scale)


def widened(packed: Tensor, scale: Tensor | None) -> Tensor:
    """The numbers that a tensor in 16 or 8 bits stands for; `scale` has a factor for each row."""
    numbers = packed.float()
    return numbers if scale is None else numbers * scale.view(-1, *[1] * (packed.dim() - 1))


def _fits_half(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and (not tensor.numel() or bool(tensor.abs().max() <= LARGEST_HALF))


def tensor_digest(tensor: Tensor) -> str:
    """Identifies a contiguous tensor on the host by dtype, shape and bytes."""
    summary = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=16)
    summary.update(tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")
    return summary.hexdigest()


def digest_of(fields: Mapping[str, Any]) -> str:
    """Identifies plain values."""
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=12).hexdigest()


def write_counts(measures: Mapping[str, Tensors]) -> dict[str, Any]:
    """Measured counts as plain values, exact to the last bit."""
    return {
        place: {name: [str(t.dtype).removeprefix("torch."), t.tolist()] for name, t in counts.items()}
        for place, counts in measures.items()
    }


def read_counts(plain: Mapping[str, Any]) -> dict[str, Tensors]:
    """The inverse of `write_counts`."""
    return {
        place: {name: torch.tensor(values, dtype=KINDS[kind]) for name, (kind, values) in counts.items()}
        for place, counts in plain.items()
    }
