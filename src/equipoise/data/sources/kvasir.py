"""Kvasir v2 (Pogorelov et al. 2017): 8,000 endoscopic images of 8 classes, 1,000 each, split 7:1:2 as in FedBM (2025).

The index list of FedBM's split is not published, so it is drawn here, stratified, from `split_seed`. Its authors share
the images in folders `train`, `val` and `test`: where all images lie in such folders, these are the split.
"""

from collections import Counter
from pathlib import Path

from equipoise.core.errors import UserError
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import walk_images
from equipoise.data.sources import PART_FOLDERS, Listing, Record, expect

TITLE = "Kvasir v2 endoscopy, 8 classes, partitioned"
SIZE = 128
PARTITION = "dirichlet_per_class"
LICENCE = "for research and education only, by the terms on its page; other uses need its authors' permission"
OBTAIN = "https://datasets.simula.no/kvasir: kvasir-dataset-v2.zip"

CLASSES = (
    "dyed-lifted-polyps",
    "dyed-resection-margins",
    "esophagitis",
    "normal-cecum",
    "normal-pylorus",
    "normal-z-line",
    "polyps",
    "ulcerative-colitis",
)
EACH = 1000  # images of each class


def listing(config: DataConfig, root: Path) -> Listing:
    """All frames; the class is the folder that an image lies in."""
    records = []
    for location in walk_images(root):
        folder, part = location.path.parent.name.lower(), PART_FOLDERS.get(location.path.parent.parent.name.lower(), "")
        if folder in CLASSES:
            name = f"{folder}/{location.path.stem}"
            records.append(Record(name, location, CLASSES.index(folder), "kvasir", name, part))
    if not records:
        raise UserError(f"{root} has no image of {config.name} (folders {', '.join(CLASSES)})")
    loose = [record.name for record in records if not record.split]
    if 0 < len(loose) < len(records):
        raise UserError(f"{root} has images of {config.name} inside and outside of train, val and test: {loose[0]}")
    records.sort(key=lambda record: record.name)
    warnings = expect(config, Counter(CLASSES[record.label] for record in records), dict.fromkeys(CLASSES, EACH))
    return Listing(config.name, CLASSES, tuple(records), facts={"warnings": warnings})
