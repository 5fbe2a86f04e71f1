"""A user's own images: `folder:DIR` holds one folder per class, perhaps inside folders of sites and parts."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from equipoise.core.errors import UserError, first_few
from equipoise.data import dicom, masked_folders, volumes
from equipoise.data.data_config import DataConfig
from equipoise.data.layouts import ADDED, PARTS, Folder, in_order, is_ignored, layout_of, levels, summary
from equipoise.data.medical import Found, images_in, is_read, lacking
from equipoise.data.raw import SUFFIXES, Archives, walk_images
from equipoise.data.sources import Listing, Record, refuse_similar

TITLE = "your images, one folder per class, also by site and part; or folders images and masks (folder:DIR)"
SIZE = 128
PARTITION = "source"
ARGUMENT = "PATH"
#: settings that other sources ignore
HEEDS = ("classes", "layout", "plane", "header", "masks")

#: endings of images in zip files
ENDINGS = {*SUFFIXES, *dicom.SUFFIXES, *volumes.SUFFIXES}
#: what the folders above an image stand for, by "class", "site" and "split"
Names = Mapping[str, str]


def listing(config: DataConfig, root: Path) -> Listing:
    """All images in class folders under `root`. Without folders of sites, the site is named after `root`."""
    if not root.is_dir():
        raise UserError(f"{config.name}: {root} is not a folder. Name a folder that has one folder of images per class")
    if config.masks or (config.masks is None and config.layout is None and masked_folders.has_pairs(root)):
        return masked_folders.listing(config, root)
    with Archives() as archives:
        by_top = {top: list(_images(config, root, root / top, archives)) for top in sorted(_folders(root))}
    folders = {folder for entries in by_top.values() for folder, _ in entries}
    ignored, skipped, hint = _left_out(root, {found.location.file for all_ in by_top.values() for _, found in all_})
    if not folders:
        known = ", ".join(sorted(SUFFIXES | dicom.SUFFIXES | {*volumes.SUFFIXES}))
        raise UserError(f"{root} has no images in its folders; known are {known}{hint and f' ({hint})'}")
    layout = config.layout or layout_of(root, folders)
    site = Path(os.path.abspath(root)).name
    named = {folder: {"site": site, **levels(layout, root, folder)} for folder in sorted(folders)}
    classes = config.classes or tuple(in_order(names["class"] for names in named.values()))
    _check_classes(root, classes, named, ignored)
    # The images of class folders stay in the order that runs of earlier versions had.
    tops = list(by_top) if layout == "class" else in_order(by_top)
    records, places = [], dict[str, dict[str, str]]({"site": {}, "class": {}})
    for folder, found in (entry for top in tops for entry in by_top[top]):
        names = named[folder]
        records.append(_record(root, found, names, classes))
        for kind, known_names in places.items():
            known_names.setdefault(names[kind], records[-1].name)
    refuse_similar(root, "sites", places["site"])
    if config.classes is None:
        refuse_similar(root, "classes", places["class"])
    read_as = f"the folders are read as {layout}/ ({summary(layout, named.values())}){_told(ignored)}"
    guessed = [f"{read_as}; --layout (data.layout) reads them otherwise"] if not config.layout else []
    warnings = _spaced([*places["site"], *places["class"]]) + guessed * (layout != "class") + _not_read(skipped, hint)
    facts = {"warnings": warnings, "read_as": read_as}
    return Listing(config.name, classes, tuple(records), columns=config.header, facts=facts)


def _folders(root: Path) -> Iterator[str]:
    return (path.name for path in root.iterdir() if path.is_dir() and not is_ignored(path.name))


def _images(config: DataConfig, root: Path, top: Path, archives: Archives) -> Iterator[tuple[Folder, Found]]:
    """The images under one of the outermost folders, each with its own folder."""
    for location in walk_images(top, ENDINGS, is_read):
        folder = location.file.relative_to(root).parent.parts
        inside = location.path.parent.parts if location.member else ()
        if not any(map(is_ignored, (*folder, *inside))):
            yield from ((folder, found) for found in images_in(location, archives, config))


def _record(root: Path, found: Found, names: Names, classes: tuple[str, ...]) -> Record:
    """One image; without a patient, the images of a file are a group."""
    location = found.location
    file = "!".join(filter(None, (location.file.relative_to(root).as_posix(), location.member)))
    return Record(
        name=f"{file}{found.suffix}",
        location=location,
        label=classes.index(names["class"]),
        site=names["site"],
        group=found.group or file,
        split=PARTS[names["split"].lower()] if "split" in names else "",
        extra=found.header,
    )


def _left_out(root: Path, read: Collection[Path]) -> tuple[Counter[str], Counter[str], str]:
    """Folders that are ignored and files that are not read, by their kind; and how more files could be read."""
    ignored, skipped, files = Counter[str](), Counter[str](), list[Path]()
    for folder, inner, names in os.walk(root):
        hidden = [name for name in inner if is_ignored(name)]
        ignored.update(ADDED if name == ADDED else "hidden" for name in hidden)
        inner[:] = [name for name in inner if name not in hidden]
        if not inner and not names:
            ignored["empty"] += 1
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    files = [file for file in files if file not in read]
    skipped.update(map(_kind, files))
    return ignored, skipped, lacking(files)


def _kind(file: Path) -> str:
    """The ending of a file, with the one before where it is compressed."""
    if volumes.is_volume(file.name) and volumes.is_mask(file):
        return "masks of volumes"
    endings = [ending.lower() for ending in file.suffixes[-2:]]
    return "".join(endings if endings[-1:] == [".gz"] else endings[-1:]) or "without an ending"


def _check_classes(root: Path, classes: tuple[str, ...], named: Mapping[Folder, Names], ignored: Counter[str]) -> None:
    """Refuse folders that `data.classes` does not name, and a single class."""
    unknown = [name for name in in_order(names["class"] for names in named.values()) if name not in classes]
    if unknown:
        raise UserError(f"{root} has folders that data.classes does not name: {', '.join(unknown)}")
    if len(classes) < 2:
        raise UserError(
            f"{root} needs one folder per class, for two classes or more; it has {len(classes)} with images"
            f" ({', '.join(classes)}){_told(ignored)}"
        )


def _told(ignored: Counter[str]) -> str:
    return f"; ignored: {', '.join(f'{number} {kind}' for kind, number in sorted(ignored.items()))}" if ignored else ""


def _spaced(names: list[str]) -> list[str]:
    spaced = [repr(name) for name in names if name != name.strip()]
    return [f"names of folders keep the spaces around them: {first_few(spaced)}"] if spaced else []


def _not_read(skipped: Counter[str], hint: str) -> list[str]:
    kinds = first_few(
        (f"{number} {kind}" for kind, number in sorted(skipped.items(), key=lambda entry: (-entry[1], entry[0]))), 8
    )
    return [f"files that are not read were skipped: {kinds}{hint and f'; {hint}'}"] if skipped else []
