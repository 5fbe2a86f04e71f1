"""Data sets, one file each: a module here is the source that it is named after (dermoscopy_prr.py: dermoscopy-prr).

A source has TITLE (one line), SIZE (default pixels), PARTITION (how its training images usually go to sites) and
`listing(config, root)`, which `equipoise.data.prepare` packs into a store. A published one also has LICENCE and OBTAIN
(where its files are). Without files to list, the phantom has `build` (draws images), `arrays` `opened` (a store).
"""

import csv
import hashlib
import importlib
import io
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

from equipoise.core.definitions import module_names, names_in_papers
from equipoise.core.errors import UserError, as_text, first_few
from equipoise.core.plugins import entry_names, find, is_plugin
from equipoise.core.suggestions import meant
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import Location, walk_images

PARTITIONS = get_args(get_args(DataConfig.model_fields["partition"].annotation)[0])
PART_FOLDERS = {"train": "train", "val": "valid", "valid": "valid", "test": "test"}
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}  # of tables that are saved as CSV, but are not


@dataclass(frozen=True)
class Record:
    """One image of a data set.

    Args:
        name: unique in the data set
        location: where its file is, or None if it was not found
        group: images of one group (a lesion, a patient) belong in one part
        split: part in the authors' split, or "" for none
        clean: part in a given split that keeps groups together, or "" for none
        pooled: part in the authors' split of all images together, where it differs from `split`, that of single sites
        extra: what else is known of it, one value for each of the listing's `columns`
        mask: where the file of its mask is, in a listing of masks

    >>> Record("1", Location(Path("images/1.png")), label=0, site="Bern", group="patient 7").group
    'patient 7'
    """

    name: str
    location: Location | None
    label: int
    site: str
    group: str
    split: str = ""
    clean: str = ""
    pooled: str = ""
    extra: tuple[str, ...] = ()
    mask: Location | None = None


@dataclass(frozen=True)
class Listing:
    """All images of a data set, before any is read.

    Args:
        ratios: shares of train, valid and test where a split is drawn here; without valid, none is taken from train
        cohorts: sites that are unseen cohorts
        common: validation and test images belong to the federation, not to its sites
        columns: titles of what else is known of images, such as age and sex
        facts: what people may want to know about this copy of the data set
        masks: images have masks, which show where the classes lie, and no labels
        threshold: values of masks from this one on are the second of two classes, the others the first

    >>> names = ("nevus", "melanoma")
    >>> records = tuple(Record(name, Location(Path(name)), at, "Bern", name) for at, name in enumerate(names))
    >>> len(Listing("mine", names, records).records)
    2
    """

    source: str
    classes: tuple[str, ...]
    records: tuple[Record, ...]
    ratios: tuple[float, float, float] = (0.7, 0.1, 0.2)
    cohorts: tuple[str, ...] = ()
    common: bool = False
    columns: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    masks: bool = False
    threshold: int | None = None

    def __post_init__(self) -> None:
        if not self.records:
            raise UserError(f"{self.source} has no images")
        repeated = first_few(_listed_twice(self.records))
        if repeated:
            raise UserError(f"{self.source} lists images more than once, each belongs in one part: {repeated}")
        outside = first_few(r.name for r in self.records if not 0 <= r.label < len(self.classes))
        if outside:
            raise UserError(f"{self.source} has labels outside {', '.join(self.classes)}: {outside}")

    def missing(self) -> list[str]:
        """Names of the images whose file, or whose mask, was not found."""
        return [
            record.name if record.location is None else f"{record.name} (its mask)"
            for record in self.records
            if not self.is_found(record)
        ]

    def is_found(self, record: Record) -> bool:
        """Whether an image has its file, and its mask where images have masks."""
        return record.location is not None and (record.mask is not None or not self.masks)

    def checksum(self) -> str:
        """Changes with the images, their records and the warnings about them."""
        general = (self.source, self.classes, self.ratios, self.cohorts, *self.facts.get("warnings", ()))
        general += ("common",) if self.common else ()
        general += ("masks",) if self.masks else ()
        general += tuple(filter(None, (self.columns, self.facts.get("read_as"))))
        digest = hashlib.sha256(repr(general).encode())
        for r in self.records:
            stamp = r.location.stamp if r.location else ""
            more = [value for value in (r.pooled, r.extra, r.mask and r.mask.stamp) if value]
            digest.update(repr((r.name, r.label, r.site, r.group, r.split, r.clean, stamp, *more)).encode())
        return digest.hexdigest()


