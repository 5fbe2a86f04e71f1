"""Local learning in closed form: each site whitens its features and solves for a classifier; nothing leaves it.

The bar that the exchange of `closed` has to pass.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from equipoise.closed_form import Head, principal
from equipoise.components._closed_form import ENTRIES, gridded, moments_by, sums_by, unpacked, wide
from equipoise.contract.method import Method
from equipoise.contract.protocol import Action, Payload, Scan
from equipoise.methods.closed import DEFAULTS, ClosedClient
from equipoise.methods.closed import Options as ClosedOptions
from equipoise.methods.local import LocalServer


class Options(ClosedOptions):
    """The closed form of a site's own images; options of the exchange do nothing."""

    exchanges: ClassVar[bool] = False

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        idle = dict.fromkeys(("others", "epsilon", "delta", "basis"), "nothing leaves a site")
        return super().without_effect(setting) | idle


class ClosedLocalClient(ClosedClient):
    """Keeps its whitening and its sums."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {"train": {}}
    views: ClassVar[tuple[str, ...]] = ("personal",)

    def build_exchange(self) -> None:
        """Nothing is sent or received."""
        self.noise = 0.0

    def _framed(self, name: str, first: Tensor) -> Tensor:
        found: Tensor = self.keeps(name, first)
        return found

    def train(self, message: Payload) -> Action:
        everything = torch.ones_like(self.class_counts, dtype=torch.bool)
        raw = yield Scan("train", moments_by(self.raw_features, everything))
        number = float(raw["number"])
        most = self.options.most_components(number, 1, len(self.mean))
        mean, whitening = principal(unpacked(raw["gram"]), raw["sums"], number, most)
        self.mean.copy_(mean)
        self.whitening.copy_(wide(whitening, self.most))
        self.components.fill_(whitening.shape[1])
        found = gridded((yield Scan("train", sums_by(self.features, everything, self.num_classes))))
        for name in ENTRIES:
            self.own[name].copy_(found[f"own {name}"])
        self.personal = self.personal_head()
        return {}

    def personal_head(self) -> Head:
        return self.options.head(self._own())


METHOD = Method(
    server=LocalServer,
    client=ClosedLocalClient,
    paper="no paper: linear discriminant analysis of each site alone",
    year=0,
    changes="classifier in closed form on a body that is not trained, no communication",
    options=Options,
    defaults=DEFAULTS,
)
