"""SCAFFOLD: control variates, one at each site and one on the server, estimate where each site and where all of them
go; local steps are corrected by the difference.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from equipoise.components._drift import RosterClient, RosterServer, added, beside
from equipoise.components._merging import average, step_towards
from equipoise.contract.config import Table
from equipoise.contract.method import Method
from equipoise.contract.protocol import Action, Ask, Conversation, Payload
from equipoise.nets import groups


class Options(Table):
    """SCAFFOLD's global step. The local one, eta_l, is train.optimiser.lr."""

    server_lr: PositiveFloat = Field(1.0, description="eta_g: how far the global model goes to the sites' mean")


class ScaffoldServer(RosterServer):
    """Keeps the common variate c, the mean of the sites' own by train.aggregation, those not in the round included."""

    def setup(self) -> None:
        super().setup()
        net = self.new_net()
        self.statistics = frozenset(groups(net)["statistics"])
        self.state.variate = dict(beside(net).named_buffers())

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        state, weighting = self.state, self.setting.config.train.aggregation
        updates = yield Ask("train", sites, model=state.model, variate=state.variate)
        mean = average(updates, "model", weighting)
        change = average(updates, "variate_change", weighting)
        share = self.participation(updates)
        state.model = step_towards(state.model, mean, self.options.server_lr, self.statistics)
        state.variate = {name: old.add(change[name], alpha=share) for name, old in state.variate.items()}


class ScaffoldClient(RosterClient):
    """Keeps its own variate c_i: the mean gradient of its last training.

    That is the paper's option II, c_i - c + (x - y) / (K eta), for what plain descent has moved by: K steps of
    eta (g - c_i + c). Taken from the gradients themselves it also holds under momentum, Adam and any schedule.
    """

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        **RosterClient.discloses,
        "train": {
            **RosterClient.discloses["train"],
            "variate_change": (
                "how the site's mean gradient differs from that of its training before; in its first round that is "
                "the mean gradient itself, and at a site with one image that image's gradient, from which the image "
                "can be rebuilt"
            ),
        },
    }

    def build(self) -> None:
        super().build()
        self.own = beside(self.net)
        self.keeps("own_variate", self.own)
        self.correction = beside(self.net)  # received as c, then c - c_i
        self.receives("variate", self.correction)
        self.gradient_sums = beside(self.net)  # and at the end of training the change of c_i
        self.scratch("gradient_sums", self.gradient_sums)
        self.steps = self.scratch("steps", torch.zeros(()))

    def train(self, message: Payload) -> Action:
        own, sums = list(self.own.buffers()), list(self.gradient_sums.buffers())
        torch._foreach_sub_(list(self.correction.buffers()), own)
        torch._foreach_zero_(sums)
        update = yield from super().train(message)
        torch._foreach_div_(sums, self.steps)
        torch._foreach_sub_(sums, own)
        torch._foreach_add_(own, sums)
        return update | {"variate_change": self.share(self.gradient_sums)}

    def adjust(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """g - c_i + c, as in Algorithm 1; and g goes into the next c_i."""
        pairs = [(total, g) for total, g in zip(self.gradient_sums.buffers(), gradients) if g is not None]
        torch._foreach_add_([total for total, _ in pairs], [g for _, g in pairs])
        return added(gradients, list(self.correction.buffers()))

    def after_step(self) -> None:
        super().after_step()
        self.steps.add_(1)


METHOD = Method(
    server=ScaffoldServer,
    client=ScaffoldClient,
    paper="Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
    year=2020,
    changes="local step (control variates), server step",
    options=Options,
)
