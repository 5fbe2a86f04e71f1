"""Shared by the server steps: the sites' mean change is a gradient, by which the server moves its model.

Reddi et al., Adaptive Federated Optimization, ICLR 2021. Running statistics of norm layers take the plain mean.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch

from equipoise.contract.component import Component, ServerSide
from equipoise.contract.protocol import Replies, Tensors
from equipoise.nets import all_but


class ServerStep(ServerSide):
    """Moves the weights by the sites' mean change, in the way of a subclass."""

    #: states beside each weight, which start from zero
    moments: tuple[str, ...] = ()

    def setup(self) -> None:
        travels = self.server.state.model
        weights = [name for name in all_but(self.server.new_net(), "statistics") if name in travels]
        zeros = {name: torch.zeros_like(travels[name]) for name in weights}
        for moment in self.moments:
            setattr(self.state, moment, dict(zeros))
        self.weights = weights

    def after(self, number: int, updates: Replies, before: Tensors, model: Tensors) -> Tensors:
        change = {name: model[name] - before[name] for name in self.weights}
        return model | {name: before[name] + step for name, step in self.step(change).items()}

    def step(self, change: Tensors) -> Tensors:
        """How far each weight goes, from the sites' mean change."""
        raise NotImplementedError


class AdaptiveStep(ServerStep):
    """Steps by a running mean of changes over the root of a running square."""

    moments = ("mean", "square")

    def step(self, change: Tensors) -> Tensors:
        options, state = self.options, self.state
        state.mean = {name: old.lerp(change[name], 1 - options.beta) for name, old in state.mean.items()}
        state.square = {name: self.squares(old, change[name] ** 2) for name, old in state.square.items()}
        return {
            name: options.lr * mean / (state.square[name].sqrt() + options.tau) for name, mean in state.mean.items()
        }

    def squares(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The next running square, of the last one and of the squared change."""
        raise NotImplementedError


class StepComponent(Component):
    """What all server steps need."""

    def needs(self) -> AbstractSet[str]:
        return {"model", "one model"}
