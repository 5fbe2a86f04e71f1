"""HAM10000 (Tschandl et al. 2018): 10,015 dermoscopy images of 7 classes from four sources.

The authors' split is the 7,007/1,003/2,005 one of DermaMNIST that FedBM (2025) uses, the grouped one is its
corrected form, which keeps lesions together. By source, every site has test data; partitioned
training images leave one common validation and test set.
"""

from collections import Counter
from pathlib import Path

from equipoise.data.data_config import DataConfig
from equipoise.data.sources import Listing, Record, expect, find_file, images_by_identifier, read_csv

TITLE = "HAM10000, 7 classes; partitioned, or its four sources as sites"
SIZE = 128
PARTITION = "source"
LICENCE = "CC BY-NC 4.0"
OBTAIN = (
    "https://doi.org/10.7910/DVN/DBW86T: both parts of the images and HAM10000_metadata; dermamnist_split_info.csv is "
    "the index list of DermaMNIST (https://medmnist.com), dermamnist_corrected_metadata.csv its corrected form "
    "(https://doi.org/10.1038/s41597-025-04382-5)"
)

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
SITES = {"vidir_modern": 3363, "vidir_molemax": 3954, "rosendahl": 2259, "vienna_dias": 439}
AUTHORS = {"train": 7007, "valid": 1003, "test": 2005}
CLEAN = {"train": 8208, "valid": 575, "test": 1232}
#: columns of the metadata that are kept for sub-groups, and their titles
COLUMNS = {"age": "age", "sex": "sex", "localization": "localisation", "dx_type": "diagnosed by"}
METADATA = ("HAM10000_metadata_with_source.csv", "HAM10000_metadata.csv", "HAM10000_metadata")


def read_metadata(root: Path) -> dict[str, dict[str, str]]:
    """HAM10000's rows by image: lesion_id, dx (the diagnosis) and dataset (where the image was taken)."""
    rows = read_csv(find_file(root, *METADATA), ("image_id", "lesion_id", "dx", "dataset"))
    return {row["image_id"]: row for row in rows}


def extra_of(row: dict[str, str] | None) -> tuple[str, ...]:
    """What a row of the metadata tells for sub-groups; empty texts where there is no row."""
    return tuple((row or {}).get(column, "") for column in COLUMNS)


def listing(config: DataConfig, root: Path) -> Listing:
    """All images of HAM10000 with both splits, site by site."""
    authors = _parts(root, "dermamnist_split_info.csv")
    clean = _parts(root, "dermamnist_corrected_metadata.csv")
    found = images_by_identifier(root)
    records = [
        Record(
            name=name,
            location=found.get(name),
            label=CLASSES.index(row["dx"]) if row["dx"] in CLASSES else -1,
            site=row["dataset"],
            group=row["lesion_id"],
            split=authors.get(name, ""),
            clean=clean.get(name, ""),
            extra=extra_of(row),
        )
        for name, row in sorted(read_metadata(root).items())
    ]
    warnings = [
        *expect(config, Counter(record.site for record in records), SITES),
        *expect(config, Counter(record.split for record in records), AUTHORS, "authors"),
        *expect(config, Counter(record.clean for record in records), CLEAN, "grouped"),
    ]
    records.sort(key=lambda record: list(SITES).index(record.site))
    titles = tuple(COLUMNS.values())
    return Listing(config.name, CLASSES, tuple(records), columns=titles, facts={"warnings": warnings})


def _parts(root: Path, file: str) -> dict[str, str]:
    rows = read_csv(find_file(root, file), ("image_id", "split"))
    return {row["image_id"]: "valid" if row["split"] == "val" else row["split"] for row in rows}
