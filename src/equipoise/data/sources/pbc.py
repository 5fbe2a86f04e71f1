"""PBC (Acevedo et al. 2020): 17,092 blood cells of 8 classes, split 11,959/1,712/3,421 as in FedBM (2025).

The original index list is not published with the images, so the split is drawn here, stratified, from
`split_seed`. Training images are partitioned; one validation and test set is common.
"""

from collections import Counter
from pathlib import Path

from equipoise.core.errors import UserError
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import walk_images
from equipoise.data.sources import Listing, Record, expect

TITLE = "PBC blood cells, 8 classes, partitioned"
SIZE = 64
PARTITION = "dirichlet_per_class"
LICENCE = "CC BY 4.0"
OBTAIN = "https://doi.org/10.17632/snkd93bnjr.1: the archive of eight folders of images"

COUNTS = {
    "basophil": 1218,
    "eosinophil": 3117,
    "erythroblast": 1551,
    "ig": 2895,
    "lymphocyte": 1214,
    "monocyte": 1420,
    "neutrophil": 3329,
    "platelet": 2348,
}
CLASSES = tuple(COUNTS)


def listing(config: DataConfig, root: Path) -> Listing:
    """All cells; the class is the folder that an image lies in."""
    records = []
    for location in walk_images(root):
        folder, name = location.path.parent.name.lower(), location.path.stem
        if folder in COUNTS:
            records.append(Record(f"{folder}/{name}", location, CLASSES.index(folder), "pbc", f"{folder}/{name}"))
    if not records:
        raise UserError(f"{root} has no image of {config.name} (folders {', '.join(CLASSES)})")
    records.sort(key=lambda record: record.name)
    warnings = expect(config, Counter(CLASSES[record.label] for record in records), COUNTS)
    return Listing(config.name, CLASSES, tuple(records), facts={"warnings": warnings})
