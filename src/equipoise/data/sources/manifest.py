"""A user's own images in a list: `manifest:FILE` is a CSV with path and label, and optionally site, split, group.

A column of masks takes the place of labels.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from equipoise.core.errors import UserError, first_few
from equipoise.data.data_config import ColumnNames, DataConfig
from equipoise.data.layouts import PARTS, in_order
from equipoise.data.masks import USUAL_CLASSES
from equipoise.data.medical import Found, images_in
from equipoise.data.raw import Archives, Location, locate
from equipoise.data.sources import Listing, Record, folded, headers, numbered_rows, refuse_similar
from equipoise.data.splits import MULTI_LABEL

TITLE = "your images, listed in a CSV: path, label or mask [, site, split, group] (manifest:FILE)"
SIZE = 128
PARTITION = "source"
ARGUMENT = "PATH"
#: settings that other sources ignore
HEEDS = ("classes", "columns", "plane", "header", "masks")

REQUIRED, OPTIONAL = ("path", "label"), ("site", "split", "group")
OF_MASKS = ("path", "mask")  # in place of REQUIRED
SEPARATORS = ",;\t"
#: titles, without marks between words, of columns that probably hold groups
GROUPS = {"patient", "patientid", "subject", "subjectid", "lesion", "lesionid"}

Rows = Mapping[int, Mapping[str, str]]


def listing(config: DataConfig, root: Path) -> Listing:
    """The images that the file `root` lists, in its order; relative paths start at the file's folder."""
    titles = config.columns.model_dump()
    masked = _has_masks(config, root)
    kinds = OF_MASKS if masked else REQUIRED
    required, optional = ([titles[kind] for kind in some] for some in (kinds, OPTIONAL))
    numbered = numbered_rows(root, required, optional, SEPARATORS, ". Name yours: --column {}=TITLE")
    if not numbered:
        raise UserError(f"{root} lists no images")
    header = list(next(iter(numbered.values())))
    _check_titles(root, header, titles)
    known = {line: {kind: row.get(title, "") for kind, title in titles.items()} for line, row in numbered.items()}
    _check_rows(known, root, kinds, config.classes is not None or masked)
    if masked:
        classes, labels = config.classes or USUAL_CLASSES, dict.fromkeys((row["label"] for row in known.values()), 0)
    else:
        classes, labels = _labels(root, [row["label"] for row in known.values()], config.classes)
    used = {titles[kind] for kind in (*kinds, *OPTIONAL)}
    others = tuple(title for title in header if title and title not in used)
    absent = ("",) * len(config.header)
    with Archives() as archives:
        records = tuple(
            Record(
                name=f"{row['path']}{found.suffix if found else ''}",
                location=found.location if found else None,
                label=labels[row["label"]],
                site=row["site"] or root.stem,
                group=row["group"] or (found.group if found else "") or row["path"],
                split=PARTS[row["split"].lower()] if row["split"] else "",
                mask=_mask_of(found, root.parent, row["mask"]) if masked else None,
                extra=(*(numbered[line][title] for title in others), *(found.header if found else absent)),
            )
            for line, row in known.items()
            for found in _find(config, root.parent, row["path"], archives)
        )
    sites = {record.site for record in records}
    kept = f"; kept for sub-groups: {', '.join(others)}" if others else ""
    what = f"masks of {', '.join(classes)}" if masked else f"{len(classes)} classes"
    facts = {
        "warnings": [*_of_sites(header, titles, others), *_of_groups(header, titles, others)],
        "read_as": f"the list names {len(records)} images, {what}, {len(sites)} sites{kept}",
    }
    return Listing(config.name, classes, records, columns=(*others, *config.header), facts=facts, masks=masked)


def _check_titles(root: Path, header: list[str], titles: Mapping[str, str]) -> None:
    """Refuse a title that the user gave and the list lacks."""
    for kind, title in titles.items():
        if title not in header and title != getattr(ColumnNames(), kind):
            raise UserError(
                f"{root} has no column {title}, which data.columns.{kind} names; it has {', '.join(header)}"
            )