def _listed_twice(records: Sequence[Record]) -> Iterator[str]:
    """The names that come more than once, and those that lead to one file (a/1.png and a/../a/1.png)."""
    named = Counter(record.name for record in records)
    yield from (name for name, times in named.items() if times > 1)
    resolve = cache(Path.resolve)  # an archive holds many images
    places: dict[tuple[Any, ...], list[str]] = {}
    for record in records:
        if record.location is not None and named[record.name] == 1:
            place = (resolve(record.location.file), record.location.member, record.location.frame)
            places.setdefault(place, []).append(record.name)
    yield from (" = ".join(names) for names in places.values() if len(names) > 1)


def source_names() -> list[str]:
    """The built-in sources, in alphabetical order."""
    return sorted(name.replace("_", "-") for name in module_names(*__path__))


def known() -> dict[str, str]:
    """The built-in sources by name, each with one line about it."""
    return {name: load_kind(name).TITLE for name in source_names()}


def terms(name: str) -> dict[str, str]:
    """The licence of a published data set, and how to obtain it; nothing for a user's own images."""
    module = load(name)
    return {what: getattr(module, what.upper()) for what in ("licence", "obtain") if hasattr(module, what.upper())}


def load_kind(name: str) -> Any:
    """The source that the part of a `data.name` before its colon asks for; a plug-in's name is one part."""
    if is_plugin("source", name):
        return _sound(find("source", name), name, UserError)
    kind = name.partition(":")[0]
    return _sound(importlib.import_module(f"{__name__}.{kind.replace('-', '_')}"), f"{__name__}.{kind}", TypeError)


def _sound(source: Any, name: str, error: type[Exception]) -> Any:
    """A source, once it holds all that is read there."""
    sound = {
        "TITLE": isinstance(getattr(source, "TITLE", None), str),
        "SIZE": isinstance(getattr(source, "SIZE", None), int),
        f"PARTITION ({', '.join(PARTITIONS)})": getattr(source, "PARTITION", None) in PARTITIONS,
        "listing(config, root), or opened(config, root)": any(
            callable(getattr(source, way, None)) for way in ("listing", "opened")
        ),
    }
    lacking = [what for what, there in sound.items() if not there]
    if lacking:
        raise error(f"{name} is no source of data yet: it needs {', '.join(lacking)}")
    return source


def load(name: str) -> Any:
    """The source that a `data.name` such as "pbc", "folder:DIR" or "my_source.py" asks for."""
    if is_plugin("source", name):
        return load_kind(name)
    kind, _, argument = name.partition(":")
    available = source_names()
    if kind not in available:
        hint = _meant(name, [*available, *entry_names("source")])
        own = "for your own images folder:DIR or manifest:FILE"
        raise UserError(f"unknown data {name!r}{hint or '; known: ' + ', '.join(available)}; {own}")
    wanted = getattr(load_kind(kind), "ARGUMENT", "")
    form = f"{kind}:{wanted}" if wanted else kind
    if (form != kind) != bool(argument):
        raise UserError(f"data {name!r} should be written {form}")
    return load_kind(kind)


def lists_own_files(name: str) -> bool:
    """Whether `data.name` asks for a user's own files: a path says where a listing of them is made."""
    source = load_kind(name)
    return hasattr(source, "ARGUMENT") and hasattr(source, "listing")


def is_drawn(name: str) -> bool:
    """Whether `data.name` asks for images that no file holds."""
    source = load_kind(name)
    return hasattr(source, "opened") and not hasattr(source, "ARGUMENT")


def _meant(name: str, known: Sequence[str]) -> str:
    """What somebody may have meant by a name that no source has."""
    kind, colon, argument = name.partition(":")
    close = meant(kind, known, names_in_papers("data/sources"))
    if close and colon:
        return f"; did you mean {close}:{argument}?"
    if name.lower().endswith(".csv") or Path(name).is_file():
        return f"; did you mean manifest:{name}?"
    if Path(name).is_dir():
        return f"; did you mean folder:{name}?"
    return f"; did you mean {close}?" if close else ""


