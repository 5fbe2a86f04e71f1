"""CLIMB: no site's loss may exceed the mean loss by more than epsilon. A dual variable per site, which grows while its
loss does, sets how much the site counts in the average; no class counts are needed.

Shen et al., An Agnostic Approach to Federated Learning with Class Imbalance, ICLR 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, PositiveInt

from equipoise.config import Table
from equipoise.engine.contract import Batch, Method
from equipoise.engine.protocol import Action, Ask, Conversation, Payload, Replies, Scan, Tensors
from equipoise.methods.common import average_by, site_weights
from equipoise.methods.fedavg import FedAvgClient, FedAvgServer


class Options(Table):
    """CLIMB's dual ascent; the defaults are those that its authors released for the paper."""

    eta_d: float = Field(
        2.0, ge=0, description="step of the dual variables (FedIIC: 0.1, and 0.01 on Real); 0: none, FedAvg"
    )
    epsilon: float = Field(0.01, ge=0, description="how far a site's loss may exceed the mean loss (FedIIC: 0.1)")
    primal_rounds: PositiveInt = Field(5, description="rounds from one dual step to the next")


class ClimbServer(FedAvgServer):
    """Alternates: a dual step by the losses of the model that sites received, then rounds under the new weights.

    All means over sites are by train.aggregation ("uniform": as in the paper) and over the sites of the round.
    """

    def start(self, roster: Sequence[str]) -> Conversation:
        self.state.duals = {site: torch.zeros((), dtype=torch.float64) for site in roster}
        yield from super().start(roster)

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        dual_step = self.options.eta_d > 0 and (number - 1) % self.options.primal_rounds == 0
        updates = yield Ask("train", sites, model=self.state.model, measure=dual_step)
        if dual_step:
            self.ascend(updates)
        self.state.model = average_by(self.weights(updates), updates)

    def ascend(self, updates: Replies) -> None:
        """lambda_i <- max(lambda_i + eta_d / N (f_i - mean f - epsilon), 0)."""
        rate = self.options.eta_d / len(self.state.duals)
        losses = updates.values("loss")
        limit = self.mean(losses, updates) + self.options.epsilon
        moved = {
            site: (self.state.duals[site] + rate * (loss - limit)).clamp(min=0)
            for site, loss in zip(updates.sites, losses)
        }
        self.state.duals = self.state.duals | moved

    def weights(self, updates: Replies) -> list[float]:
        """Un-normalised weight of each site: what it has in FedAvg, times 1 + lambda_i - mean lambda.

        Below 0 the Lagrangian would train against a site; here its weight stops at 0.
        """
        duals = [float(self.state.duals[site]) for site in updates.sites]
        middle = self.mean(duals, updates)
        own = site_weights(updates, self.setting.config.train.aggregation)
        return [weight * max(1 + dual - middle, 0.0) for weight, dual in zip(own, duals)]

    def mean(self, values: Sequence[float], updates: Replies) -> float:
        """Mean of a number per site, by the sites' weights in FedAvg."""
        weights = site_weights(updates, self.setting.config.train.aggregation)
        return sum(weight * value for weight, value in zip(weights, values)) / sum(weights)


class ClimbClient(FedAvgClient):
    """Tells, when asked, how well the received model serves it; then trains as FedAvg does."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": FedAvgClient.discloses["train"]
        | {"loss": "mean loss of the received model on the local training images (in rounds with a dual step)"}
    }

    def train(self, message: Payload) -> Action:
        measured: Payload = {}
        if message["measure"]:
            sums = yield Scan("train", self.summed_loss)
            measured["loss"] = float(sums["loss"] / self.class_counts.sum())
        return (yield from super().train(message)) | measured

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
