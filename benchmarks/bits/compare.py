"""Two run folders side by side: every bit of every tensor, and every score."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

#: entries that a clock or the version decides
UNSTEADY = {"seconds", "time", "version"}
#: events whose fields are results; the others tell how a run went
RESULTS = ("round", "evaluation", "selection", "final")
#: numbers that numpy has no name for, by their bytes
KINDS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file."""

    kind: str
    shape: tuple[int, ...]
    content: bytes

    def differs(self, other: Tensor) -> str:
        """How another tensor differs; nothing where every bit is the same."""
        if (self.kind, self.shape) != (other.kind, other.shape):
            return f"{self.kind} {list(self.shape)} has become {other.kind} {list(other.shape)}"
        if self.content == other.content:
            return ""
        first, second = self._numbers(), other._numbers()
        with np.errstate(invalid="ignore"):  # infinity less infinity
            gaps = np.abs(second - first)
        parted = (gaps != 0) | (np.signbit(first) != np.signbit(second))
        largest = np.nanmax(gaps, initial=0)
        return f"{np.count_nonzero(parted)} of {gaps.size} numbers differ, at most by {largest:.3g}"

    def _numbers(self) -> np.ndarray:
        if self.kind == "BF16":  # the upper half of a float32
            halves = np.frombuffer(self.content, np.uint16).astype(np.uint32) << 16
            return halves.view(np.float32).astype(np.float64)
        return np.frombuffer(self.content, KINDS.get(self.kind, np.uint8)).astype(np.float64)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a safetensors file, and the plain values beside them."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    facts = header.pop("__metadata__", {})  # the plain values: an entry of old files, now beside the checksum
    plain = json.loads(json.loads(facts["payload"])[1] if "payload" in facts else facts.get("plain", "null"))
    body = memoryview(content)[8 + size :]
    tensors = {
        name: Tensor(entry["dtype"], tuple(entry["shape"]), bytes(body[slice(*entry["data_offsets"])]))
        for name, entry in header.items()
    }
    return tensors, plain


def differences(old: Path, new: Path, aside: Collection[str] = ()) -> Iterator[str]:
    """All in which two finished runs differ, a line each; `aside` are further entries of events to leave out."""
    yield from _files(_tensor_files(old), _tensor_files(new))
    for name in sorted(_checkpoints(old) & _checkpoints(new)):
        was, now = (_manifest(folder, name) for folder in (old, new))
        yield from differing(was, now, f"{name}/manifest.json")
    yield from differing(results(old, aside), results(new, aside), "events.jsonl")


def count(folder: Path) -> int:
    """How many tensors a run left."""
    return sum(len(read_tensors(path)[0]) for path in _tensor_files(folder).values())


def _files(old: Mapping[str, Path], new: Mapping[str, Path]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            yield f"{name}: only the {'old' if name in old else 'new'} run has it"
            continue
        (before, plain_before), (after, plain_after) = read_tensors(old[name]), read_tensors(new[name])
        if scores := name.endswith("scores.safetensors"):  # further predictions of single images change no score
            after = {tensor: value for tensor, value in after.items() if tensor in before}
        for tensor in sorted(before.keys() | after.keys()):
            if tensor not in before or tensor not in after:
                yield f"{name}: only the {'old' if tensor in before else 'new'} run has {tensor}"
            elif how := before[tensor].differs(after[tensor]):
                yield f"{name}: {tensor}: {how}"
        if not scores:  # theirs tell whose predictions they are
            yield from differing(plain_before, plain_after, f"{name} (plain values)")


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The files with tensors, by their place in the folder."""
    places = ("checkpoints", "sites", "models", "pilot")
    paths = (path for place in places for path in sorted((folder / place).rglob("*.safetensors")))
    return {str(path.relative_to(folder)): path for path in paths}


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").glob("round-*")}


def _manifest(folder: Path, name: str) -> dict[str, Any]:
    """What a checkpoint says, without the time, the log, which holds times, and the checksums of both."""
    found = json.loads((folder / "checkpoints" / name / "manifest.json").read_bytes())
    return {key: value for key, value in found.items() if key not in UNSTEADY | {"events", "log", "checksum"}}


def results(folder: Path, aside: Collection[str] = ()) -> list[Any]:
    """The events of a run that tell results."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = (json.loads(line) for line in lines)
    return [_without(event, UNSTEADY.union(aside)) for event in events if event["event"] in RESULTS]


def _without(value: Any, names: Collection[str]) -> Any:
    """A nested value without the entries of these names."""
    if isinstance(value, dict):
        return {key: _without(entry, names) for key, entry in value.items() if key not in names}
    if isinstance(value, list):
        return [_without(entry, names) for entry in value]
    return value


def differing(old: Any, new: Any, where: str) -> Iterator[str]:
    """In which entries two nested values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from differing(old.get(key, "nothing"), new.get(key, "nothing"), f"{where}: {key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new)):
            yield from differing(before, after, f"{where}: {number + 1}")
    elif json.dumps(old) != json.dumps(new):  # 0.0 and -0.0 are equal numbers
        yield f"{where}: {_short(old)} has become {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."
