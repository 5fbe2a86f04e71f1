"""Images that a method makes, such as a generator's, as files in the run's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from equipoise.core.storage import replacing

#: the folder of pictures within a run's
PICTURES = "pictures"
#: images in a row
COLUMNS = 8


def write_pictures(path: Path, images: Tensor) -> None:
    """Write images (n, C, H, W), from 0 to 1, side by side into one PNG."""
    from PIL import Image

    pixels = (255 * images).round().byte().cpu().numpy()
    pixels = np.repeat(pixels, 3, axis=1) if pixels.shape[1] == 1 else pixels
    count, channels, height, width = pixels.shape
    rows = -(-count // COLUMNS)
    board = np.zeros((rows * COLUMNS, channels, height, width), dtype=np.uint8)
    board[:count] = pixels
    whole = board.reshape(rows, COLUMNS, channels, height, width).transpose(0, 3, 1, 4, 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=False) as draft:
        Image.fromarray(whole.reshape(rows * height, COLUMNS * width, channels)).save(draft, format="PNG")
