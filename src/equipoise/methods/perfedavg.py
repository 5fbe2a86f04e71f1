"""Per-FedAvg: the averaged model is trained to be good after one gradient step at a site. That step turns it into a
personal model.

Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach,
NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.component import Options as MethodOptions
from equipoise.contract.method import Batch, Method, Phase
from equipoise.contract.protocol import Train, Work
from equipoise.contract.tables import OptimiserConfig
from equipoise.nets.net import NORM_LAYERS


class Options(MethodOptions):
    """The adaptation step, and how the gradient through it is found. beta of the paper is train.optimiser.lr.

    `exact` is Algorithm 1 as it stands. `hf` is the paper's way around second derivatives, at about the same cost (two
    forward and backward passes in place of one forward, one backward and one double backward pass), in less memory; but
    where a net has kinks (ReLU, maxima) between the two points, differences of gradients say little of the Hessian, and
    may be further from `exact` than `fo`, which is cheapest and leaves the Hessian out.
    """

    #: a step takes three batches
    at_little_cost: ClassVar[tuple[str, ...]] = ("train.batch_size=4",)

    alpha: float = Field(
        0.01, ge=0, description="step size of the adaptation, the same in every round; 0: none, FedAvg"
    )
    variant: Literal["exact", "hf", "fo"] = Field(
        "exact", description="the Hessian's part by a double backward pass, by differences of gradients, or left out"
    )
    delta: PositiveFloat = Field(1e-3, description="hf: how far apart these gradients are taken, by gradient length")
    adapt_steps: PositiveInt = Field(1, description="steps that a site adapts by before evaluation")

    def lacks(self) -> AbstractSet[str]:
        return {"one loss", "fixed personal models"}


class PerFedAvgClient(FedAvgClient):
    """Moves the model by the gradient of the loss after adaptation; a step takes a batch for each gradient."""

    views = ("global", "personal")

    def build(self) -> None:
        super().build()
        if self.options.alpha:
            self.workplace.batches_per_step = 2 if self.options.variant == "fo" else 3
            plain = OptimiserConfig(name="sgd", lr=self.options.alpha, momentum=0)
            self.phase("adapt", self.net, optimiser=plain, scheduled=False)

    def adapt(self) -> Generator[Work, Any, None]:
        if self.options.alpha:
            yield Train(steps=self.options.adapt_steps, phase="adapt")

    def step(self, batches: list[Batch], phase: Phase) -> Tensor:
        """w - beta (I - alpha H(w; D'')) g(w - alpha g(w; D); D'), as in Algorithm 1; fo takes H for 0."""
        if not self.options.alpha or phase is self.workplace.phases["adapt"]:
            return super().step(batches[:1], phase)
        adaptation, parameters = self.workplace.phases["adapt"].optimiser, phase.optimiser.parameters
        start = [parameter.detach().clone() for parameter in parameters]
        adaptation.update(self.gradients(batches[0], parameters)[1])
        loss, gradients = self.gradients(batches[1], parameters)
        self.move(parameters, start)
        if self.options.variant != "fo":
            product = self.hessian_product if self.options.variant == "exact" else self.gradient_difference
            curvature = product(batches[2], parameters, gradients)
            gradients = [g - adaptation.lr * c for g, c in zip(gradients, curvature)]
        self.workplace.descend(phase, gradients)
        return loss

    def gradients(self, batch: Batch, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The loss of a batch at the net's present weights, and its gradients."""
        loss = self.loss(batch, self.outputs(batch))
        return loss.detach(), list(torch.autograd.grad(loss, parameters, materialize_grads=True))

    def hessian_product(self, batch: Batch, parameters: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
        """H direction at the net's present weights: the gradient of <g, direction>, through one forward pass."""
        with sdpa_kernel(SDPBackend.MATH):  # torch's quick kernels of attention have no second derivative
            loss = self.loss(batch, self.outputs(batch))
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
        slope = torch.stack([(g * d).sum() for g, d in zip(gradients, direction)]).sum()
        return list(torch.autograd.grad(slope, parameters, materialize_grads=True))

    def gradient_difference(self, batch: Batch, parameters: list[Tensor], direction: list[Tensor]) -> list[Tensor]:
        """H direction at the present weights w, nearly: (g(w + delta d) - g(w - delta d)) / (2 delta)."""
        delta, start = self.options.delta, [parameter.detach().clone() for parameter in parameters]
        with self.without_noise():
            self.move(parameters, start, direction, delta)
            ahead = self.gradients(batch, parameters)[1]
            self.move(parameters, start, direction, -delta)
            behind = self.gradients(batch, parameters)[1]
        self.move(parameters, start)
        return [(a - b) / (2 * delta) for a, b in zip(ahead, behind)]

    @contextmanager
    def without_noise(self) -> Iterator[None]:
        """No dropout, no drop-connect, no bfloat16: 1 / delta would magnify what differs between two passes.

        Norm layers stay unchanged: with other statistics it would be another function.
        """
        noisy = [m for m in self.net.modules() if m.training and not isinstance(m, NORM_LAYERS)]
        for module in noisy:
            module.training = False
        try:
            with self.workplace.full_precision():
                yield
        finally:
            for module in noisy:
                module.training = True

    @staticmethod
    @torch.no_grad()
    def move(
        parameters: list[Tensor], start: list[Tensor], direction: list[Tensor] | None = None, distance: float = 0.0
    ) -> None:
        """Set the parameters, in place, to start + distance * direction."""
        torch._foreach_copy_(parameters, start)
        if direction is not None:
            torch._foreach_add_(parameters, direction, alpha=distance)


METHOD = Method(
    server=FedAvgServer,
    client=PerFedAvgClient,
    paper=(
        "Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning "
        "Approach, NeurIPS 2020"
    ),
    year=2020,
    changes="local step (meta-gradient), personalisation (one adaptation step)",
    options=Options,
)
