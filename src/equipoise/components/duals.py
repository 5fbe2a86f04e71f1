"""A dual variable for each site, which grows while its loss exceeds the mean, sets how much the site counts (CLIMB).

No site's loss may exceed the mean loss by more than epsilon.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt

from equipoise.components._merging import average_by, site_weights, step_towards
from equipoise.contract.component import Batch, Component, Options, ServerSide, Sheet, SiteSide
from equipoise.contract.disclosed import Entry
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, Replies, Scan, Tensors
from equipoise.core.table import LATER
from equipoise.nets import groups


class DualsServer(ServerSide):
    """Alternates: a dual step by the losses of the present model at all sites, then rounds under the new weights.

    The dual step comes first and counts at once: a site that the model serves badly now weighs more now. The released
    code takes the same losses but runs the rounds that follow under the weights from before, one dual step behind.
    All means over sites are by train.aggregation ("uniform": as in the paper).
    """

    def setup(self) -> None:
        self.statistics = frozenset(groups(self.server.new_net())["statistics"])

    def start(self, roster: Sequence[str]) -> Conversation:
        self.state.duals = {site: torch.zeros((), dtype=torch.float64) for site in roster}
        self.state.shares = {}  # what each site weighs in FedAvg, as it last told
        yield from ()

    def survey(self, number: int, sites: Sequence[str]) -> Generator[Ask, Replies, Sequence[str]]:
        if self.options.eta_d and (number - 1) % self.options.primal_rounds == 0:
            everybody = list(self.state.duals)
            message = self.server.received(everybody) | self.server.joining(number, "loss")
            self.ascend((yield self.ask("measure", everybody, **message)))
        return sites

    def ascend(self, measured: Replies) -> None:
        """lambda_i <- max(lambda_i + eta_d / N (f_i - mean f - epsilon), 0), at all sites that can be reached.

        As released, no dual variable grows beyond a cap.
        """
        duals, shares = dict(self.state.duals), dict(self.state.shares)
        losses = [reply["loss"] / reply["examples"] for reply in measured]
        own = site_weights(measured, self.weighting)
        rate, limit = self.options.eta_d / len(duals), mean(losses, own) + self.options.epsilon
        for site, loss, share in zip(measured.sites, losses, own):
            duals[site] = (duals[site] + rate * (loss - limit)).clamp(min=0, max=self.options.cap)
            shares[site] = torch.tensor(share, dtype=torch.float64)
        self.state.duals, self.state.shares = duals, shares
        for site, dual in duals.items():
            self.note("dual", dual, site)

    def merge(self, updates: Replies, number: int) -> Tensors:
        """x <- x + mean over the round's sites of w_i (x_i - x), where w_i = 1 + lambda_i - mean lambda.

        The mean of lambda is over all sites, and a round's weights need not add up to 1. So a round of sites with high
        losses takes a longer step. Statistics take the weighted mean.
        """
        model: Tensors = self.server.state.model
        weights, own = self.weights(updates.sites), site_weights(updates, self.weighting)
        length = mean(weights, own)
        if length <= 0:
            return model
        towards = average_by([weight * share for weight, share in zip(weights, own)], updates)
        return step_towards(model, towards, length, self.statistics)

    def weights(self, sites: Sequence[str]) -> list[float]:
        """1 + lambda_i - mean lambda. Below 0 the Lagrangian would train against a site; here its weight stops at 0."""
        duals, shares = self.state.duals, self.state.shares
        counted = sorted(shares)  # in one order, also after a resume
        middle = mean([float(duals[site]) for site in counted], [float(shares[site]) for site in counted])
        return [max(1 + float(duals[site]) - middle, 0.0) for site in sites]


def mean(values: Sequence[float], shares: Sequence[float]) -> float:
    """Mean of a number per site, by the sites' shares; of none, 0."""
    return sum(share * value for share, value in zip(shares, values)) / (sum(shares) or 1.0)


class DualsSite(SiteSide):
    """Tells, when asked, how well the received model serves it."""

    def measure(self, message: Payload) -> Action:
        """The received model's loss here: one pass over the images, without training."""
        yield from self.client.prepare_loss()
        sums = yield Scan("train", self.summed_loss)
        return {"loss": float(sums["loss"]), "examples": self.client.workplace.examples}

    def summed_loss(self, batch: Batch) -> Tensors:
        """The supervised loss of a batch, summed over its images."""
        return {"loss": self.client.supervised(self.client.outputs(batch).logits, batch.label) * len(batch.label)}


class DualAscent(Options):
    """The dual variables and their steps."""

    eta_d: float = Field(2.0, ge=0, description="step of the dual variables (FedIIC: 0.1, and 0.01 on Real); 0: none")
    epsilon: float = Field(0.01, ge=0, description="how far a site's loss may exceed the mean loss (FedIIC: 0.1)")
    primal_rounds: PositiveInt = Field(5, description="rounds from one dual step to the next")
    cap: PositiveFloat = Field(100.0, description="largest dual variable (as released)", json_schema_extra=LATER)


class Duals(DualAscent, Component):
    """Dual variables."""

    name: ClassVar[str] = "duals"
    paper: ClassVar[str] = "Shen et al., CLIMB, ICLR 2022"
    rank: ClassVar[int] = 51
    limit: ClassVar[Mapping[str, Any]] = {"eta_d": 0}
    in_short: ClassVar[tuple[str, ...]] = ("duals.primal_rounds=1",)
    Site: ClassVar[type[SiteSide]] = DualsSite
    Server: ClassVar[type[ServerSide]] = DualsServer

    def holds(self) -> AbstractSet[str]:
        return {"merge"}

    def single_replies(self) -> str:
        return "it weighs each site by that site's own loss"

    def needs(self) -> AbstractSet[str]:
        return {"model", "supervised", "sites"}

    def discloses(self) -> Sheet:
        return {
            "measure": {
                "loss": Entry(
                    "loss of the received model, summed over the local training images (before dual steps)", "total"
                ),
                "examples": Entry("number of local training images", "images"),
            }
        }

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {} if self.eta_d else dict.fromkeys(("epsilon", "primal_rounds", "cap"), "eta_d is 0")


COMPONENT = Duals
