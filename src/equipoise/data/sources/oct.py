"""OCT-C8 (Naren, 2021): 24,000 optical coherence tomograms of the retina, 8 classes, the official 18,400/2,800/2,800.

Images lie in `train|val|test/<class>/`. Patients are not published, so each image is a group by itself.
"""

from collections import Counter
from pathlib import Path

from equipoise.core.errors import UserError
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import walk_images
from equipoise.data.sources import PART_FOLDERS, Listing, Record, expect

TITLE = "OCT-C8 retinal tomograms, 8 classes, partitioned"
SIZE = 128
PARTITION = "dirichlet_per_class"
LICENCE = "CC BY-NC-SA 4.0"
OBTAIN = "https://www.kaggle.com/datasets/obulisainaren/retinal-oct-c8: RetinalOCT_Dataset"

CLASSES = ("AMD", "CNV", "CSR", "DME", "DR", "DRUSEN", "MH", "NORMAL")
EACH = {"train": 2300, "valid": 350, "test": 350}  # images of each class


def listing(config: DataConfig, root: Path) -> Listing:
    """All tomograms; the class is the folder of an image, the part the folder above it."""
    records = []
    for location in walk_images(root):
        folder, part = location.path.parent.name.upper(), PART_FOLDERS.get(location.path.parent.parent.name.lower())
        if folder in CLASSES and part:
            name = f"{part}/{folder}/{location.path.stem}"
            records.append(Record(name, location, CLASSES.index(folder), "oct", name, part))
    if not records:
        raise UserError(f"{root} has no image of {config.name} (folders train, val and test, of {', '.join(CLASSES)})")
    records.sort(key=lambda record: record.name)
    counts = Counter(f"{CLASSES[record.label]} {record.split}" for record in records)
    documented = {f"{label} {part}": number for part, number in EACH.items() for label in CLASSES}
    return Listing(config.name, CLASSES, tuple(records), facts={"warnings": expect(config, counts, documented)})
