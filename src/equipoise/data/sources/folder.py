"""A user's own images: `folder:DIR` holds one folder per class."""

import os
from pathlib import Path

from equipoise.core.errors import UserError, first_few
from equipoise.data.config import DataConfig
from equipoise.data.raw import SUFFIXES, walk_images
from equipoise.data.sources import Listing, Record, refuse_similar

TITLE = "your images, one folder per class (folder:DIR)"
SIZE = 128
PARTITION = "source"


def listing(config: DataConfig, root: Path) -> Listing:
    """All images under the class folders of `root`, one site, no split, each image a group of its own."""
    if not root.is_dir():
        raise UserError(f"{config.name}: {root} is not a folder")
    folders = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    classes = config.classes or tuple(folders)
    unknown = [name for name in folders if name not in classes]
    if unknown:
        raise UserError(f"{root} has folders that data.classes does not name: {', '.join(unknown)}")
    if len(classes) < 2:
        raise UserError(f"{root} needs one folder per class, for two classes or more; it has {len(folders)}")
    site = Path(os.path.abspath(root)).name
    records, places = [], dict[str, str]()
    for name in folders:
        for location in walk_images(root / name):
            identifier = "!".join(filter(None, (location.file.relative_to(root).as_posix(), location.member)))
            records.append(Record(identifier, location, classes.index(name), site, identifier))
            places.setdefault(name, identifier)
    if not records:
        raise UserError(f"{root} has no images in its folders; known are {', '.join(sorted(SUFFIXES))}")
    if config.classes is None:
        refuse_similar(root, "classes", places)
    spaced = [repr(name) for name in (site, *folders) if name != name.strip()]
    warnings = [f"names of folders keep the spaces around them: {first_few(spaced)}"] if spaced else []
    return Listing(config.name, classes, tuple(records), facts={"warnings": warnings})
