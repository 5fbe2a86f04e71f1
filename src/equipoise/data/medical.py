"""The images in a user's file: one in a picture, one or several frames in DICOM, the slices of a NIfTI volume."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TypeVar

from equipoise.core.errors import UserError, install
from equipoise.data import dicom, volumes
from equipoise.data.data_config import DataConfig
from equipoise.data.raw import SUFFIXES, Archives, Frame, Location

T = TypeVar("T")
#: what of a DICOM header is always read
ENTRIES = ("PatientID", "NumberOfFrames", "Rows")
#: the package that reads a kind of file, as a test of whether it is there
PACKAGES = {"pydicom": dicom.is_installed, "nibabel": volumes.is_installed}


@dataclass(frozen=True)
class Found:
    """One image in a file.

    Args:
        group: the patient, "" where the file does not tell
        header: what `data.header` asks of a DICOM file, in its order
    """

    location: Location
    group: str = ""
    header: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """What tells the image from others of its file."""
        return "" if self.location.frame is None else f"#{self.location.frame.number + 1}"


def package_for(file: Path) -> str:
    """The package that reads a file, "" for pictures."""
    if volumes.is_volume(file.name):
        return "nibabel"
    return "pydicom" if file.suffix.lower() in dicom.SUFFIXES else ""


def is_read(file: Path) -> bool:
    """Whether a file holds images that this machine can read: by its ending, or as DICOM by its first bytes."""
    if volumes.is_volume(file.name):
        return volumes.is_installed() and not volumes.is_mask(file)
    if file.suffix.lower() in SUFFIXES:
        return True
    return dicom.is_installed() and dicom.starts_as_dicom(file)


def lacking(files: Iterable[Path]) -> str:
    """How to read files that need a package which is not there; "" where none does."""
    needed = sorted({package_for(file) for file in files} - {""})
    absent = [package for package in needed if not PACKAGES[package]()]
    return f"{' and '.join(absent)} would read some of them: {install('medical')}" if absent else ""


def images_in(location: Location, archives: Archives, config: DataConfig) -> Iterator[Found]:
    """The images at a location. A header that cannot be read gives one image, which fails when it is decoded."""
    name, absent = location.path.name, ("",) * len(config.header)
    if PurePath(name).suffix.lower() in SUFFIXES:
        yield Found(location, header=absent)
        return
    source = location.file if location.member is None else archives.read(location)
    if volumes.is_volume(name):
        count = _or_else(lambda: volumes.slices(source, config.plane), 1)
        for number in range(count):
            yield Found(replace(location, frame=Frame(number, config.plane)), header=absent)
        return
    file = None
    if _is_dicom(source):
        file = _or_else(lambda: dicom.read_header(source, [*ENTRIES, *config.header]), None)
    if file is None:
        yield Found(location, header=absent)
        return
    told = tuple(str(file.get(keyword, "")) for keyword in config.header)
    count = dicom.frames(file)
    for number in range(count):
        yield Found(replace(location, frame=Frame(number)) if count > 1 else location, dicom.patient(file), told)


def _is_dicom(source: Path | bytes) -> bool:
    return dicom.starts_as_dicom(source) if isinstance(source, Path) else dicom.is_dicom(source)


def _or_else(read: Callable[[], T], otherwise: T) -> T:
    """What `read` gives, or something else where a file is broken: the packages then raise errors of many kinds."""
    try:
        return read()
    except UserError:
        raise
    except Exception:
        return otherwise
