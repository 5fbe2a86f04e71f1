"""Fixed-point numbers that add up exactly: sites' tensors become 64-bit integers, and sums of these become tensors.

Integers add up alike in any order, and modulo 2**64 masks cancel. So a sum has the same bits with and without masks.
A number x that counts w times becomes rint(w * x * 2**bits). A sum over n sites is off by at most n * 2**-(bits + 1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equipoise.core.errors import UserError

#: binary digits after the point: of tensors that are weighed by numbers of images, of others, of whole numbers
WEIGHED_BITS, PLAIN_BITS, WHOLE_BITS = BITS = 24, 32, 0
#: dtypes of tensors that can be added, by name
KINDS: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "uint8", "int32", "int64", "bool")
}


class TooLarge(Exception):
    """A number that fixed-point arithmetic cannot hold."""


@dataclass(frozen=True)
class Term:
    """What one site adds under one name: float64 or int64 numbers, times their weight already.

    `kind` is the type of the value that they were made of: a dtype, or "int" or "float" for a plain number.
    """

    numbers: Tensor
    bits: int
    kind: str


@dataclass(frozen=True)
class Stretch:
    """Where a name's numbers stand in the vector of all, and how they are read."""

    name: str
    shape: tuple[int, ...]
    bits: int
    kind: str

    def value(self, numbers: Tensor) -> Tensor | int | float:
        """Numbers as a value of the kind that sites sent; whole kinds are rounded, a bool says whether there is any."""
        if self.kind == "int":
            return round(numbers.item())
        if self.kind == "float":
            return float(numbers.item())
        if self.kind == "bool":
            return numbers > 0
        kind = KINDS[self.kind]
        return numbers.to(kind) if kind.is_floating_point else numbers.round().to(kind)


Layout = tuple[Stretch, ...]


def layout_of(terms: Mapping[str, Term]) -> Layout:
    """The stretches of some terms, in the order of their names."""
    return tuple(
        Stretch(name, tuple(terms[name].numbers.shape), terms[name].bits, terms[name].kind) for name in sorted(terms)
    )


def layout_text(layout: Layout) -> str:
    """A layout in one line, the same for equal layouts."""
    return ";".join(f"{c.name}:{'x'.join(map(str, c.shape))}:{c.bits}:{c.kind}" for c in layout)


def read_layout(text: str) -> Layout:
    """The inverse of `layout_text`; ValueError where it is none."""
    columns = []
    for word in filter(None, text.split(";")):
        name, shape, bits, kind = word.rsplit(":", 3)
        sizes = tuple(int(size) for size in shape.split("x") if size)
        if min(sizes, default=0) < 0 or int(bits) not in BITS or kind not in {*KINDS, "int", "float"}:
            raise ValueError(f"'{word[:80]}' is no column of a sum")
        columns.append(Stretch(name, sizes, int(bits), kind))
    return tuple(columns)


def length(layout: Layout) -> int:
    """Numbers of a vector with these columns."""
    return sum(math.prod(column.shape) for column in layout)


def encoded(terms: Mapping[str, Term], sites: int) -> Tensor:
    """The vector (n,) of int64 that a site adds, on the host.

    Raises:
        TooLarge: where `sites` such numbers could exceed 64 bits
    """
    limit = 2.0**62 / max(sites, 1)
    pieces = []
    for column in layout_of(terms):
        whole = terms[column.name].numbers
        if whole.is_floating_point():
            whole = torch.round(whole * 2.0**column.bits)
        if whole.numel() and not bool((whole.abs() <= limit).all()):  # NaN and infinity, too
            raise TooLarge(f"'{column.name}' holds a number that is not finite or too large for a secure sum")
        pieces.append(whole.to(torch.int64).reshape(-1).cpu())
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def decoded(total: Tensor, layout: Layout) -> dict[str, Tensor]:
    """The sums by name: float64, or int64 where the columns hold whole numbers."""
    if total.dtype != torch.int64 or tuple(total.shape) != (length(layout),):
        raise UserError(f"a sum of {tuple(total.shape)} {total.dtype} does not have the columns that sites named")
    found, start = {}, 0
    for column in layout:
        size = math.prod(column.shape)
        numbers = total[start : start + size].reshape(column.shape)
        found[column.name] = numbers.double() / 2.0**column.bits if column.bits else numbers.clone()
        start += size
    return found


def sum_of(vectors: Sequence[Tensor]) -> Tensor:
    """The sum (n,) of int64 vectors, modulo 2**64."""
    total = torch.zeros_like(vectors[0])
    for vector in vectors:
        total += vector
    return total


def largest_error(sites: int, weight: float = 1.0, bits: int = WEIGHED_BITS) -> float:
    """How far a mean over sites may lie from the exact one before it is rounded; `weight` is that of all sites."""
    return sites * 2.0 ** -(bits + 1) / weight


def term(value: Tensor | float, weight: Tensor | float | None = None) -> Term:
    """A site's value, times a weight if given, ready to be added.

    A tensor of weights (C,) has one for each row of the value (C, ...).
    """
    if not isinstance(value, Tensor):
        kind = "int" if isinstance(value, int) else "float"  # a bool among them counts as 0 or 1
        value = torch.tensor(value, dtype=torch.int64 if kind == "int" else torch.float64)
    else:
        kind = str(value.dtype).removeprefix("torch.")
        value = value.detach().double() if value.is_floating_point() else value.detach().long()
    if weight is None:
        return Term(value, PLAIN_BITS if value.is_floating_point() else WHOLE_BITS, kind)
    fine = isinstance(weight, Tensor) and weight.dtype == torch.bool
    if isinstance(weight, Tensor):
        weight = weight.to(value.device, value.dtype).reshape(-1, *[1] * (value.dim() - 1))
    whole = not value.is_floating_point()
    return Term(value * weight, WHOLE_BITS if whole else PLAIN_BITS if fine else WEIGHED_BITS, kind)
