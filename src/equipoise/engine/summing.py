"""Secure sums as every engine sees them: a site's reply and measurements as one vector, and the sum as one reply.

In the simulation this machine adds the plain vectors. Between hospitals each vector travels under masks that
cancel in the sum (`equipoise.hospitals.pairwise_masks`). Both add the same integers, and so give the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from equipoise.contract.method import Client, Setting
from equipoise.contract.protocol import Payload, Tensors, Value, flatten
from equipoise.contract.summed import terms_of, whole_of
from equipoise.engine.slot import EVALUATE, Request
from equipoise.sums import Term, TooLarge, decoded, encoded, layout_of, layout_text, read_layout, term

#: the name of the scores of all sites together
ALL_SITES = "all sites"
#: the columns of measured counts
MEASURED = "measured "
#: counts that do not add up over sites, and what stands for them
ALONE = {"auc": -1.0}
#: and those that do not leave a site under privacy.epsilon
PRIVATE = {"loss": float("nan")}


class Summer:
    """Turns replies into vectors and sums into replies, under one method and config."""

    def __init__(self, setting: Setting, client: type[Client]):
        self.setting = setting
        self.sheet = client.discloses
        self.weighting = setting.config.train.aggregation
        self.alone = ALONE if setting.config.privacy.epsilon is None else ALONE | PRIVATE
        self.zeros = {name: torch.zeros_like(count) for name, count in setting.task.template.items()}

    def part(
        self,
        action: str,
        payload: Mapping[str, Value],
        measures: Mapping[str, Tensors],
        measured: Collection[str],
        sites: int,
    ) -> tuple[str, Tensor]:
        """What a site adds: the columns in words, and the vector. Where it has no images, its counts are zeros.

        Args:
            measured: what all sites together measure, as `view.part`
            sites: how many sites are added up

        Raises:
            TooLarge: where fixed-point numbers cannot hold the reply
        """
        terms: dict[str, Term] = terms_of(payload, self.sheet.get(action, {}), self.weighting)
        for place in measured:
            counts = measures.get(place, self.zeros)
            for name in self.zeros.keys() - self.alone.keys():
                terms[f"{MEASURED}{place}/{name}"] = term(counts[name])
        return layout_text(layout_of(terms)), encoded(terms, sites)

    def check(self, payload: Mapping[str, Value], message: Mapping[str, Value]) -> None:
        """Each site checks its own update: the server sees no single one.

        Raises:
            TooLarge: where it is far longer than the weights that were sent
        """
        bound, own = self.setting.config.privacy.update_bound, flatten(payload)[0]
        zeros = {name: torch.zeros_like(tensor) for name, tensor in flatten(message)[0].items() if name in own}
        sent = length_of_update(message, zeros)
        if sent and not length_of_update(payload, message) <= bound * sent:
            raise TooLarge(f"its update is longer than privacy.update_bound = {bound:g} times the weights it received")

    def whole(self, action: str, words: str, total: Tensor, sites: int) -> tuple[Payload, dict[str, Tensors]]:
        """The sum over sites as one reply, and the counts of all of them together."""
        layout = read_layout(words)
        measures: dict[str, Tensors] = {}
        sums = decoded(total, layout)
        for column in layout:
            if column.name.startswith(MEASURED):
                place, _, name = column.name.removeprefix(MEASURED).rpartition("/")
                value = column.value(sums[column.name])
                assert isinstance(value, Tensor)
                unknown = {n: torch.full_like(self.zeros[n], v) for n, v in self.alone.items() if n in self.zeros}
                measures.setdefault(place, unknown)[name] = value
        if action == EVALUATE:
            return {}, measures
        entries, device = self.sheet.get(action, {}), self.setting.device
        return whole_of(sums, layout, entries, self.weighting, sites, device), measures


def length_of_update(payload: Mapping[str, Value], message: Mapping[str, Value]) -> float:
    """How far a site has moved the weights that it was sent, as a Euclidean length; counts and sums do not matter."""
    tensors, sent = flatten(payload)[0], flatten(message)[0]
    moved = [t.double() - sent[name].double() for name, t in tensors.items() if name in sent and t.is_floating_point()]
    return float(sum(change.square().sum() for change in moved)) ** 0.5


def together(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests whose measurements are added up: those on each site's own images, and those on each common place."""
    found: dict[str, list[Request]] = {}
    for request in requests:
        found.setdefault(request.data, []).append(request)
    return [*found.values()]


def measured_by(requests: Sequence[Request]) -> set[str]:
    """What some requests measure, as `view.part`."""
    return {f"{view}.{part}" for request in requests for view in request.views for part in request.measure}


def numbers_in(value: Value) -> int:
    """The numbers of an entry of a reply."""
    return sum(tensor.numel() for tensor in flatten({"": value})[0].values()) or 1
