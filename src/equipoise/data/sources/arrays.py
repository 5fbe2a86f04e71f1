"""Images that a Python program gave: `arrays:DIGEST` is a packed store named after its content."""

from pathlib import Path

from equipoise.core.errors import UserError
from equipoise.data.data_config import DataConfig
from equipoise.data.store import Store

TITLE = "images from Python, packed by equipoise.Federation.from_arrays (arrays:DIGEST)"
SIZE = 128
PARTITION = "source"
ARGUMENT = "DIGEST"


def opened(config: DataConfig, root: Path) -> Store:
    """The store under `root` that holds the images of this digest."""
    store = Store(root / config.name.replace(":", "-"))
    if not store.exists():
        raise UserError(
            f"there is no {store.folder}, which should hold the images from Python; make the Federation from the same "
            "arrays again, or point data.store or EQUIPOISE_DATA to its folder"
        )
    return store
