"""Losses from outside as components: `train.loss` names a function of logits and labels."""

from __future__ import annotations

import inspect
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from torch import Tensor

from equipoise.contract.component import Component, SiteSide
from equipoise.core.errors import UserError
from equipoise.core.plugins import find


def loss_component(name: str) -> Component:
    """The component that trains by a loss from outside.

    The loss is a function of logits (B, C) and labels (B,), and, with three arguments, of the site's class counts (C,).
    It returns the mean.
    """
    loss = find("loss", name)
    takes = _arguments(loss, name)

    class OutsideLossSite(SiteSide):
        """Trains by this loss."""

        def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
            given = (logits, labels.long(), self.class_counts)[:takes]  # masks come as bytes
            found: Tensor = loss(*given)
            return found

    class OutsideLoss(Component):
        """A loss from outside."""

        name: ClassVar[str] = "own-loss"
        loss_name: ClassVar[str]
        rank: ClassVar[int] = 20
        Site: ClassVar[type[SiteSide]] = OutsideLossSite

        def holds(self) -> AbstractSet[str]:
            return {"loss"}

        def needs(self) -> AbstractSet[str]:
            return {"supervised"}

    OutsideLoss.loss_name = name
    return OutsideLoss()


def _arguments(loss: Any, name: str) -> int:
    """How many arguments a loss takes: two, or three with class counts."""
    if not callable(loss):
        raise UserError(f"train.loss = {name!r} is {type(loss).__name__} and no function; name one of (logits, labels)")
    places = [
        parameter
        for parameter in inspect.signature(loss).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and (parameter.default is parameter.empty or parameter.name == "class_counts")
    ]
    if len(places) not in (2, 3):
        raise UserError(
            f"train.loss = {name!r} takes {len(places)} arguments; a loss takes (logits, labels) or (logits, labels, "
            "class_counts)"
        )
    return len(places)
