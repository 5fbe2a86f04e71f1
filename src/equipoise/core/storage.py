"""Files that are written whole or not at all, and locks that keep other processes out."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A draft beside `path`, which takes its place when the block ends, and is deleted when the block fails.

    A reader finds the old content or the new, if `durable` even after a power cut. Each writer of a file has a separate
    draft, and the last to end prevails. A draft is named after its file, so that a clean-up by names finds a killed
    process's draft. Nothing else reads it.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    draft.touch(exist_ok=False)
    try:
        yield draft
        if durable:
            # Opened anew: a library may have put another file under the draft's name.
            settle(draft)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def settle(path: Path) -> None:
    """Wait until a file lies on the disk; of a folder, until the names in it do. Windows settles no folders."""
    if path.is_dir():
        if os.name == "nt":
            return
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        return
    with path.open("rb+") as written:
        os.fsync(written.fileno())


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, and the folders it lies in if they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def checked_text(content: Mapping[str, Any]) -> str:
    """Some content as JSON, with its checksum."""
    return json.dumps({**content, "checksum": _checksum(content)}, indent=1)


def read_checked(text: bytes, must: Callable[[dict[str, Any]], bool] = lambda content: False) -> dict[str, Any]:
    """The inverse of `checked_text`.

    Args:
        must: whether content without a checksum is damaged; earlier versions wrote none

    Raises:
        ValueError: where the text is damaged
    """
    content: dict[str, Any] = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("the file does not hold what was written")
    checksum = content.pop("checksum", "")
    if (checksum or must(content)) and checksum != _checksum(content):
        raise ValueError("the file does not hold what was written")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`; a killed process lets go by itself.

    The file stays: were it deleted, one process could hold the lock of the deleted file and another that of a new one.

    Raises:
        BlockingIOError: when another holds it, and we do not `wait`
    """
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, "another process holds the lock", str(path)) from None
    try:
        yield
    finally:
        lock.release()
