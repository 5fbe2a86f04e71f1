"""CLIMB: no site's loss may exceed the mean loss by more than epsilon. A dual variable per site, which grows while its
loss does, sets how much the site counts in the average; no class counts are needed.

Shen et al., An Agnostic Approach to Federated Learning with Class Imbalance, ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, PositiveInt

from equipoise.components._merging import average_by, site_weights, step_towards
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.config import Table
from equipoise.contract.method import Batch, Method
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, Replies, Scan, Tensors
from equipoise.nets import groups


class Options(Table):
    """CLIMB's dual ascent; the defaults are those that its authors released, whose code stops dual variables at 5."""

    eta_d: float = Field(
        2.0, ge=0, description="step of the dual variables (FedIIC: 0.1, and 0.01 on Real); 0: none, FedAvg"
    )
    epsilon: float = Field(0.01, ge=0, description="how far a site's loss may exceed the mean loss (FedIIC: 0.1)")
    primal_rounds: PositiveInt = Field(5, description="rounds from one dual step to the next")


class ClimbServer(FedAvgServer):
    """Alternates: a dual step by the losses of the present model at all sites, then rounds under the new weights.

    The dual step comes first and counts at once: a site that the model serves badly now weighs more now. The released
    code takes the same losses but runs the rounds that follow under the weights from before, one dual step behind.
    All means over sites are by train.aggregation ("uniform": as in the paper).
    """

    def setup(self) -> None:
        super().setup()
        self.statistics = frozenset(groups(self.new_net())["statistics"])

    def start(self, roster: Sequence[str]) -> Conversation:
        self.state.duals = {site: torch.zeros((), dtype=torch.float64) for site in roster}
        self.state.shares = {}  # what each site weighs in FedAvg, as it last told
        yield from super().start(roster)

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        if self.options.eta_d and (number - 1) % self.options.primal_rounds == 0:
            self.ascend((yield Ask("measure", list(self.state.duals), model=self.state.model)))
        updates = yield Ask("train", sites, model=self.state.model)
        self.descend(updates)

    def ascend(self, measured: Replies) -> None:
        """lambda_i <- max(lambda_i + eta_d / N (f_i - mean f - epsilon), 0), at all sites that can be reached."""
        duals, shares = dict(self.state.duals), dict(self.state.shares)
        losses = [reply["loss"] / reply["examples"] for reply in measured]
        own = site_weights(measured, self.setting.config.train.aggregation)
        rate, limit = self.options.eta_d / len(duals), mean(losses, own) + self.options.epsilon
        for site, loss, share in zip(measured.sites, losses, own):
            duals[site] = (duals[site] + rate * (loss - limit)).clamp(min=0)
            shares[site] = torch.tensor(share, dtype=torch.float64)
        self.state.duals, self.state.shares = duals, shares

    def descend(self, updates: Replies) -> None:
        """x <- x + mean over the round's sites of w_i (x_i - x), where w_i = 1 + lambda_i - mean lambda.

        The mean of lambda is over all sites, so a round whose sites are served badly takes a longer step than one
        whose sites are not: the weights are not made to add up to 1 in each round. Statistics take the weighted mean.
        """
        weights, own = self.weights(updates.sites), site_weights(updates, self.setting.config.train.aggregation)
        length = mean(weights, own)
        if length > 0:
            towards = average_by([weight * share for weight, share in zip(weights, own)], updates)
            self.state.model = step_towards(self.state.model, towards, length, self.statistics)

    def weights(self, sites: Sequence[str]) -> list[float]:
        """1 + lambda_i - mean lambda. Below 0 the Lagrangian would train against a site; here its weight stops at 0."""
        duals, shares = self.state.duals, self.state.shares
        counted = sorted(shares)  # in one order, also after a resume
        middle = mean([float(duals[site]) for site in counted], [float(shares[site]) for site in counted])
        return [max(1 + float(duals[site]) - middle, 0.0) for site in sites]


def mean(values: Sequence[float], shares: Sequence[float]) -> float:
    """Mean of a number per site, by the sites' shares; of none, 0."""
    return sum(share * value for share, value in zip(shares, values)) / (sum(shares) or 1.0)


class ClimbClient(FedAvgClient):
    """Tells, when asked, how well the received model serves it; trains as FedAvg does."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "measure": {
            "loss": "loss of the received model, summed over the local training images (before dual steps)",
            "examples": "number of local training images",
        },
        **FedAvgClient.discloses,
    }

    def measure(self, message: Payload) -> Action:
        """The received model's loss here: one pass over the images, without training."""
        sums = yield Scan("train", self.summed_loss)
        return {"loss": float(sums["loss"]), "examples": int(self.class_counts.sum())}

    def summed_loss(self, batch: Batch) -> Tensors:
        """The supervised loss of a batch, summed over its images."""
        return {"loss": self.supervised(self.outputs(batch).logits, batch.label) * len(batch.label)}


METHOD = Method(
    server=ClimbServer,
    client=ClimbClient,
    paper="Shen et al., An Agnostic Approach to Federated Learning with Class Imbalance, ICLR 2022",
    year=2022,
    changes="aggregation (dual variables)",
    options=Options,
)
