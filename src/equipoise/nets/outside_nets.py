"""Nets made of modules from outside, which give logits of images or of pixels.

The layer that makes the logits is the head, all before it the body. It is a linear layer, or for pixels a 1x1
convolution. A net without such a layer still gives logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import UserError, first_line, is_memory
from equipoise.nets.dense import DenseNet
from equipoise.nets.net import NORM_LAYERS, Net
from equipoise.nets.net_config import NetConfig
from equipoise.nets.outside_modules import made_outside

#: where the head of a net lies, once it was found; "" where a net has none
_heads: dict[tuple[str, bool], str] = {}
#: pixels per side of the images that heads are looked for with; the first size that a net takes counts
PROBED = (64, 224, 32, 96, 128, 512)


class Body(nn.Module):
    """A module from outside without its head: images (B, C, H, W) -> features (B, D), or dense ones (B, D, H, W)."""

    def __init__(self, module: nn.Module, name: str, dense: bool = False) -> None:
        super().__init__()
        self.module = module
        self.name, self.dense = name, dense

    def forward(self, images: Tensor) -> Tensor:
        try:
            found = tensor_of(self.module(images))
        except (RuntimeError, ValueError) as problem:
            if is_memory(problem):
                raise
            raise self._unfit(images, first_line(problem)) from problem
        if not self.dense:
            return found.flatten(1)
        if found.shape[-2:] != images.shape[-2:]:
            raise self._unfit(images, f"it gives maps of {tuple(found.shape)}")
        return found

    def _unfit(self, images: Tensor, why: str) -> UserError:
        return UserError(
            f"the net {self.name} cannot take images of the shape {tuple(images.shape)}: {why}; give it images of a "
            "size that it was made for, with augment.size"
        )


class WholeNet(Net):
    """A net from outside of which only the logits are known: methods that need features or a head refuse it."""

    has_head = False

    def __init__(self, body: Body) -> None:
        nn.Module.__init__(self)
        self.body = body
        self.dense = body.dense
        self.dropout = nn.Identity()
        self.smallest = 1

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
            f"the method needs {what} of its net, but in {self.body.name} no {_kind(self.dense)} was found that makes "
            "the logits; name it with net.head, or choose a method that needs logits alone, such as fedavg"
        )


def build_outside(config: NetConfig, num_classes: int, channels: int, dense: bool = False) -> Net:
    """The net of a configuration whose name leads out of this package.

    Args:
        dense: whether it gives a class for each pixel
    """
    return net_of(config, made_outside(config, num_classes, channels), num_classes, channels, dense)


def net_of(config: NetConfig, module: nn.Module, num_classes: int, channels: int, dense: bool = False) -> Net:
    """The net of a module that gives logits (B, num_classes), or dense ones (B, num_classes, H, W)."""
    path = config.head if config.head is not None else _head_of(config.name, module, num_classes, channels, dense)
    norms, body = norms_in(module, config.norm), Body(module, config.name, dense)
    if path:
        head = _named_head(config, module, path, num_classes, dense)
        _put(module, path, nn.Identity())
        net: Net = (DenseNet if dense else Net)(body, head, config.dropout or 0.0)  # type: ignore[arg-type]
    else:
        net = WholeNet(body)
    #: layers that are norm layers, though torch does not know them as such
    net.norm_names = tuple(f"body.module.{name}" for name in norms)
    return net


def _kind(dense: bool) -> str:
    return "1x1 convolution" if dense else "linear layer"


def _may_be_head(layer: nn.Module | None, dense: bool) -> bool:
    if dense:
        return isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)
    return isinstance(layer, nn.Linear)


def _named_head(config: NetConfig, module: nn.Module, path: str, num_classes: int, dense: bool) -> nn.Module:
    """The layer that makes the logits, once it is one that can."""
    layers = {name: layer for name, layer in module.named_modules() if _may_be_head(layer, dense)}
    if path not in layers:
        raise UserError(
            f"net.head = {path!r} is no {_kind(dense)} of {config.name}; such are "
            f"{', '.join(list(layers)[-8:]) or 'none'}"
        )
    outputs = getattr(layers[path], "out_channels" if dense else "out_features")
    if outputs != num_classes:
        raise _other_classes(config.name, outputs, num_classes)
    return layers[path]


def _head_of(name: str, module: nn.Module, num_classes: int, channels: int, dense: bool) -> str:
    """The name of the layer whose outputs are the logits; "" where there is none."""
    if (name, dense) not in _heads:
        _heads[name, dense] = _found_head(name, module, num_classes, channels, dense)
    return _heads[name, dense]


def _found_head(name: str, module: nn.Module, num_classes: int, channels: int, dense: bool) -> str:
    outputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, output, path=path: outputs.update({path: output}))
        for path, layer in module.named_modules()
        if _may_be_head(layer, dense)
    ]
    training = module.training
    try:
        logits = _probed(name, module.eval(), channels)
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    if dense and (logits.ndim != 4 or logits.shape[1] != num_classes):
        raise UserError(
            f"the net {name} gives {tuple(logits.shape)} for two images, but masks of {num_classes} classes need "
            f"(2, {num_classes}, height, width); give a function make(num_classes, channels) that makes it so"
        )
    if not dense and (logits.ndim != 2 or logits.shape[-1] != num_classes):
        raise _other_classes(name, logits.shape[-1], num_classes)
    alike = [path for path, output in outputs.items() if output.shape == logits.shape and torch.equal(output, logits)]
    return alike[-1] if alike else ""


def tensor_of(output: Any) -> Tensor:
    """The logits among what a module gives: a tensor, the first of several, or an object with `logits`."""
    output = getattr(output, "logits", output)
    output = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(output, Tensor):
        raise UserError(f"a net gave {type(output).__name__} instead of logits (B, classes); let it return a tensor")
    return output


def _probed(name: str, module: nn.Module, channels: int) -> Tensor:
    """The logits (2, classes) of two images of noise, of the first size that the module takes."""
    noise = torch.Generator().manual_seed(0)
    problem: Exception | None = None
    for size in PROBED:
        try:
            with torch.no_grad():
                return tensor_of(module(torch.rand(2, channels, size, size, generator=noise)))
        except Exception as error:  # a module from outside may complain of a size in any way
            problem = problem or error
    raise UserError(f"the net {name} takes no images (2, {channels}, n, n), n in {PROBED}: {problem}") from problem


def _other_classes(name: str, outputs: int, num_classes: int) -> UserError:
    return UserError(
        f"the net {name} gives {outputs} logits, but the data has {num_classes} classes; give a function "
        "make(num_classes, channels) that makes it for as many"
    )


def norms_in(module: nn.Module, told: tuple[str, ...] | None) -> tuple[str, ...]:
    """The layers that are norm layers, though torch does not know them as such: those named, or those so called."""
    layers = {name: layer for name, layer in module.named_modules() if next(layer.parameters(False), None) is not None}
    if told is None:
        called = [name for name, layer in layers.items() if "norm" in type(layer).__name__.lower()]
        return tuple(name for name in called if not isinstance(layers[name], NORM_LAYERS))
    unknown = [name for name in told if name not in layers]
    if unknown:
        raise UserError(f"net.norm names {unknown[0]!r}, which is no layer with weights; such are {', '.join(layers)}")
    return told


def _put(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Put a layer in the place of another."""
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, layer)
