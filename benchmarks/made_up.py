"""Small made-up copies of the published data sets in their documented layouts: files, folders and tables.

Each function fills a folder with a few images of every class. Their numbers are not the documented ones, so that
reading them needs `data.skip_unreadable = true`, or documented numbers to match.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

SIDES = (60, 45)  # width and height: no square, so that cropping and squashing differ
PARTS = ("train", "train", "train", "valid", "test")

Maker = Callable[[Path], None]


def picture(path: Path, label: int, number: int, sides: tuple[int, int] = SIDES) -> None:
    """An image whose colour tells its class, with noise that tells its number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng((label, number))
    colour = 128 + 90 * np.sin(label * np.array([1.0, 2.0, 3.0]) + 1)
    pixels = np.clip(colour + random.normal(0, 25, (sides[1], sides[0], 3)), 0, 255)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def oct(root: Path, each: int = 8) -> None:
    """OCT-C8: train, val and test, one folder per class in each."""
    from equipoise.data.sources.oct import CLASSES

    for label, name in enumerate(CLASSES):
        for part, count in (("train", each), ("val", 2), ("test", 2)):
            for number in range(count):
                file = f"{name.lower()}_{part}_{1001 + number}.jpg"
                picture(root / "RetinalOCT_Dataset" / part / name / file, label, number + 100 * len(part))


def kvasir(root: Path, each: int = 10) -> None:
    """Kvasir v2: one folder per class."""
    from equipoise.data.sources.kvasir import CLASSES

    for label, name in enumerate(CLASSES):
        for number in range(each):
            picture(root / "kvasir-dataset-v2" / name / f"{label:04x}{number:04x}-made-up.jpg", label, number)


def pbc(root: Path, each: int = 10) -> None:
    """PBC: one folder per class."""
    from equipoise.data.sources.pbc import CLASSES

    for label, name in enumerate(CLASSES):
        for number in range(each):
            picture(root / name / f"{name[:2].upper()}_{number}.jpg", label, number, (36, 36))


def isic2019(root: Path, each: int = 16, first: int = 50_000) -> list[tuple[str, int]]:
    """ISIC 2019: a folder of images, the ground truth, the metadata; every two images of a class show one lesion."""
    from equipoise.data.sources.isic2019 import CLASSES, METADATA, TRUTH

    images = [
        (f"ISIC_{first + number * len(CLASSES) + label:07d}", label) for number in range(each) for label in range(8)
    ]
    truth = [(name, *(float(label == column) for column in range(8)), 0.0) for name, label in images]
    table(root / TRUTH, ("image", *CLASSES, "UNK"), truth)
    metadata = [
        (name, 50, "torso", f"BCN_{row // 16:03d}{label}" if row % 7 else "", "male")
        for row, (name, label) in enumerate(images)
    ]
    table(root / METADATA, ("image", "age_approx", "anatom_site_general", "lesion_id", "sex"), metadata)
    for number, (name, label) in enumerate(images):
        picture(root / "ISIC_2019_Training_Input" / f"{name}.jpg", label, number)
    return images


