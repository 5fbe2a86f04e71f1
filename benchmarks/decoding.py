"""Images per second that preparation decodes, beside plain Pillow, OpenCV and simplejpeg, in turns in one run.

    python benchmarks/decoding.py [--images 200] [--repeats 3] [--quick] [--out results/benchmarks]

Each way makes a square of 128 pixels of a JPEG file: the central square, resampled. Files are made-up noise that is
smooth over some pixels, of the sizes of HAM10000 (600 x 450) and of a camera (3000 x 2250). A way whose package is not
installed is left out. Ways need not give the same bits. One thread; CPU seconds, least of the turns. Writes
`decoding.json`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from equipoise.data.raw import decode

SIDE = 128
SIZES = ((600, 450), (3000, 2250))
Way = Callable[[bytes], Any]


def files(width: int, height: int, count: int) -> list[bytes]:
    """JPEG files of smooth noise."""
    random, made = np.random.default_rng(1), []
    for _ in range(count):
        coarse = random.integers(0, 256, (height // 15, width // 15, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        made.append(buffer.getvalue())
    return made


def plain_pillow(data: bytes) -> np.ndarray:
    """As one writes it first."""
    with Image.open(io.BytesIO(data)) as image:
        return cut(np.asarray(image.convert("RGB")))


def cut(pixels: np.ndarray) -> np.ndarray:
    """The central square, resampled with Pillow."""
    side = min(pixels.shape[:2])
    top, left = ((length - side) // 2 for length in pixels.shape[:2])
    square = Image.fromarray(np.ascontiguousarray(pixels[top : top + side, left : left + side]))
    return np.asarray(square.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def with_opencv() -> Way:
    """OpenCV, which reads a JPEG file at a half, a quarter or an eighth of its size."""
    cv2 = importlib.import_module("cv2")
    cv2.setNumThreads(1)
    flags = {8: cv2.IMREAD_REDUCED_COLOR_8, 4: cv2.IMREAD_REDUCED_COLOR_4, 2: cv2.IMREAD_REDUCED_COLOR_2}

    def decode(data: bytes) -> np.ndarray:
        with Image.open(io.BytesIO(data)) as image:
            least = min(image.size)
        flag = next((flag for part, flag in flags.items() if least // part >= SIDE), cv2.IMREAD_COLOR)
        return cut(cv2.imdecode(np.frombuffer(data, np.uint8), flag)[..., ::-1])

    return decode


def with_simplejpeg() -> Way:
    """simplejpeg, which reads a JPEG file at a fraction of its size, too."""
    simplejpeg = importlib.import_module("simplejpeg")
    return lambda data: cut(simplejpeg.decode_jpeg(data, min_height=SIDE, min_width=SIDE))


def ways() -> dict[str, Way]:
    """What can decode here."""
    found: dict[str, Way] = {"plain Pillow": plain_pillow, "preparation": lambda data: decode(data, SIDE)}
    for name, make in (("OpenCV", with_opencv), ("simplejpeg", with_simplejpeg)):
        try:
            found[name] = make()
        except ImportError:
            print(f"{name} is not installed, and is left out")
    return found


def measure(count: int, repeats: int) -> list[dict[str, Any]]:
    """Images per second of every way and size."""
    rows, found = [], ways()
    for width, height in SIZES:
        made, least = files(width, height, count), dict[str, float]()
        for _ in range(repeats):
            for name, way in found.items():
                began = time.process_time()
                for data in made:
                    way(data)
                least[name] = min(least.get(name, float("inf")), time.process_time() - began)
        for name, seconds in least.items():
            row = {"way": name, "width": width, "height": height, "images_s": count / seconds}
            rows.append(row | {"ratio": least["plain Pillow"] / seconds})
            print(f"{width:>5} x {height:<5} {name:<14} {row['images_s']:8.0f} images/s  x{rows[-1]['ratio']:.1f}")
    return rows


def main() -> None:
    """Measure, print and write `decoding.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=40, help="files of each size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two files, once, to try the script")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    options = parser.parse_args()
    rows = measure(*((2, 1) if options.quick else (options.images, options.repeats)))
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"command": "python benchmarks/decoding.py", "load": os.getloadavg()[0], "side": SIDE, "rows": rows}
    (options.out / "decoding.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
