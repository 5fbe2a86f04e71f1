"""The values of train.loss as functions of logits, labels and class counts, found through the components."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from equipoise.components import get_component, loss_names
from equipoise.losses import cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _of_component(name: str) -> Loss:
    options = get_component(name)()

    def loss(logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
        client: Any = SimpleNamespace(setting=None, num_classes=len(class_counts), class_counts=class_counts)
        site: Any = options.Site(options, client)
        site.scratch = site.keeps = site.receives = lambda name, target, entries=None: target
        site.build()
        return site.supervised(logits, labels)

    return loss


def _plain(logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
    return cross_entropy(logits, labels)


LOSSES: dict[str, Loss] = {"ce": _plain}
LOSSES |= {loss: _of_component(name) for loss, name in loss_names().items()}
