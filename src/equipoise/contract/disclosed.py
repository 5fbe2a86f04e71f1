"""What the entries of replies say of a site's images: marks by which a site holds back what would show a few patients.

A disclosure sheet names every entry in words. A marked entry also says which rule `privacy.least` follows there. Every
engine applies the rules where a site's reply is made, so that a simulation and hospitals send the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from equipoise.contract.protocol import Payload, Value

#: by_class: rows of classes with too few training images are sent as zeros, as if the site lacked the class;
#: counts: so too, and they are the site's class counts; images: the training images of the other classes;
#: total: a sum over all training images, sent as their mean times `images`; share: of images that are right;
#: shares: a number from 0 to 1 that the site makes of `shown` class counts; measured: counts of an evaluation;
#: steps: of local training, as its length in steps, sent unchanged
Rule = Literal["by_class", "counts", "images", "total", "share", "shares", "measured", "steps"]

RULES: dict[str, str] = {
    "by_class": "zeros for classes of fewer training images",
    "counts": "0 for classes of fewer training images",
    "images": "without the images of classes of fewer training images",
    "total": "their mean, times the images of classes that are not held back",
    "share": "0 or 1 where fewer images are right, or wrong",
    "shares": "made of the classes that are not held back",
    "measured": "classes of fewer images are left out, and smaller cells and bins join others",
    "steps": "",
}


class Entry(str):
    """What an entry of a reply is, in words, with the rule by which `privacy.least` changes it."""

    rule: Rule

    def __new__(cls, text: str, rule: Rule = "by_class") -> Entry:
        entry = super().__new__(cls, text)
        entry.rule = rule
        return entry


def rule_of(entry: str) -> Rule | None:
    """The rule of an entry of a sheet; None: it is not about few images."""
    return entry.rule if isinstance(entry, Entry) else None


def below_the_limit(entry: str) -> str:
    """What becomes of an entry below `privacy.least`, in words; empty: it is sent unchanged."""
    rule = rule_of(entry)
    return "" if rule is None else RULES[rule]


def shown(counts: Tensor, least: int) -> Tensor:
    """Class counts (C,) as they may leave a site: 0 for classes of fewer than `least` images."""
    return counts.masked_fill(counts < least, 0)


def held_back(payload: Payload, entries: Mapping[str, str], class_counts: Tensor, least: int) -> Payload:
    """A reply without what would show fewer than `least` training images.

    Args:
        entries: the action's part of the disclosure sheet
        class_counts: training images (C,) of each class at the site
    """
    if least <= 1:
        return payload
    return {name: _held_back(value, rule_of(entries[name]), class_counts, least) for name, value in payload.items()}


def _held_back(value: Value, rule: Rule | None, class_counts: Tensor, least: int) -> Any:
    if rule in ("by_class", "counts") and isinstance(value, Tensor):
        few = (class_counts < least).reshape(-1, *[1] * (value.dim() - 1))
        return value.masked_fill(few, 0)
    if rule == "images":
        # Of masks, class counts are of pixels: what is held back is a share of all.
        return round(int(value) * float(shown(class_counts, least).sum() / class_counts.sum()))  # type: ignore[arg-type]
    if rule == "total":
        return float(value) * float(shown(class_counts, least).sum() / class_counts.sum())  # type: ignore[arg-type]
    if rule == "share":
        return _coarse(float(value), int(class_counts.sum()), least)  # type: ignore[arg-type]
    return value


def _coarse(share: float, images: int, least: int) -> float:
    """A share of images that stands for none or all of them, or for at least so many on either side."""
    right = round(share * images)
    if 0 < right < least:
        return 0.0
    return 1.0 if 0 < images - right < least else share
