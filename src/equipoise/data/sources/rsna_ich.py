"""RSNA-ICH (Flanders et al. 2020): 67,969 CT slices with a single type of intracranial haemorrhage, 5 classes.

Two papers share these slices. FedNPR (2024) released a partition into ten sites, each of which tests on a fifth of its
slices: `data.partition = "source"`. FedIIC (2023) permutes all slices and cuts them 7:1:2: any drawn partition.
Slices are DICOM, seen through `data.window` (default each file's own, as in FedIIC's preparation), or PNG and npy made
before. Those of one patient are a group where the files are DICOM; other files do not tell.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from equipoise.core.errors import UserError
from equipoise.data import dicom
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import Archives, Location, walk_images
from equipoise.data.sources import Listing, Record, expect, find_file, read_csv
from equipoise.data.splits import permuted_split

TITLE = "RSNA-ICH, CT slices with one of 5 haemorrhages; partitioned, or FedNPR's ten sites"
SIZE = 128
PARTITION = "source"
LICENCE = "RSNA's terms: non-commercial use, no attempt to identify anybody, citation of the data set"
OBTAIN = (
    "https://www.kaggle.com/c/rsna-intracranial-hemorrhage-detection: the training images; labels and ten sites are "
    "FedNPR's ich_datasplit_10cl.npy (https://github.com/Jwicaksana/FedNPR) as rsna_ich_10_sites.csv"
)

COUNTS = {
    "epidural": 1497,
    "intraparenchymal": 13932,
    "intraventricular": 8914,
    "subarachnoid": 14717,
    "subdural": 28909,
}
CLASSES = tuple(COUNTS)
TRAIN = (7390, 7536, 11177, 8948, 3408, 3137, 4128, 3380, 2723, 2545)  # of FedNPR's ten sites
TEST = (1848, 1884, 2795, 2237, 852, 785, 1033, 845, 681, 637)
RATIOS = (0.7, 0.1, 0.2)
TEN_SITES, AUTHORS, STAGE_1 = "rsna_ich_10_sites.csv", "data.csv", "stage_1_train.csv"
SUFFIXES = (".png", ".npy", *sorted(dicom.SUFFIXES))


def listing(config: DataConfig, root: Path) -> Listing:
    """All slices of one type, with FedNPR's sites and FedIIC's split."""
    rows = {row[0]: row for row in _rows(find_file(root, TEN_SITES, AUTHORS, STAGE_1))}
    pooled = dict(zip(_in_order(root, rows), permuted_split(len(rows), RATIOS).tolist()))
    found = _files(root, rows)
    with Archives() as archives:
        records = tuple(
            Record(
                name=name,
                location=found.get(name),
                label=label,
                site=site,
                group=_patient(found.get(name), archives) or name,
                split=part or pooled[name],
                pooled=pooled[name],
            )
            for name, label, site, part in rows.values()
        )
    warnings = expect(config, Counter(CLASSES[record.label] for record in records if record.label >= 0), COUNTS)
    if any(record.site for record in records):
        counts = Counter(f"{record.site} {record.split}" for record in records)
        warnings += expect(config, counts, _documented(), "sites")
    else:
        records = tuple(replace(record, site="rsna") for record in records)
        warnings.append(
            f"without {TEN_SITES} all images of {config.name} are at one site, unless data.partition is set"
        )
    return Listing(config.name, CLASSES, records, ratios=RATIOS, facts={"warnings": warnings})


def _documented() -> dict[str, int]:
    parts = {"train": TRAIN, "test": TEST}
    return {f"site {i + 1} {part}": n for part, numbers in parts.items() for i, n in enumerate(numbers)}


def _rows(path: Path) -> Iterator[tuple[str, int, str, str]]:
    """Name, label, site and part of each slice of one type; no site or part where the list tells none."""
    if path.name == TEN_SITES:
        for row in read_csv(path, ("image", "label", "site", "fold")):
            yield row["image"], _label(row["label"]), f"site {int(row['site']) + 1}", row["fold"]
    elif path.name == AUTHORS:
        for row in read_csv(path, ("id", "class")):
            yield row["id"], _label(row["class"]), "", ""
    else:
        yield from ((name, label, "", "") for name, label in sorted(_single_types(path)))


def _label(text: str) -> int:
    return int(text) if text in map(str, range(len(CLASSES))) else -1


def _single_types(path: Path) -> Iterator[tuple[str, int]]:
    """The slices of RSNA's table with one type; it has a line (ID_..._subdural, 0 or 1) for each slice and type."""
    types: dict[str, set[int]] = {}
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        if next(reader, None) != ["ID", "Label"]:
            raise UserError(f"{path}: its first line should be ID,Label")
        for line in reader:
            name, _, kind = line[0].rpartition("_")
            if line[-1] == "1" and kind in CLASSES:
                types.setdefault(name, set()).add(CLASSES.index(kind))
    return ((name, min(labels)) for name, labels in types.items() if len(labels) == 1)


def _in_order(root: Path, rows: dict[str, tuple[str, int, str, str]]) -> list[str]:
    """The order that FedIIC's split goes by: that of the authors' data.csv, which is not published, else by name."""
    for path in (root / "splits" / AUTHORS, root / AUTHORS):
        if path.is_file():
            listed = [row["id"] for row in read_csv(path, ("id", "class"))]
            if set(listed) == set(rows) and len(listed) == len(rows):
                return listed
            raise UserError(f"{path} lists other images than {TEN_SITES}; leave one of the two out")
    return sorted(rows)


def _files(root: Path, wanted: dict[str, tuple[str, int, str, str]]) -> dict[str, Location]:
    """The file of each slice: one that was made before, where there is such a one, else DICOM."""
    found: dict[str, Location] = {}
    for location in walk_images(root, SUFFIXES):
        name = location.path.stem
        if name in wanted and (name not in found or _rank(location) < _rank(found[name])):
            found[name] = location
    return found


def _rank(location: Location) -> int:
    return SUFFIXES.index(location.path.suffix.lower())


def _patient(location: Location | None, archives: Archives) -> str:
    """The patient that a DICOM file names, "" for other files."""
    if location is None or location.path.suffix.lower() not in dicom.SUFFIXES:
        return ""
    return dicom.header(location.file if location.member is None else archives.read(location), "PatientID")
