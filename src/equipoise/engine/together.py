"""Small sites measured together: one batch holds the images of several sites, where all have the same model.

A net in eval mode gives an image the same logits to the bit in any batch of two or more. Matrices of one row use
different kernels. So a part of one image keeps a batch to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from equipoise.contract.protocol import Tensors, Value
from equipoise.data.federation import Site
from equipoise.engine.slot import EVALUATE, Outcome, Request, Slot
from equipoise.engine.training import Part, SiteData, observed


def groups(
    requests: Sequence[Request], alike: Callable[[Request], bool], site: Callable[[str], Site], most: int
) -> list[list[int]]:
    """The places of requests that may be performed together; a request that may not is alone in its group.

    Groups follow from the federation alone, so that any number of workers computes the same.

    Args:
        alike: whether a request's site predicts with nothing but the message
        most: images of one part in a group
    """
    found: list[list[int]] = []
    filling: dict[Request, tuple[list[int], Counter[str]]] = {}
    for place, request in enumerate(requests):
        if request.action != EVALUATE or request.views != ("global",) or request.data or not alike(request):
            found.append([place])
            continue
        sizes = Counter({part: len(site(request.site).splits.get(part, ())) for part in request.measure})
        kind = replace(request, site="")
        members, images = filling.get(kind, ([], Counter()))
        if not members or max((images + sizes).values(), default=0) > most:
            members, images = [], Counter()
            found.append(members)
        members.append(place)
        filling[kind] = members, images + sizes
    return found


class _Joined:
    """Parts of several sites, read as one."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = parts
        self.device = parts[0].device

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets at positions (b,), which are in order."""
        starts = [0, *accumulate(map(len, self.parts))]
        bounds = torch.searchsorted(positions, torch.tensor(starts)).tolist()
        read = [
            part.read(positions[low:high] - start)
            for part, start, (low, high) in zip(self.parts, starts, pairwise(bounds))
            if low < high
        ]
        images, targets = zip(*read)
        return torch.cat(images), torch.cat(targets)


def perform_together(
    slot: Slot, requests: Sequence[Request], message: Mapping[str, Value], sites: Sequence[SiteData]
) -> Generator[None, None, list[Outcome]]:
    """Perform the several requests of one group; outcomes in their order."""
    outcomes = []
    seen = _seen_by_all(slot, requests[0], message, sites)
    for place, (request, data) in enumerate(zip(requests, sites)):
        if seen is None:
            outcomes.append((yield from slot.perform(request, message, None, data)))
            continue
        measures = {
            f"global.{part}": slot.counted(request, "global", part, by_site[place], data[part].split)
            for part, by_site in seen.items()
            if place in by_site
        }
        outcomes.append(Outcome(measures=measures, facts={"seconds": 0.0}))
    return outcomes


def _seen_by_all(
    slot: Slot, request: Request, message: Mapping[str, Value], sites: Sequence[SiteData]
) -> dict[str, dict[int, Tensors]] | None:
    """What the task keeps of the global model, by part and by the site's place.

    None where they are not finite: the model has diverged, or it predicts with what is a site's own.
    """
    client = slot.client
    client.workplace.begin(message, None)
    client.workplace.site, client.workplace.round = request.site, request.round
    client.class_counts.fill_(float("nan"))
    try:
        found = {part: _seen(slot, part, sites) for part in request.measure}
    finally:
        client.workplace.end()
    tensors = (rows for by_site in found.values() for own in by_site.values() for rows in own.values())
    sound = all(bool(rows.isfinite().all()) for rows in tensors)
    return found if sound else None


def _seen(slot: Slot, part: str, sites: Sequence[SiteData]) -> dict[int, Tensors]:
    holders = {place: data[part] for place, data in enumerate(sites) if data.has(part)}
    several = {place: held for place, held in holders.items() if len(held) > 1}
    found = {
        place: observed(slot.client, held, slot.augmentation, "global")
        for place, held in holders.items()
        if place not in several
    }
    if several:
        seen = observed(slot.client, _Joined([*several.values()]), slot.augmentation, "global")
        sizes = [*map(len, several.values())]
        pieces = {name: rows.split(sizes) for name, rows in seen.items()}
        found |= {place: {name: pieces[name][i] for name in pieces} for i, place in enumerate(several)}
    return found
