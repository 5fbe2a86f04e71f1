"""A user's own images in a list: `manifest:FILE` is a CSV with path and label, and optionally site, split, group."""

from pathlib import Path

from equipoise.data.config import DataConfig
from equipoise.data.raw import Location, locate
from equipoise.data.sources import Listing, Record, first_few, numbered_rows
from equipoise.errors import UserError

TITLE = "your images, listed in a CSV: path, label [, site, split, group] (manifest:FILE)"
SIZE = 128
PARTITION = "source"

PARTS = {
    "train": "train", "training": "train",
    "valid": "valid", "val": "valid", "validation": "valid",
    "test": "test", "testing": "test",
}  # fmt: skip


def listing(config: DataConfig, root: Path) -> Listing:
    """The images that the file `root` lists, in its order; relative paths start at the file's folder."""
    numbered = numbered_rows(root, ("path", "label"))
    if not numbered:
        raise UserError(f"{root} lists no images")
    _check_rows(numbered, root)
    rows = list(numbered.values())
    labels = sorted({row["label"] for row in rows})
    classes = config.classes or tuple(labels)
    unknown = [label for label in labels if label not in classes]
    if unknown:
        raise UserError(f"{root} has labels that data.classes does not name: {first_few(unknown)}")
    if len(classes) < 2:
        raise UserError(f"{root} names one class only ({', '.join(classes)}); a classifier needs two")
    records = tuple(
        Record(
            name=row["path"],
            location=_find(root.parent / row["path"]),
            label=classes.index(row["label"]),
            site=row.get("site") or root.stem,
            group=row.get("group") or row["path"],
            split=PARTS[row["split"].lower()] if row.get("split") else "",
        )
        for row in rows
    )
    return Listing(config.name, classes, records)


def _check_rows(rows: dict[int, dict[str, str]], root: Path) -> None:
    """Name the first line that cannot be used."""
    given = any(row.get("split") for row in rows.values())
    for line, row in rows.items():
        if not row["path"] or not row["label"]:
            raise UserError(f"{root}, line {line}: path or label is empty")
        split = row.get("split", "").lower()
        if given and split not in PARTS:
            raise UserError(f"{root}, line {line}: unknown split {split!r}; use train, valid or test")


def _find(path: Path) -> Location | None:
    return locate(path) if path.is_file() else None
