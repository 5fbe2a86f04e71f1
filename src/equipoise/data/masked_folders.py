"""A user's own images with masks, in folders: pairs of files, and what the folders' names stand for.

Images lie in a folder `images` and masks in a folder `masks` beside it, under the same names without their endings.
Or masks lie beside their images, and their names tell it (`case.png` and `case_mask.png`). Other levels of folders are
sites, parts (`train`, `valid`, `test`) and, below a site, patients.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from equipoise.core.errors import UserError, first_few
from equipoise.data import dicom, masks, volumes
from equipoise.data.data_config import DataConfig
from equipoise.data.layouts import PARTS, is_ignored
from equipoise.data.medical import images_in
from equipoise.data.raw import SUFFIXES, Archives, Location, walk_images
from equipoise.data.sources import Listing, Record, refuse_similar

#: names of folders
OF_IMAGES, OF_MASKS = {"images", "image", "imgs"}, {"masks", "mask", "labels", "segmentations"}
ENDINGS = {*SUFFIXES, *dicom.SUFFIXES, *volumes.SUFFIXES}


@dataclass(frozen=True)
class Place:
    """Where a file lies, without the level that tells images from masks.

    Args:
        levels: names of folders, from the top
        stem: name of the image's file without its ending
    """

    levels: tuple[str, ...]
    stem: str


def has_pairs(root: Path) -> bool:
    """Whether folders of images and folders of masks lie somewhere under `root`, as their names tell."""
    names = {name.lower() for _, folders, _ in os.walk(root) for name in folders if not is_ignored(name)}
    return bool(names & OF_IMAGES and names & OF_MASKS)


def listing(config: DataConfig, root: Path) -> Listing:
    """All images under `root` with their masks. Without folders of sites, the site is named after `root`."""
    images, found = _paired(root)
    if not images:
        raise UserError(
            f"{root} has no images with masks; put them into folders images and masks under the same names, or set "
            "data.masks = true for masks beside images (case.png and case_mask.png)"
        )
    site = Path(os.path.abspath(root)).name
    with Archives() as archives:
        records = tuple(
            record
            for place, location in images.items()
            for record in _records(config, root, site, place, location, found.get(place), archives)
        )
    sites = {record.site: record.name for record in reversed(records)}
    refuse_similar(root, "sites", sites)
    lone = [str(location.path.name) for place, location in found.items() if place not in images]
    classes = config.classes or masks.USUAL_CLASSES
    if len(classes) < 2:
        raise UserError(f"data.classes names one structure only ({classes[0]}); name the background first, then others")
    parts = Counter(record.split for record in records if record.split)
    told = f", {len(parts)} parts: {first_few(parts, 3)}" if parts else ""
    facts = {
        "read_as": f"the folders hold {len(records)} images with masks of {', '.join(classes)} "
        f"({len(sites)} {'sites' if len(sites) > 1 else 'site'}: {first_few(sorted(sites), 3)}{told}); "
        "data.masks = false reads folders as classes",
        "warnings": [f"{len(lone)} masks without an image were skipped: {first_few(lone)}"] if lone else [],
    }
    return Listing(config.name, classes, records, columns=config.header, facts=facts, masks=True)


def _paired(root: Path) -> tuple[Mapping[Place, Location], Mapping[Place, Location]]:
    """The files of images and of masks, by their places."""
    locations = [(_folder(root, location), location) for location in walk_images(root, ENDINGS, _may_hold_images)]
    locations = [(folder, location) for folder, location in locations if not any(map(is_ignored, folder))]
    stems = {Place(folder, masks.stem(location.path.name)) for folder, location in locations}
    by_folder = any({name.lower() for name in folder} & OF_MASKS for folder, _ in locations)
    images: dict[Place, Location] = {}
    found: dict[Place, Location] = {}
    for folder, location in locations:
        name = location.path.name
        place, is_mask = Place(folder, masks.stem(name)), False
        if by_folder:
            kind = next((level for level in folder if level.lower() in OF_IMAGES | OF_MASKS), None)
            if kind is None:
                continue
            is_mask = kind.lower() in OF_MASKS
            levels = list(folder)
            levels.remove(kind)
            place = Place(tuple(levels), place.stem)
        elif (of := Place(folder, masks.image_of(name))) != place and of in stems:
            place, is_mask = of, True
        _keep(found if is_mask else images, place, location)
    if by_folder:  # a mask may say so in its name, too
        renamed = {place: Place(place.levels, masks.image_of(f"{place.stem}.png")) for place in found}
        found = {place if place in images else renamed[place]: location for place, location in found.items()}
    return images, found


def _keep(files: dict[Place, Location], place: Place, location: Location) -> None:
    """Note a file; refuse a second one of the same place."""
    other = files.setdefault(place, location)
    if other is not location:
        raise UserError(
            f"{other} and {location} have one name, so it is unclear which mask is whose; rename one of them"
        )


def _folder(root: Path, location: Location) -> tuple[str, ...]:
    """The names of the folders above a file, also inside its archive."""
    above = location.file.relative_to(root).parent.parts
    return above if location.member is None else (*above, *PurePosixPath(location.member).parent.parts)


def _may_hold_images(file: Path) -> bool:
    return file.name.lower().endswith(tuple(ENDINGS))


def _records(
    config: DataConfig,
    root: Path,
    site: str,
    place: Place,
    location: Location,
    mask: Location | None,
    archives: Archives,
) -> Iterator[Record]:
    """The images in a file, each with the part of the mask that shows the same."""
    split, names = _of_levels(root, place)
    file = "!".join(filter(None, (location.file.relative_to(root).as_posix(), location.member)))
    for found in images_in(location, archives, config):
        frame = found.location.frame
        yield Record(
            name=f"{file}{found.suffix}",
            location=found.location,
            label=0,
            site=names[0] if names else site,
            group=found.group or ("/".join(names) if len(names) > 1 else file),
            split=split,
            extra=found.header,
            mask=mask if mask is None or frame is None else replace(mask, frame=frame),
        )


def _of_levels(root: Path, place: Place) -> tuple[str, list[str]]:
    """The part that folders tell, "" for none, and the names of the site and the patient, if any."""
    parts = [name for name in place.levels if name.lower() in PARTS]
    names = [name for name in place.levels if name.lower() not in PARTS]
    if len(parts) > 1 or len(names) > 2:
        raise UserError(
            f"{root}: the folders {'/'.join(place.levels)} of {place.stem} are more than a site, a part and a patient; "
            "move the images, or write a manifest with a column of masks"
        )
    return PARTS[parts[0].lower()] if parts else "", names
