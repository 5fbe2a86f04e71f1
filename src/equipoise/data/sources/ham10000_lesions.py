"""HAM10000's four sources with the masks of lesions (Tschandl et al., 2020): 10,015 dermoscopy images.

Lesions are groups: the images of one lesion are in one part.
"""

from collections import Counter
from pathlib import Path

from equipoise.data.data_config import DataConfig
from equipoise.data.masks import image_of
from equipoise.data.raw import Location, walk_images
from equipoise.data.sources import Listing, Record, expect, images_by_identifier
from equipoise.data.sources.ham10000 import LICENCE, SITES, read_metadata

__all__ = ["LICENCE", "OBTAIN", "PARTITION", "SIZE", "TITLE", "listing"]

TITLE = "HAM10000's four sources as sites, with masks of lesions"
SIZE = 128
PARTITION = "source"
OBTAIN = (
    "https://doi.org/10.7910/DVN/DBW86T: both parts of the images, HAM10000_segmentations_lesion_tschandl.zip and "
    "HAM10000_metadata"
)

CLASSES = ("skin", "lesion")
HALF = 128  # copies of smaller masks have grey levels at borders


def listing(config: DataConfig, root: Path) -> Listing:
    """All images of HAM10000 with their masks, site by site; what kind of lesion each has is kept for sub-groups."""
    found, masks = images_by_identifier(root), _masks(root)
    records = [
        Record(
            name=name,
            location=found.get(name),
            label=0,
            site=row["dataset"],
            group=row["lesion_id"],
            extra=(row["dx"],),
            mask=masks.get(name),
        )
        for name, row in sorted(read_metadata(root).items())
    ]
    warnings = expect(config, Counter(record.site for record in records), SITES)
    records.sort(key=lambda record: list(SITES).index(record.site))
    return Listing(
        config.name,
        CLASSES,
        tuple(records),
        columns=("diagnosis",),
        facts={"warnings": warnings},
        masks=True,
        threshold=HALF,
    )


def _masks(root: Path) -> dict[str, Location]:
    """The masks under `root` by their image: ISIC_0024306_segmentation.png is that of ISIC_0024306."""
    locations = ((location, location.path.name) for location in walk_images(root))
    return {image_of(name): location for location, name in locations if image_of(name) != location.path.stem}
