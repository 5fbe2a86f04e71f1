"""A site's record of its messages, a line each: what came in, what left, what was refused and why.

It holds names and sizes, never contents. It lies in the site's folder, for the person who is responsible for the
hospital's data.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.hospitals.parcels import Parcel, UnreadableParcel

LEDGER = "messages.jsonl"


class Ledger:
    """Appends to the record; `folder` is the site's state folder."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LEDGER
        self.path.touch()

    def note(self, question: Parcel, reply: Parcel) -> None:
        """Record a message and what became of it; a disk that is full must not end the conversation."""
        asked, answered = _header(question), _header(reply)
        common = {"run": asked.get("run", ""), "round": asked.get("round", ""), "action": asked.get("action", "")}
        came = {"way": "in", **common, "entries": _entries(asked), "bytes": question.size}
        why = answered.get("error") or ""
        left = {"way": "refused" if why else "out", **common, "entries": _entries(answered), "bytes": reply.size}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        lines = [{"time": now, **came}, {"time": now, **left} | ({"why": str(why)} if why else {})]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            return


def _header(parcel: Parcel) -> Mapping[str, Any]:
    try:
        return parcel.header
    except UnreadableParcel:
        return {}


def _entries(header: Mapping[str, Any]) -> list[str]:
    """The entries of a payload by their first names, and what else it tells: counts, facts."""
    entries, plain = header.get("entries"), header.get("plain")
    names = [str(name).partition("/")[0] for table in (entries, plain) if isinstance(table, dict) for name in table]
    also = [key for key in ("measures", "facts", "description") if header.get(key)]
    return [*dict.fromkeys([*names, *also])]
