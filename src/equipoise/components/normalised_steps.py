"""What a site sends counts by the step, so that sites with more local steps do not pull harder (FedNova)."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch

from equipoise.components._merging import average_by, site_weights
from equipoise.contract.component import Component, ServerSide, Sheet, SiteSide
from equipoise.contract.disclosed import Entry
from equipoise.contract.protocol import Payload, Replies, Tensors, Work
from equipoise.nets import groups


class NormalisedStepsServer(ServerSide):
    """w - tau sum_k p_k (w - w_k) / |a_k|, with tau = sum_k p_k |a_k| (the paper's equation 6)."""

    def setup(self) -> None:
        self.statistics = frozenset(groups(self.server.new_net())["statistics"])

    def merge(self, updates: Replies, number: int) -> Tensors:
        shares = site_weights(updates, self.weighting)
        lengths = self.values(updates, "steps").values("steps")
        if len(set(lengths)) == 1:
            return average_by(shares, updates)  # FedAvg, to the last bit
        shares = [share / sum(shares) for share in shares]
        common = sum(share * length for share, length in zip(shares, lengths))
        scaled = [share * common / length for share, length in zip(shares, lengths)]
        old, mean, rate = self.server.state.model, average_by(scaled, updates), sum(scaled)
        plain = average_by(shares, updates)
        return {
            name: plain[name]
            if name in self.statistics or not value.is_floating_point()
            else torch.lerp(old[name], value, rate)
            for name, value in mean.items()
        }


class NormalisedStepsSite(SiteSide):
    """Counts its steps; under momentum a step counts by how far it carries the gradients before it."""

    def build(self) -> None:
        self.taken = self.scratch("taken", torch.zeros(()))

    def after_step(self) -> None:
        self.taken.add_(1)

    def reply(self) -> Generator[Work, Any, Payload]:
        yield from ()
        return {"steps": self.length(max(float(self.taken), 1.0))}

    def length(self, steps: float) -> float:
        """|a_k|, the sum of the factors that local training gives to its gradients."""
        optimiser = self.setting.config.train.optimiser
        momentum = optimiser.momentum if optimiser.name == "sgd" else 0.0
        if not momentum or optimiser.keep:
            return steps
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class NormalisedSteps(Component):
    """Normalised averaging. Steps of Adam count alike, for which the paper has no formula."""

    name: ClassVar[str] = "normalised-steps"
    paper: ClassVar[str] = "Wang et al., FedNova, NeurIPS 2020"
    rank: ClassVar[int] = 54
    Site: ClassVar[type[SiteSide]] = NormalisedStepsSite
    Server: ClassVar[type[ServerSide]] = NormalisedStepsServer

    def holds(self) -> AbstractSet[str]:
        return {"merge"}

    def needs(self) -> AbstractSet[str]:
        return {"model", "one model", "sites", "one training ask"}

    def discloses(self) -> Sheet:
        return {"train": {"steps": Entry("number of local steps, each weighed by its momentum", "steps")}}


COMPONENT = NormalisedSteps
