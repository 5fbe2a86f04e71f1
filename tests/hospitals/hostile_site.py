"""`equipoise site` gone bad, as a process: garbage bytes in round 1, NaN in round 2, honest afterwards."""

import sys

import torch

from equipoise.cli import app as cli
from equipoise.hospitals import office, site

perform, to_records = office.Office._perform, site.to_records
state = {"garble": False}


def lie(self, work, records, header, message):
    """Train honestly, then spoil what leaves."""
    reply = perform(self, work, records, header, message)
    state["garble"] = header["action"] == "train" and header["round"] == 1
    if header["action"] == "train" and header["round"] == 2:
        payload, _ = office.open_parcel(reply, self._held)
        next(t for t in payload["model"].values() if t.is_floating_point()).fill_(torch.nan)
        told = {name: reply.header[name] for name in ("identity", "kept", "measures", "facts")}
        return office.seal(office.prepare(payload), **told)
    return reply


def garbled(parcel):
    """Bytes that are no numbers."""
    records = to_records(parcel)
    if state["garble"]:
        for array in records.array_records["tensors"].values():
            array.data = b"garbage"
    return records


if __name__ == "__main__":
    office.Office._perform, site.to_records = lie, garbled
    sys.argv[0:1] = ["equipoise", "site"]
    cli.main()
