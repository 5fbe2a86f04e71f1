"""Marks for entries of replies that servers only ever add up, by which secure sums (`privacy.secure_sums`) work.

A marked entry says how sites are added: as a plain sum, as a mean over sites, or as a mean over the sites that have a
class. With secure sums the server sees the sum alone. So a method whose sheet has an entry without a mark is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from equipoise.contract.protocol import Payload, Value, flatten, unflatten
from equipoise.sums import Layout, Term, term

#: added: a plain sum; mean: weighed by the reply's `examples`, or alike where train.aggregation is "uniform";
#: by_class: rows of classes, each weighed by the site's number of images of the class, or alike
Kind = Literal["added", "mean", "by_class"]

WORDS: dict[Kind, str] = {
    "added": "the sum over sites",
    "mean": "the mean over sites",
    "by_class": "the mean of each class over sites",
}


@dataclass(frozen=True)
class Summing:
    """How an entry is added up over sites.

    Args:
        by: of a mean by class, the entry with the number of images of each class
        weighting: size, uniform, or empty for what `train.aggregation` says
    """

    kind: Kind
    by: str = ""
    weighting: str = ""


class _Words(str):
    """A line of a disclosure sheet that can carry a mark."""

    summing: Summing


Text = TypeVar("Text", bound=str)


def added(text: Text) -> Text:
    """An entry that servers add up, such as a count."""
    return _marked(text, Summing("added"))


def averaged(text: Text) -> Text:
    """An entry that servers average over sites, such as a model."""
    return _marked(text, Summing("mean"))


def averaged_by_class(text: Text, by: str = "class_counts", weighting: str = "") -> Text:
    """An entry with a row for each class, which servers average over the sites that have the class."""
    return _marked(text, Summing("by_class", by, weighting))


def summing_of(text: str) -> Summing | None:
    """How an entry of a sheet is added up; None: its server reads what each site sent."""
    return getattr(text, "summing", None)


def like(text: str, model: str) -> str:
    """The text with the mark of another entry."""
    summing = summing_of(model)
    return text if summing is None else _marked(text, summing)


def _marked(text: Text, summing: Summing) -> Text:
    carrier = text if type(text) is not str else _Words(text)
    carrier.summing = summing  # type: ignore[union-attr]
    return carrier  # type: ignore[return-value]


# ---- from replies to terms of a sum, and back ------------------------------------------------------------------

#: the column with the weights of an entry that is averaged by class
WEIGHT = "weight of "


def terms_of(payload: Mapping[str, Value], entries: Mapping[str, str], weighting: str) -> dict[str, Term]:
    """What a site adds for a reply. `entries` is the action's part of the sheet, `weighting` is train.aggregation."""
    found: dict[str, Term] = {}
    for entry, value in payload.items():
        summing = summing_of(entries[entry])
        assert summing is not None, f"'{entry}' is not marked as a sum"
        weight: Any = None
        if summing.kind == "mean" and (summing.weighting or weighting) == "size":
            weight = payload["examples"]
        elif summing.kind == "by_class":
            counts = payload[counts_entry(entry, entries)]
            assert isinstance(counts, Tensor)
            weight = counts if (summing.weighting or weighting) == "size" else counts > 0
            found[WEIGHT + entry] = term(weight.double())
        for name, tensor in flatten({entry: value})[0].items():
            found[name] = term(tensor, weight)
        if not isinstance(value, Tensor | Mapping):
            found[entry] = term(value, weight)  # type: ignore[arg-type]
    return found


def whole_of(
    sums: Mapping[str, Tensor],
    layout: Layout,
    entries: Mapping[str, str],
    weighting: str,
    sites: int,
    device: torch.device,
) -> Payload:
    """The sums over some sites as one reply: sums, and means over sites. Columns that belong to no entry are left."""
    tensors, plain = dict[str, Tensor](), dict[str, Any]()
    for column in layout:
        entry, slash, _ = column.name.partition("/")
        if entry not in entries:
            continue
        numbers, summing = sums[column.name], summing_of(entries[entry])
        assert summing is not None
        if summing.kind == "mean":
            by_size = (summing.weighting or weighting) == "size"
            numbers = numbers.double() / (float(sums["examples"]) if by_size else sites)
        elif summing.kind == "by_class":
            weights = sums[WEIGHT + entry]
            weights = weights.masked_fill(weights == 0, 1.0).reshape(-1, *[1] * (numbers.dim() - 1))
            numbers = numbers.double() / weights
        value = column.value(numbers)
        if isinstance(value, Tensor):
            tensors[column.name] = value.to(device)
            if slash:
                plain[entry] = {}
        else:
            plain[entry] = value
    return unflatten(tensors, plain)


def counts_entry(entry: str, entries: Mapping[str, str]) -> str:
    """The entry with the number of images of each class, by which another is averaged; of the same component."""
    summing = summing_of(entries[entry])
    assert summing is not None
    prefix = entry.rpartition(".")[0]
    own = f"{prefix}.{summing.by}" if prefix else summing.by
    return own if own in entries else summing.by
