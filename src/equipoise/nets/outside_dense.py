"""Nets from outside that give a class for each pixel: MONAI's U-Net and SegResNet, and any module of that kind.

The 1x1 convolution that makes the logits is the head, where there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from equipoise.core.errors import UserError, first_line, is_memory
from equipoise.nets.base import Net
from equipoise.nets.config import NetConfig
from equipoise.nets.dense import DenseNet
from equipoise.nets.outside import Body, norms_in, probed, put, tensor_of


class DenseBody(Body):
    """A module from outside without its head: images (B, C, H, W) -> feature maps (B, D, H, W)."""

    def forward(self, images: Tensor) -> Tensor:
        try:
            maps = tensor_of(self.module(images))
        except (RuntimeError, ValueError) as problem:
            if is_memory(problem):
                raise
            raise self._unfit(images, first_line(problem)) from problem
        if maps.shape[-2:] != images.shape[-2:]:
            raise self._unfit(images, f"it gives maps of {tuple(maps.shape)}")
        return maps

    def _unfit(self, images: Tensor, why: str) -> UserError:
        return UserError(
            f"the net {self.name} cannot take images of the shape {tuple(images.shape)}: {why}; give it images of a "
            "size that it was made for, with augment.size"
        )


class OutsideDenseNet(DenseNet):
    """A net from outside with the 1x1 convolution that makes its logits as head."""

    def __init__(self, body: DenseBody, head: nn.Conv2d, dropout: float, norms: tuple[str, ...]) -> None:
        super().__init__(body, head, dropout)
        self.norm_names = tuple(f"body.module.{name}" for name in norms)


class WholeDenseNet(Net):
    """A net from outside of which only the logits are known: methods that need features or a head refuse it."""

    has_head, dense = False, True

    def __init__(self, body: DenseBody, norms: tuple[str, ...]) -> None:
        nn.Module.__init__(self)
        self.body = body
        self.dropout = nn.Identity()
        self.smallest = 1
        self.norm_names = tuple(f"body.module.{name}" for name in norms)

    def classify(self, features: Tensor) -> Tensor:
        return features

    @property
    def feature_size(self) -> int:
        raise self._without("features")

    @property
    def head(self) -> nn.Linear:  # type: ignore[override]
        raise self._without("the head")

    def _without(self, what: str) -> UserError:
        return UserError(
            f"the method needs {what} of its net, but in {self.body.name} no 1x1 convolution was found that makes the "
            "logits; name it with net.head, or choose a method that needs logits alone, such as fedavg"
        )


def build_dense(config: NetConfig, module: nn.Module, num_classes: int, channels: int) -> Net:
    """The net of a module that gives logits (B, num_classes, H, W)."""
    head = config.head if config.head is not None else _head_of(config.name, module, num_classes, channels)
    norms = norms_in(module, config.norm)
    body = DenseBody(module, config.name)
    if not head:
        return WholeDenseNet(body, norms)
    layers = dict(module.named_modules())
    last = layers.get(head)
    if not isinstance(last, nn.Conv2d) or last.kernel_size != (1, 1) or last.out_channels != num_classes:
        small = [name for name, layer in layers.items() if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)]
        raise UserError(
            f"net.head = {head!r} is no 1x1 convolution of {config.name} with {num_classes} outputs; its 1x1 "
            f"convolutions are {', '.join(small[-8:]) or 'none'}"
        )
    put(module, head, nn.Identity())
    return OutsideDenseNet(body, last, config.dropout or 0.0, norms)


def _head_of(name: str, module: nn.Module, num_classes: int, channels: int) -> str:
    """The name of the 1x1 convolution whose outputs are the logits; "" where there is none."""
    outputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, output, path=path: outputs.update({path: output}))
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)
    ]
    training = module.training
    try:
        logits = probed(name, module.eval(), channels)
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    if logits.ndim != 4 or logits.shape[1] != num_classes:
        raise UserError(
            f"the net {name} gives {tuple(logits.shape)} for two images, but masks of {num_classes} classes need "
            f"(2, {num_classes}, height, width); give a function make(num_classes, channels) that makes it so"
        )
    alike = [path for path, output in outputs.items() if output.shape == logits.shape and torch.equal(output, logits)]
    return alike[-1] if alike else ""
