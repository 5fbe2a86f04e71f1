"""MetaImage (.mhd with .raw, .mha) and NRRD volumes, as challenges publish them: their voxels and where these lie.

Both are a header in text, and voxels behind it. Their axes point to the left, to the back and to the head (LPS).
NIfTI's axes point to the right, to the front and to the head (RAS).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIXES = (".mhd", ".mha", ".nrrd")
NRRD = b"NRRD"
#: names of numbers, of both formats
KINDS = {
    "MET_UCHAR": "u1", "MET_CHAR": "i1", "MET_USHORT": "u2", "MET_SHORT": "i2", "MET_UINT": "u4", "MET_INT": "i4",
    "MET_FLOAT": "f4", "MET_DOUBLE": "f8",
    "uchar": "u1", "unsigned char": "u1", "uint8": "u1", "uint8_t": "u1", "signed char": "i1", "int8": "i1",
    "short": "i2", "int16": "i2", "int16_t": "i2", "ushort": "u2", "unsigned short": "u2", "uint16": "u2",
    "uint16_t": "u2", "int": "i4", "int32": "i4", "uint": "u4", "unsigned int": "u4", "uint32": "u4",
    "float": "f4", "double": "f8",
}  # fmt: skip
#: from a place in LPS to one in RAS
TURNED = np.diag([-1.0, -1.0, 1.0, 1.0])


class Volume(NamedTuple):
    """Voxels (X, Y, Z) and where they lie in RAS: (4, 4)."""

    voxels: np.ndarray
    affine: np.ndarray


def recognises(content: bytes) -> bool:
    """Whether a file says that it is NRRD, or starts like a MetaImage."""
    return content.startswith(NRRD) or _starts_as_metaimage(content)


def _starts_as_metaimage(content: bytes) -> bool:
    return content[:512].lstrip().startswith((b"ObjectType", b"NDims")) and b"DimSize" in content[:4096]


def whole(file: Path) -> bytes:
    """A .mhd file and the file of voxels that it names, as one .mha file."""
    head, _, name = file.read_bytes().partition(b"ElementDataFile")
    voxels = file.parent / name.split(b"=", 1)[1].strip().decode()
    return head + b"ElementDataFile = LOCAL\n" + voxels.read_bytes()


def read(content: bytes) -> Volume:
    """A volume from the bytes of one file.

    Raises:
        ValueError: for what is not three-dimensional or not understood
    """
    if content.startswith(NRRD):
        return _read_nrrd(content)
    fields, start = _metaimage_header(content)
    data = content[start:]
    if fields.get("CompressedData", "False") == "True":
        data = zlib.decompress(data)
    big = fields.get("BinaryDataByteOrderMSB", fields.get("ElementByteOrderMSB", "False")) == "True"
    voxels = _voxels(data, fields["ElementType"], fields["DimSize"], ">" if big else "<")
    axes = _numbers(fields.get("TransformMatrix", "1 0 0 0 1 0 0 0 1")).reshape(3, 3)
    spacing = _numbers(fields.get("ElementSpacing", "1 1 1"))
    origin = _numbers(fields.get("Offset", fields.get("Position", "0 0 0")))
    return Volume(voxels, _affine(axes * spacing[:, None], origin))


def _read_nrrd(content: bytes) -> Volume:
    fields, start = _nrrd_header(content)
    data = content[start:]
    if fields["encoding"] in ("gzip", "gz"):
        data = gzip.decompress(data)
    elif fields["encoding"] != "raw":
        raise ValueError(f"NRRD of the encoding {fields['encoding']}; save it with gzip or raw")
    voxels = _voxels(data, fields["type"], fields["sizes"], ">" if fields.get("endian") == "big" else "<")
    if "space directions" not in fields:
        return Volume(voxels, TURNED)
    axes = _numbers(fields["space directions"]).reshape(3, 3)
    affine = _affine(axes, _numbers(fields.get("space origin", "0 0 0")))
    told = fields.get("space", "left-posterior-superior").lower()
    if told in ("right-anterior-superior", "ras"):
        affine = TURNED @ affine
    return Volume(voxels, affine)


def _metaimage_header(content: bytes) -> tuple[Mapping[str, str], int]:
    """The fields of a MetaImage, and where its voxels start; ElementDataFile is the last field."""
    head, mark, rest = content.partition(b"ElementDataFile")
    lines = (line.partition("=") for line in head.decode("latin-1").splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in lines}, len(head) + len(mark) + rest.find(b"\n") + 1


def _nrrd_header(content: bytes) -> tuple[Mapping[str, str], int]:
    """The fields of a NRRD file, and where its voxels start: behind the first empty line."""
    ends = {content.find(mark): len(mark) for mark in (b"\n\n", b"\r\n\r\n")}
    end = min((place for place in ends if place >= 0), default=-1)
    if end < 0:
        raise ValueError("NRRD whose voxels lie in another file; save it as one file")
    lines = content[:end].decode("latin-1").splitlines()[1:]
    fields = (line.partition(":") for line in lines if not line.startswith("#"))
    return {name.strip(): value.strip().lstrip("=") for name, _, value in fields}, end + ends[end]


def _voxels(data: bytes, kind: str, sizes: str, order: str) -> np.ndarray:
    """Voxels (X, Y, Z); in files the first axis runs fastest."""
    if kind not in KINDS:
        raise ValueError(f"voxels of the type {kind} are not read")
    found = tuple(map(int, sizes.split()))
    if len(found) != 3:
        raise ValueError(f"an image of {len(found)} dimensions; split it into volumes of 3")
    numbers = np.frombuffer(data, dtype=order + KINDS[kind])
    return numbers[: int(np.prod(found))].reshape(found, order="F").astype(order.replace(">", "=") + KINDS[kind])


def _numbers(text: str) -> np.ndarray:
    return np.array(text.replace("(", " ").replace(")", " ").replace(",", " ").split(), dtype=float)


def _affine(axes: np.ndarray, origin: Sequence[float] | np.ndarray) -> np.ndarray:
    """The place of a voxel in RAS, by steps (3, 3) along the axes, one per row, and the first voxel's place in LPS."""
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = axes.T, origin
    return TURNED @ affine
