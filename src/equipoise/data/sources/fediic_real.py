"""The real federation of FedIIC (Wu et al. 2023): PH2, Atlas and three sources of HAM10000 as five sites, 7 classes.

The paper tells neither the three sources nor the size of its test set, and its lists are not published. Its imbalance,
35.43, is that of HAM10000's vidir_modern, rosendahl and vienna_dias with PH2 and Atlas: nv 3,720, df 105.
The test set is of 100 images of each class, drawn from ISIC 2019's images that are not HAM10000's.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from equipoise.core.errors import UserError, as_text
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import Location
from equipoise.data.sources import Listing, Record, expect, find_file, images_by_identifier, isic2019, read_csv
from equipoise.data.sources.ham10000 import CLASSES, read_metadata

TITLE = "FedIIC's five sources of dermoscopy (PH2, Atlas, HAM10000), 7 classes"
SIZE = 256
PARTITION = "source"
LICENCE = "PH2 and Atlas: for research and education, on registration; HAM10000 and ISIC 2019: CC BY-NC 4.0"
OBTAIN = (
    "https://www.fc.up.pt/addi/ph2%20database.html (PH2Dataset with PH2_dataset.txt), https://derm.cs.sfu.ca (Atlas as "
    "derm7pt's release_v0, with meta.csv), https://doi.org/10.7910/DVN/DBW86T (HAM10000) and "
    "https://challenge.isic-archive.com/data/#2019 (ISIC_2019_Training_Input and its ground truth)"
)

SITES = {"ph2": 200, "atlas": 963, "vidir_modern": 3363, "rosendahl": 2259, "vienna_dias": 439}
TEST_SITE = "isic2019"
TEST_IMAGES = 100  # of each class
PH2 = {"0": "nv", "1": "nv", "2": "mel"}  # common naevus, atypical naevus, melanoma
ATLAS = {
    "basal cell carcinoma": "bcc",
    "dermatofibroma": "df",
    "seborrheic keratosis": "bkl",
    "vascular lesion": "vasc",
}
ISIC2019 = dict(zip(isic2019.CLASSES, ("mel", "nv", "bcc", "akiec", "bkl", "df", "vasc", "akiec")))


def listing(config: DataConfig, root: Path) -> Listing:
    """The images of the five sites, all for training, and one common test set."""
    found = images_by_identifier(root)
    ham = read_metadata(root)
    records = [
        *_ph2(root, found),
        *_atlas(root, found),
        *(
            _record(name, found.get(name), row["dx"], row["dataset"], row["lesion_id"])
            for name, row in sorted(ham.items(), key=lambda item: (_place(item[1]["dataset"]), item[0]))
            if row["dataset"] in SITES
        ),
    ]
    warnings = expect(config, Counter(record.site for record in records), SITES)
    records += _test_set(root, found, set(ham))
    tested = Counter(CLASSES[record.label] for record in records if record.site == TEST_SITE)
    warnings += expect(config, tested, dict.fromkeys(CLASSES, TEST_IMAGES), "test")
    facts = {"warnings": warnings}
    return Listing(config.name, CLASSES, tuple(records), ratios=(1, 0, 0), common=True, facts=facts)


def _place(site: str) -> int:
    return list(SITES).index(site) if site in SITES else len(SITES)


def _record(name: str, location: Location | None, diagnosis: str, site: str, group: str, part: str = "train") -> Record:
    label = CLASSES.index(diagnosis) if diagnosis in CLASSES else -1
    return Record(name, location, label, site, group, part, clean=part)


def _ph2(root: Path, found: dict[str, Location]) -> Iterator[Record]:
    """PH2's table separates values by two bars; the clinical diagnosis is a number."""
    path = find_file(root, "PH2_dataset.txt")
    lines = as_text(path.read_bytes(), str(path), "utf-8-sig").splitlines()
    table = [[value.strip() for value in line.strip().strip("|").split("||")] for line in lines]
    header = next((row for row in table if "Clinical Diagnosis" in row), None)
    if header is None:
        raise UserError(f"{path} has no column Clinical Diagnosis between pairs of bars")
    column = header.index("Clinical Diagnosis")
    for row in table:
        if re.fullmatch(r"IMD\d+", row[0]) and len(row) > column:
            yield _record(row[0], found.get(row[0]), PH2.get(row[column], ""), "ph2", row[0])


def _atlas(root: Path, found: dict[str, Location]) -> Iterator[Record]:
    """The dermoscopic images of derm7pt's table whose diagnosis is one of the seven classes."""
    by_name = {name.casefold(): location for name, location in found.items()}
    for row in read_csv(find_file(root, "meta.csv"), ("case_num", "diagnosis", "derm")):
        name = Path(row["derm"]).stem
        diagnosis = _of_atlas(row["diagnosis"].lower())
        if diagnosis:
            group = f"atlas/{row['case_num']}"
            yield _record(f"atlas/{name}", by_name.get(name.casefold()), diagnosis, "atlas", group)


def _of_atlas(diagnosis: str) -> str:
    """The class of a diagnosis of derm7pt; "" for lentigo, melanosis and miscellaneous."""
    if diagnosis.endswith("nevus"):
        return "nv"
    return "mel" if diagnosis.startswith("melanoma") else ATLAS.get(diagnosis, "")


def _test_set(root: Path, found: dict[str, Location], ham: set[str]) -> list[Record]:
    """So many images of each class of ISIC 2019, none of which HAM10000 has."""
    random = np.random.RandomState(0)
    candidates: dict[str, list[str]] = {name: [] for name in CLASSES}
    for name, label in sorted(isic2019.read_truth(root).items()):
        if label >= 0 and name.removesuffix("_downsampled") not in ham:
            candidates[ISIC2019[isic2019.CLASSES[label]]].append(name)
    drawn = [
        (names[row], diagnosis)
        for diagnosis, names in candidates.items()
        for row in sorted(random.permutation(len(names))[:TEST_IMAGES])
    ]
    return [
        _record(name, found.get(name.removesuffix("_downsampled")), diagnosis, TEST_SITE, name, "test")
        for name, diagnosis in drawn
    ]
