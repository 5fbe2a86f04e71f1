"""Equal images: the same content under several names, which may lie in several parts, at several sites, or under
several labels."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from equipoise.core.errors import first_few

#: rows of the packed file whose images are equal
EqualRows = tuple[tuple[int, ...], ...]
#: what follows from equal images in several of these
CONSEQUENCES = {
    "parts": 'scores count images that were trained on; data.split = "grouped" keeps equal images in one part',
    "sites": "sites may share patients",
    "classes": "one of their labels is wrong",
}


def equal_rows(packed: np.ndarray, rows: Iterable[int]) -> EqualRows:
    """Sets of rows whose prepared images (C, H, W) are equal.

    Images of one colour everywhere do not count: an empty slice says nothing of where it comes from.
    """
    found: dict[bytes, list[int]] = {}
    for row in rows:
        image = packed[row]
        if (image != image[:, :1, :1]).any():
            found.setdefault(hashlib.blake2b(image.tobytes(), digest_size=16).digest(), []).append(int(row))
    return tuple(tuple(alike) for alike in found.values() if len(alike) > 1)


def joined_groups(groups: Sequence[str] | np.ndarray, rows: Sequence[int] | np.ndarray, equal: EqualRows) -> np.ndarray:
    """The group (n,) of each image, with groups that share an equal image under one name.

    >>> joined_groups(["a", "b", "c", "d"], [0, 1, 2, 3], ((0, 2), (2, 3))).tolist()
    ['a', 'b', 'a', 'a']
    """
    group_of = dict(zip(np.asarray(rows).tolist(), np.asarray(groups).tolist()))
    leader: dict[str, str] = {}

    def first(group: str) -> str:
        while group in leader:
            group = leader[group]
        return group

    for alike in equal:
        names = [first(group_of[row]) for row in alike if row in group_of]
        leader |= {name: names[0] for name in names[1:] if name != names[0]}
    return np.array([first(group) for group in group_of.values()])


def equal_images_told(
    equal: EqualRows, columns: Mapping[str, Mapping[int, object]], names: Mapping[int, str] | None
) -> list[str]:
    """A warning that counts the equal images which lie in several parts, sites or classes.

    Args:
        columns: of these, the part, site or class of each row
        names: of the images, to name some of them; None names none
    """
    spread: dict[int, Collection[int]] = {}
    counts = {}
    for what, values in columns.items():
        differing = [alike for alike in equal if len({values[row] for row in alike if row in values}) > 1]
        images = sum(row in values for alike in differing for row in alike)
        spread |= {alike[0]: alike for alike in differing}
        if images:
            counts[what] = images
    if not counts:
        return []
    shown = first_few((" = ".join(names[row] for row in alike) for alike in spread.values()), 3) if names else ""
    follows = "; ".join(CONSEQUENCES[what] for what in counts)
    told = ", ".join(f"{number} in several {what}" for what, number in counts.items())
    return [f"images with equal content: {told}{f' ({shown})' if shown else ''}: {follows}"]
