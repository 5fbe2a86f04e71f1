"""The prostate federation of PRR-Imbalance: T2-weighted MRI of NCI-ISBI 2013 and PROMISE12 as five sites.

Sites A (Radboud, RUNMC) and B (Boston, BMC) are NCI-ISBI 2013; C (UCL), D (Beth Israel, BIDMC) and E (Haukeland, HK)
are PROMISE12. Axial slices that show the prostate are images, its zones are one structure, and patients are groups.
The files may be the challenges' own, or the folders of six sites that multi-site studies share.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from equipoise.core.errors import UserError
from equipoise.data import dicom, volumes
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import Frame, locate
from equipoise.data.sources import Listing, Record, expect

TITLE = "prostate MRI of NCI-ISBI 2013 and PROMISE12 as five sites, with masks"
SIZE = 256
PARTITION = "source"
LICENCE = "NCI-ISBI 2013: CC BY 3.0; PROMISE12: for research, by the challenge's terms"
OBTAIN = (
    "https://doi.org/10.7937/K9/TCIA.2015.zF0vlOPv (NCI-ISBI 2013, with the collections Prostate-3T and "
    "PROSTATE-DIAGNOSIS) and https://promise12.grand-challenge.org; or six prepared folders from "
    "https://liuquande.github.io/SAML"
)

CLASSES = ("background", "prostate")
#: folders of the prepared copy by site, and patients of each
FOLDERS = {"RUNMC": "A", "BMC": "B", "UCL": "C", "BIDMC": "D", "HK": "E"}
PATIENTS = {"A": 30, "B": 30, "C": 13, "D": 12, "E": 12}
#: numbers of PROMISE12's training cases; those of RUNMC (13 to 24) and case 2 take no part
PROMISE12 = {"D": {*range(13)} - {2}, "C": {*range(25, 38)}, "E": {*range(38, 50)}}
NCI_ISBI = {"Prostate3T": "A", "ProstateDx": "B"}
OF_NCI_ISBI = re.compile(r"(Prostate3T|ProstateDx)-\d+-\d+")
OF_CASE = re.compile(r"Case(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """A patient: a site, and the files of the images and of the mask.

    Args:
        images: a volume, or the slices of a DICOM series
    """

    site: str
    name: str
    images: tuple[Path, ...]
    mask: Path


def listing(config: DataConfig, root: Path) -> Listing:
    """The slices of the five sites' patients that show the prostate."""
    return listing_of(config, root, [*_challenge_cases(root), *prepared_cases(root, FOLDERS)], PATIENTS)


def listing_of(config: DataConfig, root: Path, cases: list[Case], patients: dict[str, int]) -> Listing:
    """The slices of some patients, site by site."""
    if not cases:
        raise UserError(
            f"{root} has no prostate MRI: neither folders {', '.join(FOLDERS)} with Case00.nii.gz and "
            "Case00_segmentation.nii.gz, nor NCI-ISBI 2013 and PROMISE12 as published; unpack zip files first"
        )
    cases.sort(key=lambda case: (list(patients).index(case.site), case.name))
    warnings = expect(config, Counter(case.site for case in cases), patients, "patients")
    records = tuple(record for case in cases for record in _slices(case))
    facts = {"warnings": warnings, "patients": dict(Counter(case.site for case in cases))}
    return Listing(config.name, CLASSES, records, facts=facts, masks=True, threshold=1)


def prepared_cases(root: Path, sites: dict[str, str]) -> Iterator[Case]:
    """The patients of the prepared folders, which are named after sites."""
    for folder in sorted(path for path in root.rglob("*") if path.is_dir() and path.name.upper() in sites):
        for mask in sorted(folder.iterdir()):
            volume = volumes.volume_of_mask(mask) if volumes.is_volume(mask.name) else None
            if volume is not None:
                site = sites[folder.name.upper()]
                yield Case(site, f"{site} {volumes.stem(volume.name)}", (volume,), mask)


def _challenge_cases(root: Path) -> Iterator[Case]:
    """The patients of PROMISE12 and NCI-ISBI 2013 as these were published."""
    series: dict[str, list[Path]] = {}
    segmented: dict[str, Path] = {}
    for file in sorted(root.rglob("*")):
        names = [found.group() for part in file.parts if (found := OF_NCI_ISBI.match(part))]
        if file.suffix.lower() == ".mhd" and (volume := volumes.volume_of_mask(file)):
            number = OF_CASE.match(file.name)
            site = next((site for site, cases in PROMISE12.items() if number and int(number[1]) in cases), None)
            if site:
                yield Case(site, f"{site} {volume.stem}", (volume,), file)
        elif names and file.suffix.lower() == ".nrrd":
            segmented[names[-1]] = file
        elif names and file.suffix.lower() in dicom.SUFFIXES:
            series.setdefault(names[0], []).append(file)
    for name, mask in segmented.items():
        if name in series:
            site = NCI_ISBI[name.partition("-")[0]]
            yield Case(site, f"{site} {name}", _in_order(series[name], volumes.slices(mask, "axial")), mask)


def _in_order(files: list[Path], count: int) -> tuple[Path, ...]:
    """The slices of the series that has as many as the mask, from the feet to the head."""
    found: dict[str, list[tuple[float, Path]]] = {}
    for file in files:
        header = dicom.read_header(file, ["ImagePositionPatient", "SeriesInstanceUID"])
        place = header.get("ImagePositionPatient") or (0, 0, 0)
        found.setdefault(str(header.get("SeriesInstanceUID")), []).append((float(place[2]), file))
    for slices in found.values():
        if len(slices) == count:
            return tuple(file for _, file in sorted(slices))
    raise UserError(
        f"{files[0].parent}: no series has {count} slices, as the mask has; take the T2-weighted axial series whole"
    )


def _slices(case: Case) -> Iterator[Record]:
    """The images of a patient that show the prostate.

    A DICOM slice has the patient's right on its left; slices of volumes are the other way round.
    """
    mask, series = locate(case.mask), len(case.images) > 1 or case.images[0].suffix.lower() in dicom.SUFFIXES
    volume = None if series else locate(case.images[0])
    for number in np.flatnonzero(volumes.marked(case.mask, "axial")).tolist():
        frame = Frame(number)
        location = locate(case.images[number]) if volume is None else replace(volume, frame=frame)
        where = replace(mask, frame=frame._replace(mirrored=series))
        yield Record(f"{case.name}#{number + 1}", location, 0, case.site, case.name, mask=where)
