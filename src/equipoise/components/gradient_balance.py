"""Balances, class by class, the gradients that push a logit up and down, by a controller at each site (Fed-GraB).

The loss is binary cross entropy of each logit. A site adds up the sizes of the gradients of a class's own images and of
all others. A PID controller weighs the own images so that both sums come to agree.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from equipoise.contract.component import Batch, Component, Message, ServerSide, SiteSide
from equipoise.losses import membership, rows


def weight_of(output: Tensor) -> Tensor:
    """The weight of a controller's output: (10 / 9) / (1 / 9 + exp(-0.05 x)), which is 1 at 0 and 10 at most."""
    return (10 / 9) / (1 / 9 + torch.exp(-0.05 * output))


def rare_classes(head: Tensor, share: float) -> Tensor:
    """The mask (C,) of the share of classes whose rows (C, D) of the head are shortest: they had few images."""
    count = round(share * len(head))
    shortest = head.norm(dim=1).argsort()[:count]
    return torch.zeros(len(head), dtype=torch.bool, device=head.device).index_fill(0, shortest, True)


class GradientBalanceServer(ServerSide):
    """Estimates which classes are rare from the common head (the direct prior analyser)."""

    def message(self, number: int) -> Message:
        if self.options.classes == "all":
            return {}
        return {"rare": rare_classes(self.server.state.model["head.weight"], self.options.share)}


class GradientBalanceSite(SiteSide):
    """The self-adjusting gradient balancer. Its controllers go on from round to round."""

    def build(self) -> None:
        zeros = torch.zeros(self.num_classes)
        if self.options.classes == "all":
            self.rare = self.scratch("rare", torch.ones(self.num_classes, dtype=torch.bool))
        else:
            self.rare = self.receives("rare", torch.ones(self.num_classes, dtype=torch.bool))
        #: sums of the sizes of gradients of own images less those of others
        self.difference = self.keeps("difference", zeros.clone())
        self.output = self.keeps("output", zeros.clone())
        self.errors = self.keeps("errors", torch.zeros(2, self.num_classes))

    def weights(self) -> Tensor:
        """The weight (C,) of each class's own images."""
        return torch.where(self.rare, weight_of(self.output), 1.0)

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = rows(logits), labels.reshape(-1)
        target = membership(labels, self.num_classes, logits.dtype)
        weights = torch.where(target > 0, self.weights(), 1.0)
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        return (weights * losses).sum() / len(labels)

    def seen(self, batch: Batch, out: Any) -> None:
        """Add up the weighted gradients of the step, and move the controllers (the released incremental PID)."""
        target = membership(batch.label, self.num_classes, out.logits.dtype)
        sizes = (out.logits.sigmoid() - target).abs() / len(batch.label)
        own, others = (target * sizes).sum(0) * self.weights(), ((1 - target) * sizes).sum(0)
        self.difference.add_(own - others)
        options, error = self.options, -self.difference
        last, before = self.errors[0], self.errors[1]
        change = options.kp * (error - last) + options.ki * error + options.kd * (error - 2 * last + before)
        self.output.copy_(torch.where(self.rare, (self.output + change).clamp(-100, 100), self.output))
        self.errors.copy_(torch.stack([error, last]))


class GradientBalance(Component):
    """Self-adjusting gradient balancer."""

    name: ClassVar[str] = "gradient-balance"
    paper: ClassVar[str] = "Xiao et al., Fed-GraB, NeurIPS 2023"
    loss_name: ClassVar[str] = "gradient_balance"
    rank: ClassVar[int] = 22
    Site: ClassVar[type[SiteSide]] = GradientBalanceSite
    Server: ClassVar[type[ServerSide]] = GradientBalanceServer

    kp: float = Field(10.0, ge=0, description="how strongly a controller answers to changes of the difference")
    ki: float = Field(0.01, ge=0, description="how strongly it answers to the difference")
    kd: float = Field(0.1, ge=0, description="how strongly it answers to changes of these changes")
    classes: Literal["rare", "all"] = Field(
        "rare", description="classes with a controller: rare ones by the length of their rows of the head, or all"
    )
    share: float = Field(0.5, gt=0, le=1, description="share of the classes that count as rare")

    def holds(self) -> AbstractSet[str]:
        return {"loss"}

    def needs(self) -> AbstractSet[str]:
        found = {"supervised", "plain loss", "plain forward", "image labels"}
        return found | ({"model", "class head"} if self.classes == "rare" else set())

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        return {} if self.classes == "rare" else {"share": "classes is all"}


COMPONENT = GradientBalance
