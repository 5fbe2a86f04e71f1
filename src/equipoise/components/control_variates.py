"""Control variates, one at each site and one on the server, correct local steps by where all sites go (SCAFFOLD)."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch

from equipoise.components._drift import COUNT_DISCLOSURE, RosterServer, RosterSite, added, beside
from equipoise.components._merging import average
from equipoise.contract.component import Component, Gradients, Message, ServerSide, Sheet, SiteSide
from equipoise.contract.modules import share
from equipoise.contract.protocol import Payload, Replies, Tensors, Work
from equipoise.contract.summed import averaged


class ControlVariatesServer(RosterServer):
    """Keeps the common variate c, the mean of the sites' own by train.aggregation, those not in the round included."""

    def setup(self) -> None:
        self.state.variate = dict(beside(self.server.new_net()).named_buffers())

    def message(self, number: int) -> Message:
        return {"variate": self.state.variate}

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        change = average(updates, "variate_change", self.weighting)
        share = self.participation(updates)
        self.state.variate = {name: old.add(change[name], alpha=share) for name, old in self.state.variate.items()}
        return model


class ControlVariatesSite(RosterSite):
    """Keeps the site's variate c_i: the mean gradient of its last training.

    That is the paper's option II, c_i - c + (x - y) / (K eta), for what plain descent has moved by: K steps of
    eta (g - c_i + c). Taken from the gradients themselves it also holds under momentum, Adam and any schedule.
    """

    def build(self) -> None:
        net = self.client.net
        self.own = beside(net)
        self.keeps("own_variate", self.own)
        self.correction = beside(net)  # received as c, then c - c_i
        self.receives("variate", self.correction)
        self.gradient_sums = beside(net)  # and at the end of training the change of c_i
        self.scratch("gradient_sums", self.gradient_sums)
        self.steps = self.scratch("steps", torch.zeros(()))

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        torch._foreach_sub_(list(self.correction.buffers()), list(self.own.buffers()))
        torch._foreach_zero_(list(self.gradient_sums.buffers()))
        yield from ()

    def reply(self) -> Generator[Work, Any, Payload]:
        own, sums = list(self.own.buffers()), list(self.gradient_sums.buffers())
        torch._foreach_div_(sums, self.steps)
        torch._foreach_sub_(sums, own)
        torch._foreach_add_(own, sums)
        yield from ()
        return {"variate_change": share(self.gradient_sums)}

    def adjust(self, gradients: Gradients) -> Gradients:
        """g - c_i + c, as in Algorithm 1; and g goes into the next c_i."""
        parameters = list(self.client.net.parameters())
        pairs = [(t, gradients[p]) for t, p in zip(self.gradient_sums.buffers(), parameters) if p in gradients]
        torch._foreach_add_([total for total, _ in pairs], [gradient for _, gradient in pairs])
        return added(gradients, parameters, list(self.correction.buffers()))

    def after_step(self) -> None:
        self.steps.add_(1)


class ControlVariates(Component):
    """Control variates."""

    name: ClassVar[str] = "control-variates"
    paper: ClassVar[str] = "Karimireddy et al., SCAFFOLD, ICML 2020"
    rank: ClassVar[int] = 72
    image_by_image: ClassVar[bool] = True
    Site: ClassVar[type[SiteSide]] = ControlVariatesSite
    Server: ClassVar[type[ServerSide]] = ControlVariatesServer

    def needs(self) -> AbstractSet[str]:
        return {"model", "net trains", "one loss", "one training ask", "sites"}

    def discloses(self) -> Sheet:
        return {
            **COUNT_DISCLOSURE,
            "train": {
                "variate_change": averaged(
                    "change of the site's mean gradient since its last training; in its first round, the mean "
                    "gradient itself. With one image it is that image's gradient, which can reveal the image"
                ),
            },
        }


COMPONENT = ControlVariates
