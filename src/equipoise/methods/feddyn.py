"""FedDyn: each site's loss gets a linear and a quadratic term that change from round to round, so that where local
training rests is where the global loss does; the server corrects the mean by what the sites have drifted so far.

Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field

from equipoise.components._drift import AnchoredClient, RosterClient, RosterServer, beside
from equipoise.components._merging import average
from equipoise.contract.config import Table
from equipoise.contract.method import Method
from equipoise.contract.protocol import Action, Ask, Conversation, Payload


class Options(Table):
    """FedDyn's one number; its paper tunes it among 0.001, 0.01 and 0.1."""

    alpha: float = Field(
        0.01, ge=0, description="weight of the dynamic terms (FedBM: 0.01); 0: without them and the correction, FedAvg"
    )


class FedDynServer(RosterServer):
    """Keeps h / alpha (`correction`), the mean of what all sites keep, and takes it off the mean of their models.

    The means are by train.aggregation ("uniform": as in the paper).
    """

    def setup(self) -> None:
        super().setup()
        if self.options.alpha:
            self.state.correction = dict(beside(self.new_net()).named_buffers())

    def start(self, roster: Sequence[str]) -> Conversation:
        if self.options.alpha:
            yield from super().start(roster)

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        state = self.state
        updates = yield Ask("train", sites, model=state.model)
        mean = average(updates, "model", self.setting.config.train.aggregation)
        if self.options.alpha:
            share = self.participation(updates)
            state.correction = {
                name: old.sub(mean[name] - state.model[name], alpha=share) for name, old in state.correction.items()
            }
            mean |= {name: mean[name] - correction for name, correction in state.correction.items()}
        state.model = mean


class FedDynClient(AnchoredClient, RosterClient):
    """Keeps its linear term, over alpha, as an `offset` of the anchor.

    loss - <g, w> + alpha/2 |w - w_global|^2 is, but for a constant, loss + alpha/2 |w - w_global - g/alpha|^2.
    """

    @property
    def pull(self) -> float:
        return self.options.alpha

    def build(self) -> None:
        super().build()
        if self.pull:
            self.offset = beside(self.net)
            self.keeps("offset", self.offset)

    def set_anchor(self) -> None:
        super().set_anchor()
        torch._foreach_add_(list(self.anchor.buffers()), list(self.offset.buffers()))

    def train(self, message: Payload) -> Action:
        """Train; then g <- g - alpha (w - w_global), which is alpha times anchor - w."""
        update = yield from super().train(message)
        if self.pull:
            torch._foreach_copy_(list(self.offset.buffers()), torch._foreach_neg(self.drift()))
        return update


METHOD = Method(
    server=FedDynServer,
    client=FedDynClient,
    paper="Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021",
    year=2021,
    changes="loss (dynamic terms), server step",
    options=Options,
)
