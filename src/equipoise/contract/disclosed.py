"""What the entries of replies say of a site's images: marks by which a site holds back what would show a few patients.

A disclosure sheet names every entry in words. A marked entry also says which rule `privacy.least` follows there.
"""

from __future__ import annotations

from typing import Literal

#: by_class: rows of classes with too few training images are sent as zeros, as if the site lacked the class;
#: counts: so too, and they are the site's class counts; images: the training images of the other classes;
#: total: a sum over all training images, sent as their mean times `images`; share: of images that are right
Rule = Literal["by_class", "counts", "images", "total", "share"]

RULES: dict[str, str] = {
    "by_class": "zeros for classes of fewer training images",
    "counts": "0 for classes of fewer training images",
    "images": "without the images of classes of fewer training images",
    "total": "their mean, times the images of classes that are not held back",
    "share": "0 or 1 where fewer images are right, or wrong",
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
    """What becomes of an entry below `privacy.least`, in words; empty: it is sent as it is."""
    rule = rule_of(entry)
    return "" if rule is None else RULES[rule]
