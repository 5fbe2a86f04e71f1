"""A user's own images in a list: `manifest:FILE` is a CSV with path and label, and optionally site, split, group."""

from pathlib import Path

from equipoise.core.errors import UserError, first_few
from equipoise.data.config import DataConfig
from equipoise.data.raw import Location, locate
from equipoise.data.sources import Listing, Record, numbered_rows, refuse_similar

TITLE = "your images, listed in a CSV: path, label [, site, split, group] (manifest:FILE)"
SIZE = 128
PARTITION = "source"

OPTIONAL = ("site", "split", "group")
PARTS = {
    "train": "train", "training": "train",
    "valid": "valid", "val": "valid", "validation": "valid",
    "test": "test", "testing": "test",
}  # fmt: skip


def listing(config: DataConfig, root: Path) -> Listing:
    """The images that the file `root` lists, in its order; relative paths start at the file's folder."""
    numbered = numbered_rows(root, ("path", "label"), OPTIONAL)
    if not numbered:
        raise UserError(f"{root} lists no images")
    _check_rows(numbered, root, listed=config.classes is not None)
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
    return Listing(config.name, classes, records, facts={"warnings": _unused_columns(list(rows[0]))})


def _check_rows(rows: dict[int, dict[str, str]], root: Path, listed: bool) -> None:
    """Name the first line that cannot be used, or the first two whose labels (unless they are `listed` in the config)
    or sites are suspiciously alike."""
    given, placed = (any(row.get(column) for row in rows.values()) for column in ("split", "site"))
    for line, row in rows.items():
        if not row["path"] or not row["label"]:
            raise UserError(f"{root}, line {line}: path or label is empty")
        if placed and not row.get("site"):
            raise UserError(f"{root}, line {line}: site is empty, though other lines name theirs")
        split = row.get("split", "").lower()
        if given and split not in PARTS:
            what = f"unknown split {split!r}" if split else "split is empty, though other lines name theirs"
            raise UserError(f"{root}, line {line}: {what}; use train, valid or test")
    for column, what in (("site", "sites"),) if listed else (("label", "classes"), ("site", "sites")):
        places: dict[str, str] = {}
        for line, row in rows.items():
            places.setdefault(row.get(column, ""), f"line {line}")
        refuse_similar(root, what, places)


def _unused_columns(header: list[str]) -> list[str]:
    """A warning where columns have no meaning here: one may be meant for another."""
    unused = [title for title in header if title and title not in ("path", "label", *OPTIONAL)]
    if not unused:
        return []
    sites = "" if "site" in header else "; without a column site, all images are one site"
    return [f"columns of the manifest that are not used: {first_few(unused)}{sites}"]


def _find(path: Path) -> Location | None:
    return locate(path) if path.is_file() else None
