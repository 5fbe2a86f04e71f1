"""DICOM images as 8-bit grey levels: rescaled, seen through a window. pydicom is imported when a file is read."""

import io
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import UserError, install

SUFFIXES = {".dcm", ".dicom"}
Window = tuple[float, float]
"""Centre and width in the unit of the rescaled pixels: Hounsfield units where the image is a CT."""


def is_dicom(content: bytes) -> bool:
    """Whether a file says that it is DICOM: by its mark after 128 free bytes."""
    return content[128:132] == b"DICM"


def windowed(content: bytes, window: Window | None = None) -> np.ndarray:
    """One image as uint8 (H, W): `window` becomes 0 to 255; MONOCHROME1, whose zero is white, is turned round.

    Args:
        window: default the first that the file names, else from its darkest to its brightest pixel

    Raises:
        ValueError: for colour and for files of several frames
    """
    file = _read(io.BytesIO(content))
    levels = _rescaled(file)
    low, high = _bounds(file, levels, window)
    shown = np.clip((levels - low) / max(high - low, 1e-12), 0, 1)
    if file.get("PhotometricInterpretation") == "MONOCHROME1":
        shown = 1 - shown
    return np.round(shown * 255).astype(np.uint8)


def header(source: Path | bytes, keyword: str) -> str:
    """One entry of a header as text, "" where there is none; no pixels are read.

    Args:
        source: a file or its bytes
        keyword: DICOM's own, such as "PatientID"
    """
    stream = source if isinstance(source, Path) else io.BytesIO(source)
    return str(_read(stream, stop_before_pixels=True, specific_tags=[keyword]).get(keyword, ""))


def _read(source: Path | io.BytesIO, **options: Any) -> Any:
    try:
        pydicom = import_module("pydicom")
    except ImportError:
        raise UserError(f"DICOM files need the package pydicom: {install('medical')}") from None
    return pydicom.dcmread(source, **options)


def _rescaled(file: Any) -> np.ndarray:
    """The pixels (H, W) in the unit that the header's slope and intercept lead to."""
    pixels = file.pixel_array
    if pixels.ndim != 2:
        raise ValueError(f"pixels of shape {pixels.shape}: colour and several frames are not read")
    return pixels * float(file.get("RescaleSlope", 1)) + float(file.get("RescaleIntercept", 0))


def _bounds(file: Any, levels: np.ndarray, window: Window | None) -> Window:
    """The levels that become black and white."""
    centre, width = window or (_first(file.get("WindowCenter")), _first(file.get("WindowWidth")))
    if centre is None or width is None:
        return float(levels.min()), float(levels.max())
    return centre - width / 2, centre + width / 2


def _first(value: Any) -> float | None:
    """A header's number, or the first of several."""
    if value is None or value == "":
        return None
    return float(value[0] if isinstance(value, (list, tuple)) or hasattr(value, "__iter__") else value)
