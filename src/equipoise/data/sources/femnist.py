"""FEMNIST of LEAF (Caldas et al. 2018): handwritten digits and letters, 62 classes, writers as sites.

The source holds the 396 of 3,597 writers with fewer than 150 images, as FedBM (2025) does. FedBM draws 50 of them for
each experiment, and 35 train, 5 validate and 10 test: `data.split = "sites"` with `data.sites = 50`.
"""

import io
import json
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from equipoise.core.errors import UserError
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import locate
from equipoise.data.sources import Listing, Record, expect

TITLE = "FEMNIST, 62 classes, writers as sites"
SIZE = 28
PARTITION = "source"
LICENCE = "images: NIST Special Database 19, free to use; LEAF: BSD 2-Clause"
OBTAIN = (
    "https://github.com/TalwalkarLab/leaf: data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 makes the files "
    "all_data_*.json"
)

CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
FEW = 150  # images: writers with fewer take part
COUNTS = {"writers": 3597, "writers with fewer than 150 images": 396, "images": 814_277}


def listing(config: DataConfig, root: Path) -> Listing:
    """All images of the writers with few of them; each writer is a site."""
    files = sorted(root.rglob("all_data_*.json"))
    if not files:
        raise UserError(f"{root} has no files all_data_*.json of LEAF's {config.name}")
    records, sizes = list[Record](), dict[str, int]()
    for path in files:
        content = _read(path)
        sizes |= zip(content["users"], content["num_samples"])
        for user in content["users"]:
            if sizes[user] < FEW:
                records += _of_writer(path, user, content)
    few = sum(size < FEW for size in sizes.values())
    counts = Counter(dict(zip(COUNTS, (len(sizes), few, sum(sizes.values())))))
    warnings = expect(config, counts, COUNTS)
    records.sort(key=lambda record: record.site)
    return Listing(config.name, CLASSES, tuple(records), facts={"warnings": warnings})


def _read(path: Path) -> dict[str, Any]:
    """One of LEAF's files: users, num_samples, and user_data with x (784 grey levels from 0 to 1) and y."""
    try:
        content = json.loads(path.read_bytes())
        numbers = [len(content["user_data"][user]["y"]) for user in content["users"]]
        sound = numbers == content["num_samples"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise UserError(f"{path} is not a file of LEAF: {problem!r}") from None
    if not sound:
        raise UserError(f"{path}: num_samples and the samples of a user differ in number; make the file again")
    return content


def _of_writer(path: Path, user: str, content: dict[str, Any]) -> Iterator[Record]:
    """The images of one writer; each comes along as PNG, for a file of LEAF has no part that could be read alone."""
    whole = locate(path)
    for number, (levels, label) in enumerate(zip(content["user_data"][user]["x"], content["user_data"][user]["y"])):
        name = f"{user}/{number}"
        pixels = np.round(np.asarray(levels, dtype=np.float64) * 255).astype(np.uint8).reshape(SIZE, SIZE)
        output = io.BytesIO()
        Image.fromarray(pixels).save(output, "PNG")
        yield Record(name, replace(whole, member=name, content=output.getvalue()), int(label), user, name)
