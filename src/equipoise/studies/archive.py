"""A study's logs in one small file: `runs.xz` holds all that pages and tables are made from.

Results at the end of a run keep their logged values. Scores of single rounds that follow from a confusion matrix are
left out and computed anew; other scores and times of rounds keep five decimals. `runs.sha256` identifies the logs as
the runs wrote them.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equipoise.cells import dense
from equipoise.core.storage import write_text
from equipoise.mask_metrics import MASK_METRICS
from equipoise.metrics import METRICS, from_confusion

ARCHIVE, HASHES, LOG = "runs.xz", "runs.sha256", "events.jsonl"
#: what is kept of a run
FILES = ("config.toml", LOG, "study.json")
#: scores that do not follow from a confusion matrix
KEPT = tuple(metric.name for metric in METRICS if metric.needs != "confusion")
DIGITS = 6


def pack(study: Path) -> None:
    """Write a study's `runs.xz` from its folder `runs`."""
    logs = sorted((study / "runs").rglob(LOG))
    files = [path for log in logs for name in FILES if (path := log.with_name(name)).is_file()]
    content = {path.relative_to(study / "runs").as_posix(): path.read_text(encoding="utf-8") for path in files}
    lines = [
        json.dumps([name, [_shortened(json.loads(line)) for line in text.splitlines()] if _is_log(name) else text])
        for name, text in content.items()
    ]
    packed = lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME)
    (study / ARCHIVE).write_bytes(packed)
    hashes = (f"{hashlib.sha256(text.encode()).hexdigest()}  {name}" for name, text in content.items() if _is_log(name))
    write_text(study / HASHES, "\n".join(hashes) + "\n")


def unpack(study: Path) -> Path:
    """A study's folder `runs`, made from `runs.xz` where only that is there."""
    folder = study / "runs"
    if not folder.exists() and (study / ARCHIVE).exists():
        draft = Path(tempfile.mkdtemp(dir=study, prefix=".runs-"))
        for line in lzma.decompress((study / ARCHIVE).read_bytes()).decode().splitlines():
            name, content = json.loads(line)
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else "".join(_lines(content))
            path.write_text(text, encoding="utf-8")
        try:
            os.rename(draft, folder)
        except OSError:  # another process was first
            shutil.rmtree(draft)
    return folder


def _is_log(name: str) -> bool:
    return Path(name).name == LOG


def _lines(events: list[dict[str, Any]]) -> Iterator[str]:
    yield from (json.dumps(_restored(event)) + "\n" for event in events)


def _shortened(event: dict[str, Any]) -> dict[str, Any]:
    if event["event"] == "evaluation":
        names = event["metrics"] if _of_masks(event) else KEPT
        scores = {name: _rounded(event["metrics"][name]) for name in names if name in event["metrics"]}
        return {key: value for key, value in event.items() if key != "recall"} | {"metrics": scores}
    if event["event"] == "round":
        sites = {site: {key: _rounded(value) for key, value in facts.items()} for site, facts in event["sites"].items()}
        return event | {"seconds": _rounded(event["seconds"]), "sites": sites}
    return event


def _restored(event: dict[str, Any]) -> dict[str, Any]:
    if event["event"] != "evaluation":
        return event
    found = from_confusion(dense(event["confusion"]))
    known = {} if _of_masks(event) else {name: _number(value) for name, value in found.items() if name != "recall"}
    return event | {"metrics": known | event["metrics"], "recall": [_number(value) for value in found["recall"]]}


def _of_masks(event: dict[str, Any]) -> bool:
    """Whether scores are of masks, which do not follow from a confusion matrix."""
    return MASK_METRICS[0].name in event["metrics"]


def _number(value: float) -> float | None:
    return None if value != value else value


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
