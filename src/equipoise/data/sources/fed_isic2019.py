"""Fed-ISIC2019 of FLamby (Terrail et al. 2022): ISIC 2019 by centre, 8 classes, the official train and test folds.

Centres without any image in the folder are left out (BCN is often not at hand). The official folds have no
validation part: it is a lesion-grouped tenth of each centre's training fold.
"""

from collections import Counter
from pathlib import Path

from equipoise.core.errors import UserError
from equipoise.data.data_config import DataConfig
from equipoise.data.sources import Listing, Record, expect, find_file, images_by_identifier, read_csv
from equipoise.data.sources.ham10000 import METADATA

TITLE = "Fed-ISIC2019, up to six centres, 8 classes"
SIZE = 128
PARTITION = "source"
LICENCE = "CC BY-NC 4.0"
OBTAIN = (
    "https://challenge.isic-archive.com/data/#2019: ISIC_2019_Training_Input and its metadata; the list "
    "fed_isic2019_train_test_split.csv is FLamby's train_test_split (https://github.com/owkin/FLamby)"
)

CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES = {"0": "bcn", "1": "vidir_molemax", "2": "vidir_modern", "3": "rosendahl", "4": "msk", "5": "vienna_dias"}
TRAIN = {"bcn": 9930, "vidir_molemax": 3163, "vidir_modern": 2691, "rosendahl": 1807, "msk": 655, "vienna_dias": 351}
TEST = {"bcn": 2483, "vidir_molemax": 791, "vidir_modern": 672, "rosendahl": 452, "msk": 164, "vienna_dias": 88}
RATIOS = (0.72, 0.08, 0.2)  # as in the official folds: a fifth for tests, a tenth of the rest for validation
ISIC2019 = "ISIC_2019_Training_Metadata.csv"


def listing(config: DataConfig, root: Path) -> Listing:
    """The images of the centres that are there, with the official folds."""
    rows = read_csv(find_file(root, "fed_isic2019_train_test_split.csv"), ("image", "target", "center", "fold"))
    found = images_by_identifier(root)
    lesions = _lesions(root)
    everything = []
    for row in rows:
        name, centre = row["image"].removesuffix("_downsampled"), CENTRES.get(row["center"], row["center"])
        label = int(row["target"]) if row["target"].isdecimal() else -1
        group = lesions.get(name) or name
        everything.append(Record(name, found.get(name), label, centre, group, row["fold"]))
    warnings = []
    for fold, documented in (("train", TRAIN), ("test", TEST)):
        counts = Counter(record.site for record in everything if record.split == fold)
        warnings += expect(config, counts, documented, fold)
    order = list(CENTRES.values())
    there = {record.site for record in everything if record.location is not None}
    if not there:
        raise UserError(f"{root} has no image of {config.name}")
    records = [record for record in everything if record.site in there]
    records.sort(key=lambda record: (order.index(record.site), record.name))
    absent = [centre for centre in order if centre not in there]
    warnings += [f"centre {centre} of {config.name} has no images here and is left out" for centre in absent]
    return Listing(config.name, CLASSES, tuple(records), ratios=RATIOS, facts={"warnings": warnings})


def _lesions(root: Path) -> dict[str, str]:
    """Lesion of each image, as far as ISIC 2019's and HAM10000's own tables are there to say."""
    lesions: dict[str, str] = {}
    for table in (folder / name for folder in (root / "splits", root) for name in (ISIC2019, *METADATA)):
        if table.is_file():
            image = "image" if table.name == ISIC2019 else "image_id"
            for row in read_csv(table, (image, "lesion_id")):
                lesions.setdefault(row[image].removesuffix("_downsampled"), row["lesion_id"])
    return lesions
