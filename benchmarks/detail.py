"""What small JPEG files, and images stored with half the pixels, keep of the detail that an image can hold.

    python benchmarks/detail.py isic2017_images_256.zip results/prr-dermoscopy/detail.json

Images of 256 x 256 pixels, squashed from 4:3, are made into files of 200 x 150 pixels as HAM10000's are, and those into
central squares of 128 pixels; the same squares are made without the detour, and from squares of 64 pixels. By bands of
frequency (cycles across the square, the distance from the origin of the spectrum), as shares of the energy of squares
without the detour: the energy of what the files change, brightness and colour apart, and what half the pixels leave of
brightness (of fine colours there is less than whole numbers from 0 to 255 can show).
"""

from __future__ import annotations

import argparse
import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from equipoise.core.storage import write_text

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "images of a data set"

SIZE, COARSE, BAND = 128, 64, 8
FILE, QUALITY = (200, 150), 75
CHANNELS = ("brightness", "blue-yellow", "red-green")


def central(picture: Image.Image, size: int) -> Image.Image:
    """The central square, as the data sets store it."""
    left = (picture.width - picture.height) // 2
    square = picture.crop((left, 0, left + picture.height, picture.height))
    return square.resize((size, size), Image.Resampling.LANCZOS)


def as_file(picture: Image.Image) -> Image.Image:
    """The picture, once written as a small JPEG file with colours at half the size."""
    file = io.BytesIO()
    picture.resize(FILE, Image.Resampling.LANCZOS).save(file, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return Image.open(file).convert("RGB")


def spectrum(picture: Image.Image) -> np.ndarray:
    """Fourier coefficients of the three channels of an image, (3, S, S), its border faded out."""
    channels = np.asarray(picture.convert("YCbCr"), float).transpose(2, 0, 1)
    window = np.hanning(SIZE)
    return np.fft.fft2((channels - channels.mean((1, 2), keepdims=True)) * np.outer(window, window))


def energies(picture: Image.Image) -> Iterator[np.ndarray]:
    """Squared coefficients: of the image, of what files change of it, and of its coarse copy."""
    wide = picture.convert("RGB").resize((256, 192), Image.Resampling.LANCZOS)
    whole = spectrum(central(wide, SIZE))
    coarse = central(wide, COARSE).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    for each in (whole, spectrum(central(as_file(wide), SIZE)) - whole, spectrum(coarse)):
        yield np.abs(each) ** 2


def by_band(energy: np.ndarray) -> np.ndarray:
    """Sums of (3, S, S) over rings of BAND cycles, (3, bands)."""
    frequency = np.fft.fftfreq(SIZE, 1 / SIZE)
    ring = np.hypot(*np.meshgrid(frequency, frequency)).astype(int) // BAND
    return np.stack([np.bincount(ring.ravel(), channel.ravel())[: SIZE // 2 // BAND] for channel in energy])


def main(images: Path, target: Path, number: int) -> None:
    """Measures `number` images of a zip and writes the shares as JSON."""
    with zipfile.ZipFile(images) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        chosen = random.Random(0).sample(names, number)
        sums = sum(
            np.stack([by_band(energy) for energy in energies(Image.open(io.BytesIO(archive.read(name))))])
            for name in chosen
        )
    whole, changed, coarse = np.asarray(sums)
    told = {
        "notes": ["python benchmarks/detail.py isic2017_images_256.zip", f"{number} images; energies as shares"],
        "bands": [f"{first} to {first + BAND} cycles" for first in range(0, SIZE // 2, BAND)],
        "error of small files / signal": dict(zip(CHANNELS, (changed / whole).round(3).tolist())),
        "brightness left at half the pixels": (coarse / whole)[0].round(3).tolist(),
    }
    write_text(target, json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--images", dest="number", type=int, default=200)
    arguments = parser.parse_args()
    main(arguments.images, arguments.target, arguments.number)
