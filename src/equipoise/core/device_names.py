"""Lists of devices, as `cuda:0,cuda:1` or `cpu:4` name them: one process for each."""

from __future__ import annotations

import re

from equipoise.core.errors import UserError


def devices_of(text: str) -> list[str]:
    """The devices that a list names, one for each process.

    >>> devices_of("cuda:0,cuda:1"), devices_of("cpu:3")
    (['cuda:0', 'cuda:1'], ['cpu', 'cpu', 'cpu'])
    """
    found: list[str] = []
    for part in map(str.strip, text.split(",")):
        if not re.fullmatch(r"cpu(:[1-9]\d*)?|cuda(:\d+)?", part):
            raise UserError(f"{text!r} is no list of devices such as cuda:0,cuda:1, or cpu:4 for four processes")
        name, _, number = part.partition(":")
        found += ["cpu"] * int(number or 1) if name == "cpu" else [part]
    return found


def places_of_run(device: str) -> list[str]:
    """The devices that a run's sites are spread over: `compute.device` names several, or one."""
    several = "," in device or device.startswith("cpu:")
    found = devices_of(device) if several else [device]
    if len({kind_of(place) for place in found}) > 1:
        raise UserError(
            f"compute.device = {device!r} mixes kinds of devices, so scores would depend on where a site trains; "
            "name devices of one kind"
        )
    return found


def kind_of(device: str) -> str:
    """The kind of a device, without its number: results do not depend on the number."""
    return device.partition(":")[0]


def decisive_part(device: str) -> str:
    """The part of `compute.device` that decides a run's bits: the kind of several devices, or the name of one."""
    places = places_of_run(device)
    return kind_of(places[0]) if len(places) > 1 else places[0]