def _check_rows(rows: Rows, root: Path, kinds: Collection[str], listed: bool) -> None:
    """Name the first line that cannot be used, or the first two whose labels (unless they are `listed` in the config)
    or sites are suspiciously alike; `kinds` are the columns that no line may leave empty."""
    given, placed = (any(row[column] for row in rows.values()) for column in ("split", "site"))
    for line, row in rows.items():
        if not all(row[kind] for kind in kinds):
            raise UserError(f"{root}, line {line}: {' or '.join(kinds)} is empty")
        if placed and not row["site"]:
            raise UserError(f"{root}, line {line}: site is empty, though other lines name theirs")
        split = row["split"].lower()
        if given and split not in PARTS:
            what = f"unknown split {split!r}" if split else "split is empty, though other lines name theirs"
            raise UserError(f"{root}, line {line}: {what}; use train, valid or test")
    _check_one_label(rows, root)
    for column, what in (("site", "sites"),) if listed else (("label", "classes"), ("site", "sites")):
        places: dict[str, str] = {}
        for line, row in rows.items():
            places.setdefault(row[column], f"line {line}")
        refuse_similar(root, what, places)


def _check_one_label(rows: Rows, root: Path) -> None:
    """Refuse an image that the list has under several labels."""
    seen: dict[str, tuple[int, str]] = {}
    for line, row in rows.items():
        before, label = seen.setdefault(row["path"], (line, row["label"]))
        if row["label"] != label:
            raise UserError(
                f"{root}, lines {before} and {line}: {row['path']} has the labels {label} and {row['label']}. "
                f"{MULTI_LABEL}"
            )


def _labels(root: Path, given: list[str], listed: tuple[str, ...] | None) -> tuple[tuple[str, ...], dict[str, int]]:
    """The classes, and the number of each label. Labels may be the numbers of classes that the config lists."""
    labels = in_order(given)
    classes = listed or tuple(labels)
    unknown = [label for label in labels if label not in classes]
    if unknown and listed and all(label.isdecimal() for label in labels):
        largest = max(map(int, labels))
        if largest >= len(classes):
            raise UserError(
                f"{root} has labels up to {largest}, but data.classes names {len(classes)} classes, 0 to "
                f"{len(classes) - 1}"
            )
        return classes, {label: int(label) for label in labels}
    if unknown:
        raise UserError(f"{root} has labels that data.classes does not name: {first_few(unknown)}")
    if len(classes) < 2:
        raise UserError(f"{root} names one class only ({', '.join(classes)}); a classifier needs two")
    return classes, {name: number for number, name in enumerate(classes)}


def _of_sites(header: list[str], titles: Mapping[str, str], others: tuple[str, ...]) -> list[str]:
    """A warning where no column tells sites, though one may be meant for it."""
    if titles["site"] in header or not others:
        return []
    return [
        f"all images are at one site, since the manifest has no column {titles['site']}; if one of {first_few(others)} "
        "tells the site, name it: --column site=TITLE (data.columns.site)"
    ]


def _of_groups(header: list[str], titles: Mapping[str, str], others: tuple[str, ...]) -> list[str]:
    """A warning where a column looks like groups, but none is used."""
    alike = [title for title in others if "".join(filter(str.isalpha, folded(title))) in GROUPS]
    if titles["group"] in header or not alike:
        return []
    return [
        f"the column {alike[0]} is not used as group, so that its images may lie in several parts; --column "
        f"group={alike[0]} (data.columns.group) keeps them together"
    ]


def _find(config: DataConfig, folder: Path, path: str, archives: Archives) -> Iterable[Found | None]:
    """The images in the file of a path, or None; a path that was written on Windows has other marks in it."""
    file = _file(folder, path)
    return [None] if file is None else images_in(locate(file), archives, config)


def _file(folder: Path, path: str) -> Path | None:
    tries = [folder / path] if os.sep == "\\" else [folder / path, folder / path.replace("\\", "/")]
    return next((file for file in tries if file.is_file()), None)


def _mask_of(found: Found | None, folder: Path, path: str) -> Location | None:
    """Where the mask of an image is: of one slice, the same slice of the mask's volume."""
    file = _file(folder, path)
    return None if file is None else replace(locate(file), frame=found.location.frame if found else None)


def _has_masks(config: DataConfig, root: Path) -> bool:
    """Whether the list tells masks: it has such a column, unless the settings decide."""
    if config.masks is not None:
        return config.masks
    return any(config.columns.mask in header for header in headers(root, SEPARATORS))