def read_csv(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV file that must have `columns`; spaces around a value do not count."""
    return list(numbered_rows(path, columns).values())


def numbered_rows(
    path: Path, columns: Sequence[str], optional: Sequence[str] = (), separators: str = ",", remedy: str = ""
) -> dict[int, dict[str, str]]:
    """The rows of `read_csv` by the number of their line, counting blank lines and the header.

    Args:
        optional: columns that may be there; like `columns`, they must not be there under a similar name
        separators: characters that may stand between values; the first under which the header has all `columns` does
        remedy: what users can do where a column is absent, with {} for its name
    """
    ways = [_csv_lines(path, separator) for separator in separators]
    lines = next((lines for lines in ways if lines and {*columns} <= {*lines[0][1]}), ways[0])
    if not lines:
        raise UserError(f"{path} is empty; its first line should name the columns {', '.join(columns)}")
    header = lines[0][1]
    _check_header(path, header, columns, optional, remedy)
    for number, values in lines[1:]:
        if any(values[len(header) :]):
            raise UserError(
                f"{path}, line {number}: {len(values)} values under {len(header)} columns; a value with a comma in it "
                "belongs in double quotes"
            )
    return {number: dict(zip_longest(header, values[: len(header)], fillvalue="")) for number, values in lines[1:]}


def headers(path: Path, separators: str) -> list[list[str]]:
    """The titles in a table's first line, under each of the characters that may stand between values."""
    ways = (_csv_lines(path, separator) for separator in separators)
    return [lines[0][1] for lines in ways if lines]


def _csv_lines(path: Path, separator: str) -> list[tuple[int, list[str]]]:
    """The values of every line that is not blank, with the number of the line."""
    try:
        text = io.StringIO(as_text(path.read_bytes(), str(path), "utf-8-sig"), newline="")
        reader = csv.reader(text, delimiter=separator)
        return [(reader.line_num, [value.strip() for value in values]) for values in reader if values]
    except (OSError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def _check_header(
    path: Path, header: Sequence[str], columns: Sequence[str], optional: Sequence[str], remedy: str
) -> None:
    """Refuse a header without one of `columns`, or with a column that is there twice or under a similar name."""
    for column in (*columns, *optional):
        similar = [title for title in header if title != column and folded(title) == folded(column)]
        if similar:
            raise UserError(f"{path}: the column {similar[0]!r} should be called {column!r}")
        if header.count(column) > 1:
            raise UserError(f"{path} has more than one column {column}")
    absent = [column for column in columns if column not in header]
    if absent:
        marks = [word for mark, word in SEPARATORS.items() if any(mark in title for title in header)]
        hint = (
            f"; it seems to separate values by {marks[0]}: save it with commas" if marks else remedy.format(absent[0])
        )
        raise UserError(f"{path} has no column {', '.join(absent)}; it has {', '.join(header)}{hint}")


def folded(name: str) -> str:
    """A name without what is easily mistyped: case, spaces around and between its words, its form of Unicode."""
    return " ".join(unicodedata.normalize("NFC", name.casefold()).split())


def refuse_similar(root: Path, what: str, places: Mapping[str, str]) -> None:
    """Refuse names that differ only by the characters that `folded` takes away: one of them is most likely mistyped.

    Args:
        what: what the names are of, such as "classes"
        places: where each name comes first, such as "line 3"
    """
    seen: dict[str, str] = {}
    for name, place in places.items():
        other = seen.setdefault(folded(name), name)
        if other != name:
            alike = unicodedata.normalize("NFC", other) == unicodedata.normalize("NFC", name)
            show = ascii if alike else repr  # on a screen, two forms of Unicode look the same
            raise UserError(
                f"{root} has {what} that differ only in case, spaces or form of Unicode: {show(other)} "
                f"({places[other]}) and {show(name)} ({place}); write them alike"
            )


def find_file(root: Path, *names: str) -> Path:
    """The first of the files `names` that lies in `root` or in its folder splits/."""
    candidates = [folder / name for name in names for folder in (root / "splits", root)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder")
        raise UserError(f"{root} has no {' or '.join(names)} (looked there and in its folder splits/)")
    return found


def images_by_identifier(root: Path) -> dict[str, Location]:
    """Images under `root` by the name of their file; ISIC's `_downsampled` copies stand for the image."""
    found: dict[str, Location] = {}
    for location in walk_images(root):
        found.setdefault(location.path.stem.removesuffix("_downsampled"), location)
    return found


def expect(config: DataConfig, counts: Mapping[str, int], documented: Mapping[str, int], of: str = "") -> list[str]:
    """Compare numbers of listed images with the documented ones.

    Args:
        of: what is counted, where a data set has several such numbers

    Returns:
        a warning, where numbers differ and `config.skip_unreadable` lets an incomplete copy pass

    Raises:
        UserError: where they differ otherwise
    """
    wrong = [
        f"{counts.get(what, 0)} instead of {number} in {what}"
        for what, number in documented.items()
        if counts.get(what, 0) != number
    ]
    if not wrong:
        return []
    source = f"{config.name} ({of})" if of else config.name
    fact = f"{source} does not have the documented numbers of images: {first_few(wrong)}"
    if config.skip_unreadable:
        return [f"{fact}; scores cannot be compared with published ones"]
    raise UserError(f"{fact}; take a complete copy, or set data.skip_unreadable = true to go on with this one")
