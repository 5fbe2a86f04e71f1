"""ISIC 2019's training images: 25,331 dermoscopy images of 8 classes, with FedIIC's 7:1:2 split (Wu et al. 2023).

FedIIC permutes the rows of the ground truth and cuts them without regard to lesions. `data.split = "grouped"` draws
7:1:2 within each class and keeps the images of one lesion together. An image without a lesion id is a group by itself.
"""

from collections import Counter
from pathlib import Path

from equipoise.data.data_config import DataConfig
from equipoise.data.sources import Listing, Record, expect, find_file, images_by_identifier, read_csv
from equipoise.data.splits import permuted_split

TITLE = "ISIC 2019, 8 classes, partitioned"
SIZE = 256
PARTITION = "dirichlet_equal"
LICENCE = "CC BY-NC 4.0"
OBTAIN = (
    "https://challenge.isic-archive.com/data/#2019: ISIC_2019_Training_Input, ISIC_2019_Training_GroundTruth.csv and "
    "ISIC_2019_Training_Metadata.csv"
)

COUNTS = {"MEL": 4522, "NV": 12875, "BCC": 3323, "AK": 867, "BKL": 2624, "DF": 239, "VASC": 253, "SCC": 628}
CLASSES = tuple(COUNTS)
RATIOS = (0.7, 0.1, 0.2)
TRUTH, METADATA = "ISIC_2019_Training_GroundTruth.csv", "ISIC_2019_Training_Metadata.csv"


def listing(config: DataConfig, root: Path) -> Listing:
    """All training images in the order of the ground truth, which FedIIC's split goes by."""
    labels = read_truth(root)
    rows = read_csv(find_file(root, METADATA), ("image", "lesion_id"))
    lesions = {row["image"]: row["lesion_id"] for row in rows}
    found = images_by_identifier(root)
    records = tuple(
        Record(
            name=name,
            location=found.get(name.removesuffix("_downsampled")),
            label=label,
            site="isic2019",
            group=lesions.get(name) or name,
            split=part,
        )
        for (name, label), part in zip(labels.items(), permuted_split(len(labels), RATIOS).tolist())
    )
    warnings = expect(config, Counter(CLASSES[label] for label in labels.values() if label >= 0), COUNTS)
    return Listing(config.name, CLASSES, records, ratios=RATIOS, facts={"warnings": warnings})


def read_truth(root: Path) -> dict[str, int]:
    """The class of each image, -1 for a row that names none or several, in the order of ISIC 2019's table."""
    rows = read_csv(find_file(root, TRUTH), ("image", *CLASSES))
    return {row["image"]: _label(row) for row in rows}


def _label(row: dict[str, str]) -> int:
    marked = [number for number, name in enumerate(CLASSES) if row[name] in ("1", "1.0")]
    return marked[0] if len(marked) == 1 else -1
