"""FedLoGe: a fixed sparse simplex trains the body, and two heads learn on its features: a common and a personal one.

Row lengths of heads follow class frequencies. So the common head predicts with rows of equal length, and a site's own
predictor has the common head's rows times the lengths of the site's own.

Xiao, Chen, Liu, Feng, Wu, Liu, Zhou, Yang and Liu, FedLoGe: Joint Local and Generic Federated Learning under
Long-tailed Data, ICLR 2024. The fine-tuning after realignment is left out.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor
from torch.nn import functional as F

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method
from equipoise.contract.summed import averaged
from equipoise.losses import cross_entropy
from equipoise.prototypes import simplex_frame


class Options(MethodOptions):
    """The fixed classifier (SSE-C) and the realignment; the released numbers, with fewer steps."""

    at_little_cost: ClassVar[tuple[str, ...]] = ("fedloge.steps=5",)

    sparsity: float = Field(0.6, ge=0, lt=1, description="share of zeros in the fixed classifier")
    length: PositiveFloat = Field(0.1, description="length of its rows")
    steps: int = Field(1000, ge=0, description="steps that draw its rows apart, once (released: 10,000)")
    align: bool = Field(True, description="realign the heads' rows; false: each head predicts with its trained weights")

    def holds(self) -> AbstractSet[str]:
        return {"loss"}

    def needs(self) -> AbstractSet[str]:
        return {"pooled features"}

    def lacks(self) -> AbstractSet[str]:
        return {"supervised", "plain forward", "plain loss", "head predicts"}


def sparse_simplex(num_classes: int, size: int, sparsity: float, length: float, steps: int) -> Tensor:
    """Rows (C, D) of one length with random zeros, drawn apart: Adam raises the least angle of each row to another."""
    frame = simplex_frame(num_classes, size)
    kept = torch.ones(frame.numel())
    kept[torch.randperm(frame.numel())[: int(sparsity * frame.numel())]] = 0
    mask = kept.reshape(frame.shape)
    rows = (frame * mask).requires_grad_()
    optimiser = torch.optim.Adam([rows], lr=1e-3)
    own = torch.eye(num_classes, dtype=torch.bool)
    for _ in range(steps):
        directions = F.normalize(rows, dim=1)
        nearest = (directions @ directions.T).masked_fill(own, -1).amax(1)
        (slope,) = torch.autograd.grad(-torch.acos(nearest.clamp(-0.99999, 0.99999)).mean(), rows)
        rows.grad = slope * mask
        optimiser.step()
    return length * F.normalize(rows.detach(), dim=1)


class FedLoGeClient(FedAvgClient):
    """Trains the body by the fixed classifier; the common head, `net.head`, and its own learn on detached features."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {
        "train": FedAvgClient.discloses["train"]
        | {"model": averaged("body and common head after local training, with batch-norm statistics")}
    }
    views = ("global", "personal")

    def build(self) -> None:
        super().build()
        options, size = self.options, self.net.feature_size
        frame = self.setting.seeded(
            "frame", lambda: sparse_simplex(self.num_classes, size, options.sparsity, options.length, options.steps)
        )
        self.frame = self.scratch("frame", frame)
        self.personal_head = self.setting.seeded("personal head", self.net.another_head)
        self.keeps("personal_head", self.personal_head)
        self.phase("main", {"net": self.net, "personal_head": self.personal_head})

    def forward(self, batch: Batch) -> Any:
        """Features (B, D) and logits (B, C) of the fixed, the common and the own head."""
        features = self.net.features(batch.image)
        dropped = self.net.dropout(features)
        detached = dropped.detach()
        return SimpleNamespace(
            features=features,
            fixed_logits=F.linear(dropped, self.frame),
            logits=self.net.logits_of(self.net.head, detached),
            personal_logits=self.net.logits_of(self.personal_head, detached),
        )

    def loss(self, batch: Batch, out: Any) -> Tensor:
        return sum(
            (cross_entropy(logits, batch.label) for logits in (out.logits, out.personal_logits)),
            cross_entropy(out.fixed_logits, batch.label),
        )

    def predict(self, view: str, batch: Batch) -> Tensor:
        out = self.outputs(batch)
        if not self.options.align:
            return out.logits if view == "global" else out.personal_logits
        common, own = (head.weight.norm(dim=1) for head in (self.net.head, self.personal_head))
        lengths = common.mean() / common.clamp(min=1e-12) if view == "global" else own
        bias = 0 if self.net.head.bias is None else self.net.head.bias
        return (out.logits - bias) * lengths + bias


METHOD = Method(
    server=FedAvgServer,
    client=FedLoGeClient,
    paper="Xiao et al., FedLoGe: Joint Local and Generic Federated Learning under Long-tailed Data, ICLR 2024",
    year=2024,
    changes="loss (fixed sparse simplex), heads with realigned rows, personalisation (own head)",
    options=Options,
)
