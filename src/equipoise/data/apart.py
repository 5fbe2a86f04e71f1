"""Images that are kept apart for a final comparison: one fifth of all lesions, the same in every federation.

Federations share images. So only the name of an image's lesion or patient decides (without one, the image's name). No
federation trains on images that another keeps apart.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

#: one of so many groups is kept apart
ONE_IN = 5


def kept_apart(groups: Sequence[str] | np.ndarray) -> np.ndarray:
    """Whether the images of each group (n,) are kept apart, as a mask (n,). A group's name alone decides.

    >>> kept_apart(["HAM_0000003", "HAM_0000004", "HAM_0000005"]).tolist()
    [True, False, True]
    """
    names, number = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    chosen = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % ONE_IN == 0 for name in names]
    return np.array(chosen, dtype=bool)[number]


def parts_with_apart(parts: np.ndarray, groups: np.ndarray, joined: np.ndarray) -> np.ndarray:
    """The part of each image (n,), once the images kept apart alone test. Other test images train.

    Args:
        parts: (n,) "train", "valid" or "test"
        groups: (n,) the lesion of each image
        joined: (n,) groups that hold equal images count as one here; those of a group that is kept apart get no part
    """
    apart = kept_apart(groups)
    found = np.where(parts == "test", "train", parts).astype("<U5")
    found[np.isin(joined, joined[apart])] = ""
    found[apart] = "test"
    return found
