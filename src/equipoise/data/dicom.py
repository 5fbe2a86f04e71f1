"""DICOM images as 8-bit pixels: rescaled, seen through a window. pydicom is imported when a file is read."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import UserError, install

SUFFIXES = {".dcm", ".dicom"}
Window = tuple[float, float]
"""Centre and width in the unit of the rescaled pixels: Hounsfield units where the image is a CT."""
MARK = slice(128, 132)


def is_dicom(content: bytes) -> bool:
    """Whether a file says that it is DICOM: by its mark after 128 free bytes."""
    return content[MARK] == b"DICM"


def starts_as_dicom(file: Path) -> bool:
    """As `is_dicom`, for files whose names do not tell."""
    with open(file, "rb") as opened:
        return is_dicom(opened.read(MARK.stop))


def is_installed() -> bool:
    """Whether pydicom is."""
    return find_spec("pydicom") is not None


def windowed(content: bytes, window: Window | None = None, frame: int | None = None) -> np.ndarray:
    """One image as uint8, grey (H, W) or coloured (H, W, 3).

    Of grey levels, `window` becomes 0 to 255. MONOCHROME1, whose zero is white, is turned round.

    Args:
        window: default the first that the file names, else from its darkest to its brightest pixel
        frame: which of several, from 0

    Raises:
        ValueError: for files of several frames without a chosen frame, and for colours of more than 8 bits
    """
    file = _read(io.BytesIO(content))
    if frame is None and frames(file) > 1:
        raise ValueError(f"it holds several frames ({frames(file)}), and one is to be read")
    pixels = _package("pydicom.pixels").pixel_array(file, index=frame or 0)
    if file.get("PhotometricInterpretation") == "PALETTE COLOR":
        raise ValueError("palettes of colours are not read")
    if file.SamplesPerPixel > 1:
        if pixels.dtype != np.uint8:
            raise ValueError(f"colours of {file.BitsAllocated} bits are not read")
        return pixels
    slope, intercept = (_number(file, frame, name) for name in ("RescaleSlope", "RescaleIntercept"))
    levels = pixels * (1.0 if slope is None else slope) + (intercept or 0.0)
    low, high = _bounds(file, frame, levels, window)
    shown = np.clip((levels - low) / max(high - low, 1e-12), 0, 1)
    if file.get("PhotometricInterpretation") == "MONOCHROME1":
        shown = 1 - shown
    return np.round(shown * 255).astype(np.uint8)


def stored_values(content: bytes, frame: int | None = None) -> np.ndarray:
    """The stored pixels of one grey image (H, W): for masks."""
    return _package("pydicom.pixels").pixel_array(_read(io.BytesIO(content)), index=frame or 0)


def header(source: Path | bytes, keyword: str) -> str:
    """One entry of a header as text, "" where there is none; no pixels are read.

    Args:
        source: a file or its bytes
        keyword: DICOM's own, such as "PatientID"
    """
    return str(read_header(source, [keyword]).get(keyword, ""))


def read_header(source: Path | bytes, keywords: Sequence[str]) -> Any:
    """A header with these entries alone."""
    stream = source if isinstance(source, Path) else io.BytesIO(source)
    return _read(stream, stop_before_pixels=True, specific_tags=list(keywords))


def frames(file: Any) -> int:
    """How many images a file holds; 0 for a file without images, such as a report."""
    return int(file.get("NumberOfFrames") or 1) if file.get("Rows") else 0


def patient(file: Any) -> str:
    """A name for the patient that does not tell the id, "" where the header tells none."""
    told = str(file.get("PatientID") or "")
    return f"patient {hashlib.sha256(told.encode()).hexdigest()[:12]}" if told else ""


def check_keywords(keywords: Sequence[str]) -> None:
    """Refuse keywords that DICOM does not know."""
    unknown = [keyword for keyword in keywords if _package("pydicom.datadict").tag_for_keyword(keyword) is None]
    if unknown:
        raise UserError(f"data.header names {', '.join(unknown)}; use DICOM's keywords, such as PatientAge")


def _read(source: Path | io.BytesIO, **options: Any) -> Any:
    return _package("pydicom").dcmread(source, **options)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"DICOM files need the package pydicom: {install('medical')}") from None


def _bounds(file: Any, frame: int | None, levels: np.ndarray, window: Window | None) -> Window:
    """The levels that become black and white."""
    centre, width = window or (_number(file, frame, "WindowCenter"), _number(file, frame, "WindowWidth"))
    if centre is None or width is None:
        return float(levels.min()), float(levels.max())
    return centre - width / 2, centre + width / 2


def _number(file: Any, frame: int | None, keyword: str) -> float | None:
    """A number of the header, or the first of several; None where the header has none."""
    values = (part.get(keyword) for part in _parts(file, frame or 0))
    found = next((value for value in values if value is not None and value != ""), None)
    if found is None:
        return None
    return float(found[0] if hasattr(found, "__iter__") else found)


def _parts(file: Any, frame: int) -> Iterator[Any]:
    """Where a header may tell how to show a frame: the header itself, then groups for one frame and for all."""
    yield file
    each, shared = file.get("PerFrameFunctionalGroupsSequence"), file.get("SharedFunctionalGroupsSequence")
    for group in (*(each[frame : frame + 1] if each else ()), *(shared or ())):
        for sequence in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            yield from group.get(sequence) or ()