def ham10000(root: Path, each: int = 10) -> list[tuple[str, str, str]]:
    """HAM10000 with both lists of its parts: images, their class and their source."""
    from equipoise.data.sources.ham10000 import CLASSES, METADATA, SITES

    rows, images = [], []
    for number in range(each * len(CLASSES) * len(SITES)):
        label, site = number % len(CLASSES), list(SITES)[number // len(CLASSES) % len(SITES)]
        name, lesion = f"ISIC_{20_000 + number:07d}", f"HAM_{number:07d}"
        rows.append((lesion, name, CLASSES[label], "histo", 50, "male", "back", site))
        images.append((name, CLASSES[label], site))
        picture(root / "images" / f"{name}.jpg", label, number)
    table(root / METADATA[0], ("lesion_id", "image_id", "dx", "dx_type", "age", "sex", "localization", "dataset"), rows)
    parts = [
        (PARTS[number // len(CLASSES) % len(PARTS)].replace("valid", "val"), number, row[1])
        for number, row in enumerate(rows)
    ]
    table(root / "dermamnist_split_info.csv", ("split", "index", "image_id"), parts)
    table(root / "dermamnist_corrected_metadata.csv", ("split", "index", "image_id"), parts)
    return images


def dermoscopy_prr(root: Path) -> None:
    """PRR-Imbalance's lists of three sites of HAM10000; its fourth, of ISIC 2017, has images of the same kind."""
    classes = ("nv", "bkl", "mel")
    sites = dict(zip(("vidir_modern", "vidir_molemax", "rosendahl"), "ABC"))
    lists: dict[tuple[str, str], list[tuple[str, int, str]]] = {}
    places = dict.fromkeys((*"ABCD",), 0)
    listed = [(name, dx, sites[site]) for name, dx, site in ham10000(root) if dx in classes and site in sites]
    for number in range(60):
        name = f"ISIC_{number:07d}"
        picture(root / "images" / f"{name}.jpg", number % 3, number)
        listed.append((name, classes[number % 3], "D"))
    for name, dx, site in listed:
        part = PARTS[places[site] // len(classes) % len(PARTS)]
        places[site] += 1
        lists.setdefault((part, site), []).append((name, classes.index(dx), f"L{name}"))
    for (part, site), rows in lists.items():
        table(root / f"prr_{part}_client{site}.csv", ("image_id", "label", "lesion_id"), rows)


def fed_isic2019(root: Path) -> None:
    """Fed-ISIC2019: FLamby's list of folds of six centres."""
    rows = [
        (name, label, number // 8 % 6, "test" if number // 48 % 4 == 3 else "train")
        for number, (name, label) in enumerate(isic2019(root, each=48))
    ]
    table(root / "fed_isic2019_train_test_split.csv", ("image", "target", "center", "fold"), rows)


def fediic_real(root: Path) -> None:
    """PH2, Atlas (derm7pt), HAM10000 and ISIC 2019 in one folder."""
    ham10000(root / "ham", each=4)
    for file in (root / "ham").glob("*.csv"):
        file.rename(root / file.name)
    isic2019(root, each=6)
    lines = ["||   Name    ||  Histological Diagnosis   ||     Clinical Diagnosis     ||   Asymmetry  ||"]
    for number in range(12):
        lines.append(f"||   IMD{number:03d}  ||          ||              {number % 3}             ||      0       ||")
        folder = root / "PH2 Dataset images" / f"IMD{number:03d}"
        picture(folder / f"IMD{number:03d}_Dermoscopic_Image" / f"IMD{number:03d}.bmp", (5, 5, 4)[number % 3], number)
        picture(folder / f"IMD{number:03d}_lesion" / f"IMD{number:03d}_lesion.bmp", 0, number)
    (root / "PH2_dataset.txt").write_text("\n".join(lines), encoding="utf-8")
    diagnoses = (
        "basal cell carcinoma", "clark nevus", "melanoma (in situ)", "melanosis", "dermatofibroma", "lentigo",
        "seborrheic keratosis", "vascular lesion", "miscellaneous", "reed or spitz nevus",
    )  # fmt: skip
    rows = []
    for number in range(30):
        rows.append(
            (number + 1, diagnoses[number % 10], f"NEL/NEL{2 * number:03d}.JPG", f"NEL/Nel{2 * number + 1:03d}.jpg")
        )
        picture(root / "release_v0" / "images" / "NEL" / f"Nel{2 * number + 1:03d}.jpg", number % 10, number)
    table(root / "meta.csv", ("case_num", "diagnosis", "clinic", "derm"), rows)


def slice_file(path: Path, levels: np.ndarray, patient: str = "", window: tuple[float, float] = (40, 80)) -> None:
    """A CT slice as DICOM: Hounsfield units (H, W) as whole numbers, with an intercept of -1024."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.SOPClassUID = file.file_meta.MediaStorageSOPClassUID = CTImageStorage
    file.SOPInstanceUID = file.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    file.PatientID, file.Modality = patient, "CT"
    file.Rows, file.Columns = levels.shape
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 16, 15, 1
    file.RescaleSlope, file.RescaleIntercept = 1, -1024
    file.WindowCenter, file.WindowWidth = window
    file.PixelData = (levels + 1024).astype("<i2").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    file.save_as(path, enforce_file_format=True)


def rsna_ich(root: Path, each: int = 60, suffix: str = ".dcm") -> None:
    """RSNA-ICH: CT slices of patients with five slices each, and FedNPR's list of ten sites."""
    rows = []
    for number in range(5 * each):
        name, label = f"ID_{number:09x}", number % 5
        random = np.random.default_rng(number)
        levels = np.round(random.normal(30 + 10 * label, 12, (32, 32)))
        file = root / "stage_2_train" / f"{name}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        grey = np.clip((levels / 80) * 255, 0, 255).astype(np.uint8)
        if suffix == ".dcm":
            slice_file(file, levels, f"ID_patient{number // 5}")
        elif suffix == ".npy":
            np.save(file, grey)
        else:
            Image.fromarray(grey).save(file)
        rows.append((name, label, number // 5 % 10, "test" if number // 50 % 4 == 3 else "train"))
    table(root / "rsna_ich_10_sites.csv", ("image", "label", "site", "fold"), rows)


def femnist(root: Path, writers: int = 60, each: int = 62) -> None:
    """LEAF's FEMNIST: two files of writers, every tenth of whom has 150 images and more."""
    random = np.random.default_rng(0)
    names = [f"f{number:04d}_{number % 50:02d}" for number in range(writers)]
    for part, users in enumerate((names[::2], names[1::2])):
        data = {}
        for user in users:
            count = 150 if int(user[1:5]) % 10 == 9 else each
            labels = [(number + 7 * int(user[1:5])) % 62 for number in range(count)]
            pixels = np.clip(random.normal(0.5, 0.1, (count, 784)) + np.array(labels)[:, None] / 124, 0, 1)
            data[user] = {"x": np.round(pixels, 3).tolist(), "y": labels}
        content = {"users": users, "num_samples": [len(data[user]["y"]) for user in users], "user_data": data}
        path = root / "data" / "all_data" / f"all_data_{part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


def mask_of(number: int, sides: tuple[int, int] = SIDES) -> np.ndarray:
    """Where an image of this number shows its structure: uint8 (H, W), 0 and 1."""
    width, height = sides
    down, right = np.mgrid[:height, :width]
    centre = height * (0.4 + 0.02 * (number % 10)), width * (0.4 + 0.02 * (number % 7))
    return (np.hypot(down - centre[0], right - centre[1]) < min(sides) * 0.25).astype(np.uint8)


def ham10000_lesions(root: Path) -> None:
    """HAM10000 with a folder of masks, whose lesions are dark."""
    for number, (name, _, _) in enumerate(ham10000(root)):
        mask = mask_of(number)
        pixels = np.random.default_rng(number).integers(150, 220, (*mask.shape, 3)) - 100 * mask[..., None]
        Image.fromarray(pixels.astype(np.uint8)).save(root / "images" / f"{name}.jpg")
        folder = root / "HAM10000_segmentations_lesion_tschandl"
        folder.mkdir(exist_ok=True)
        Image.fromarray(mask * np.uint8(255)).save(folder / f"{name}_segmentation.png")


def metaimage(path: Path, voxels: np.ndarray, spacing: tuple[float, float, float] = (0.5, 0.5, 3.0)) -> None:
    """A volume (X, Y, Z) of whole numbers as MetaImage: .mha, or .mhd with its voxels in a .raw file beside it."""
    apart = path.suffix == ".mhd"
    lines = [
        "ObjectType = Image", "NDims = 3", "BinaryData = True", "BinaryDataByteOrderMSB = False",
        "CompressedData = False", "TransformMatrix = 1 0 0 0 1 0 0 0 1", "Offset = 5 6 7",
        f"ElementSpacing = {' '.join(map(str, spacing))}", f"DimSize = {' '.join(map(str, voxels.shape))}",
        "ElementType = MET_SHORT", f"ElementDataFile = {f'{path.stem}.raw' if apart else 'LOCAL'}",
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    data = voxels.astype("<i2").tobytes(order="F")
    path.write_bytes(("\n".join(lines) + "\n").encode() + (b"" if apart else data))
    if apart:
        path.with_suffix(".raw").write_bytes(data)


def nrrd(path: Path, voxels: np.ndarray) -> None:
    """A volume (X, Y, Z) of whole numbers as NRRD, compressed."""
    header = (
        "NRRD0004\n# made up\ntype: short\ndimension: 3\nspace: left-posterior-superior\n"
        f"sizes: {' '.join(map(str, voxels.shape))}\nspace directions: (0.5,0,0) (0,0.5,0) (0,0,3)\n"
        "endian: little\nencoding: gzip\nspace origin: (5,6,7)\n\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.encode() + gzip.compress(voxels.astype("<i2").tobytes(order="F")))


def prostate_volume(number: int, slices: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """A bright prostate (X, Y, Z) on a dark ground, off the middle, and its zones 1 and 2; none in the outer slices."""
    mask = np.zeros((24, 20, slices), dtype=np.int16)
    mask[4:12, 5 + number % 5 : 14, 1:-1] = 1
    mask[6:10, 7 + number % 5 : 11, 1:-1] = 2
    return np.random.default_rng(number).integers(0, 60, mask.shape) + 150 * (mask > 0), mask


def prostate(root: Path) -> None:
    """NCI-ISBI 2013 as DICOM series with NRRD masks, and PROMISE12 as MetaImage; all patients that take part."""
    import pydicom

    for name, collection in (("Prostate3T", "Prostate-3T"), ("ProstateDx", "PROSTATE-DIAGNOSIS")):
        for number in range(1, 31):
            case = f"{name}-01-{number:04d}"
            voxels, mask = prostate_volume(number)
            nrrd(root / "NCI-ISBI" / "Training" / f"{case}.nrrd", mask)
            for place in range(voxels.shape[2]):
                file = root / collection / case / "study" / "series" / f"{9 - place:06d}.dcm"
                slice_file(file, voxels[:, :, place].T, case, (100, 220))
                content = pydicom.dcmread(file)
                content.ImagePositionPatient, content.SeriesInstanceUID = [5, 6, 7 + 3 * place], "1.2.3"
                content.save_as(file)
    for number in range(50):
        voxels, mask = prostate_volume(number)
        metaimage(root / "PROMISE12" / f"Case{number:02d}.mhd", voxels)
        metaimage(root / "PROMISE12" / f"Case{number:02d}_segmentation.mhd", mask > 0)


def prostate_six(root: Path) -> None:
    """The prepared folders of six sites: NIfTI with masks beside, some of which tell zones."""
    import nibabel

    from equipoise.data.sources.prostate_six import PATIENTS

    for site, count in PATIENTS.items():
        for number in range(count):
            for kind, voxels in zip(("", "_segmentation" if number % 2 else "_Segmentation"), prostate_volume(number)):
                file = root / site / f"Case{number:02d}{kind}.nii.gz"
                file.parent.mkdir(parents=True, exist_ok=True)
                nibabel.save(nibabel.Nifti1Image(voxels.astype(np.int16), np.diag([-1.0, -1.0, 3.0, 1.0])), file)


MAKERS: dict[str, Maker] = {
    "dermoscopy-prr": dermoscopy_prr,
    "fed-isic2019": fed_isic2019,
    "fediic-real": fediic_real,
    "femnist": femnist,
    "ham10000": ham10000,
    "ham10000-lesions": ham10000_lesions,
    "isic2019": isic2019,
    "kvasir": kvasir,
    "oct": oct,
    "pbc": pbc,
    "prostate": prostate,
    "prostate-six": prostate_six,
    "rsna-ich": rsna_ich,
}
