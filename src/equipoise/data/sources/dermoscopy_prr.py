"""The dermoscopic federation of PRR-Imbalance: three sources of HAM10000 and ISIC 2017, the authors' splits.

Sites A (ViDIR, modern), B (ViDIR, MoleMax), C (Rosendahl) and D (ISIC 2017); HAM10000's fourth source,
vienna_dias, is the unseen cohort.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from equipoise.data.data_config import DataConfig
from equipoise.data.raw import Location
from equipoise.data.sources import Listing, Record, expect, find_file, images_by_identifier, read_csv
from equipoise.data.sources.ham10000 import COLUMNS, extra_of, read_metadata
from equipoise.data.splits import PARTS

TITLE = "PRR-Imbalance's four dermoscopy sites, 3 classes, and an unseen cohort"
SIZE = 128
PARTITION = "source"
LICENCE = "HAM10000: CC BY-NC 4.0; ISIC 2017: CC0"
OBTAIN = (
    "https://doi.org/10.7910/DVN/DBW86T (HAM10000) and https://challenge.isic-archive.com/data/#2017 (training, "
    "validation and test images); the lists of the four sites are in https://github.com/CityU-AIM-Group/PRR-Imbalance"
)

CLASSES = ("nv", "bkl", "mel")
SITES = ("A", "B", "C", "D")
COHORT = "vienna_dias"
#: the metadata of site D, where at hand
ISIC2017 = tuple(f"ISIC-2017_{part}_Data_metadata.csv" for part in ("Training", "Validation", "Test_v2"))
COUNTS = {"train": 7343, "valid": 1046, "test": 2101, "cohort": 427}


def listing(config: DataConfig, root: Path) -> Listing:
    """The images of the four sites with the authors' parts, and the unseen cohort."""
    found, ham10000 = images_by_identifier(root), read_metadata(root)
    told = {name: extra_of(row) for name, row in [*_isic2017(root), *ham10000.items()]}
    records = [record for site in SITES for part in PARTS for record in _site_part(root, site, part, found)]
    records += [
        Record(name, found.get(name), CLASSES.index(row["dx"]), COHORT, row["lesion_id"], "test", "test")
        for name, row in sorted(ham10000.items())
        if row["dataset"] == COHORT and row["dx"] in CLASSES
    ]
    records = [replace(record, extra=told.get(record.name, extra_of(None))) for record in records]
    counts = Counter("cohort" if record.site == COHORT else record.split for record in records)
    warnings = expect(config, counts, COUNTS)
    columns = tuple(COLUMNS.values())
    return Listing(
        config.name, CLASSES, tuple(records), cohorts=(COHORT,), columns=columns, facts={"warnings": warnings}
    )


def _isic2017(root: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The age and sex of site D's patients, by image, where ISIC 2017's metadata are there."""
    for file in ISIC2017:
        path = next((folder / file for folder in (root / "splits", root) if (folder / file).is_file()), None)
        for row in read_csv(path, ("image_id", "age_approximate", "sex")) if path else ():
            yield row["image_id"], {"age": row["age_approximate"], "sex": row["sex"]}


def _site_part(root: Path, site: str, part: str, found: dict[str, Location]) -> list[Record]:
    """One CSV file of the authors. Site D's lesions are unknown, so each of its images is a group."""
    rows = read_csv(find_file(root, f"prr_{part}_client{site}.csv"), ("image_id", "label"))
    return [
        Record(
            name=row["image_id"],
            location=found.get(row["image_id"]),
            label=int(row["label"]) if row["label"].isdecimal() else -1,
            site=site,
            group=row["image_id"] if site == "D" else row["lesion_id"],
            split=part,
        )
        for row in rows
    ]
