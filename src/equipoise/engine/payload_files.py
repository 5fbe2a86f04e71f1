"""Payloads and states on disk: safetensors with plain values as JSON beside them, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equipoise.contract.protocol import Payload, Value, flatten, unflatten
from equipoise.core.errors import FolderBusy, UserError, first_line
from equipoise.core.storage import locked, replacing

LONGEST_NAME = 120
#: what marks a folder as a run's, or a pilot's
OURS = {"events.jsonl", "config.toml", ".lock", "consortium.json", "pilot", "study.json"}

#: what a run writes into its folder
RUN_FILES = ("events.jsonl", "config.toml", "checkpoints", "sites", "models", "predictions.npz", "volumes.npz")

#: what files that hold something else than they should show themselves by
DAMAGE: tuple[type[Exception], ...] = (
    FileNotFoundError,
    IsADirectoryError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    SafetensorError,
)


def safe_name(name: str) -> str:
    """A site's name as a file name; a very long one is cut and marked by its digest."""
    quoted = quote(name, safe=" ()+,=@[]").replace(".", "%2E")
    if len(quoted) <= LONGEST_NAME:
        return quoted
    return f"{quoted[:LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def refuse_foreign(folder: Path) -> None:
    """Never write a run among somebody's other files."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; --out names the run's folder")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names and not names & OURS:
        raise UserError(f"{folder} is not empty and holds no run; choose another --out")


def clear_run(folder: Path) -> None:
    """Delete a run from its folder, and nothing else that lies there."""
    for name in RUN_FILES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def claimed_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """Keep a folder to one process at a time; with `wait` the others wait for it, else they get `FolderBusy`."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as claim:
        try:
            claim.enter_context(locked(folder / ".lock", wait))
        except BlockingIOError:
            raise FolderBusy(f"another process is at work in {folder}") from None
        yield


def write_payload(path: Path, payload: Mapping[str, Value], durable: bool = False) -> None:
    """Write a payload whole or not at all; equal payloads give equal files.

    Args:
        durable: wait until it lies on the disk. To wait with every payload would cost each round; what a power cut
            spoils is found on reading.
    """
    tensors, plain = flatten(payload)
    # Tensors that share memory, or lie strided, are refused by the format.
    packed = {name: t.detach().contiguous().cpu() for name, t in tensors.items()}
    seen: set[int] = set()
    for name, tensor in packed.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() in seen:
            packed[name] = tensor.clone()
        seen.add(packed[name].untyped_storage().data_ptr())
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = json.dumps(plain)
    try:
        with replacing(path, durable) as draft:
            # One entry: the format writes several in any order.
            save_file(packed, draft, metadata={"payload": json.dumps([_checksum(packed, facts), facts])})
    except SafetensorError as problem:  # a full disk, above all
        if number := re.search(r"os error (\d+)", str(problem)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from problem
        raise OSError(f"{path} could not be written: {problem}") from problem


@contextlib.contextmanager
def damage_named(what: str, remedy: str, *more: type[Exception]) -> Iterator[None]:
    """Say what is damaged, and what to do, where what files hold cannot be used; `more` are further signs of it.

    A device without memory, or a file that may not be read, is another matter, and no reason to delete anything.
    """
    signs: tuple[type[Exception], ...] = (*DAMAGE, *more)
    caught: tuple[type[Exception], ...] = (*signs, OSError)
    try:
        yield
    except caught as problem:
        if isinstance(problem, OSError) and not isinstance(problem, signs) and problem.errno != errno.EINVAL:
            raise  # EINVAL: a place before the file's start
        raise UserError(f"{what} is damaged ({first_line(problem)}); {remedy}") from None


#: signs of damage in a file of packed arrays; the last are flags that we do not write
BROKEN = (zipfile.BadZipFile, EOFError, zlib.error, struct.error, RuntimeError)


@contextlib.contextmanager
def arrays_in(path: Path, remedy: str) -> Iterator[Any]:
    """The packed arrays of a file, by name; says what to do where it is damaged."""
    with damage_named(str(path), remedy, *BROKEN), np.load(path) as file:
        yield file


def read_payload(path: Path, device: torch.device | str = "cpu") -> Payload:
    """Read a payload back, whole.

    Raises:
        ValueError: for a file that does not hold what was written
    """
    if path.is_dir():  # which the format calls a missing device
        raise IsADirectoryError(errno.EISDIR, "a folder lies in place of the file", str(path))
    with safe_open(path, framework="pt") as file:
        checksum, plain = _facts(file)
        tensors = {name: _read(file, name) for name in file.keys()}  # noqa: SIM118
    if checksum and checksum != _checksum(tensors, plain):
        raise ValueError(f"{path.name} does not hold what was written")
    return unflatten({name: tensor.to(device) for name, tensor in tensors.items()}, json.loads(plain))


def _facts(file: Any) -> tuple[str, str]:
    """The checksum and the plain values of an open file; older versions wrote two entries."""
    facts = file.metadata()
    if "payload" not in facts:
        return facts.get("checksum", ""), facts["plain"]
    checksum, plain = json.loads(facts["payload"])
    return checksum, plain


def _checksum(tensors: Mapping[str, Tensor], plain: str) -> str:
    """A number that changes with any damaged byte of tensors, which lie whole on the CPU, or of plain values."""
    found = zlib.crc32(plain.encode())
    for name, tensor in sorted(tensors.items()):
        found = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"


def _read(file: Any, name: str) -> Tensor:
    """A tensor of an open file, copied to separate memory.

    The file's own bytes lie at any address, and some products of matrices round differently there: a resumed run would
    part from an undisturbed one.
    """
    return file.get_tensor(name).clone()


class _Entries(Mapping[str, Tensor]):
    """A dict of tensors read one at a time from a payload file, which stays open meanwhile."""

    def __init__(self, path: Path, prefix: str, names: list[str], device: torch.device | str):
        self._file, self._prefix, self._names = safe_open(path, framework="pt"), prefix, names
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        return _read(self._file, self._prefix + name).to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class SpilledPayload(Mapping[str, Any]):
    """A payload that lies in a file; tensors are read to a device when they are used."""

    def __init__(self, path: Path, device: torch.device | str = "cpu"):
        self.path = path
        self._device = device
        with safe_open(path, framework="pt") as file:
            self._plain = json.loads(_facts(file)[1])
            names = list(file.keys())
        self._groups: dict[str, list[str]] = {
            name: [] for name, value in self._plain.items() if isinstance(value, dict)
        }
        self._single = []
        for name in names:
            head, slash, entry = name.partition("/")
            if slash:
                self._groups[head].append(entry)
            else:
                self._single.append(name)

    def __getitem__(self, name: str) -> Any:
        if name in self._groups:
            return _Entries(self.path, f"{name}/", self._groups[name], self._device)
        if name in self._single:
            with safe_open(self.path, framework="pt") as file:
                return _read(file, name).to(self._device)
        return self._plain[name]

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self._plain if name not in self._groups)
        yield from self._groups
        yield from self._single

    def __len__(self) -> int:
        return sum(1 for _ in self)
