"""Cuts an encoder whose calls cannot be followed as a graph, such as a transformer of Hugging Face.

Both halves are copies of the whole encoder, in which the layers of the other half do not compute: they give zeros. In
the second half, the named layer gives the stored maps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from equipoise.core.errors import UserError


def halves(module: nn.Module, path: str, name: str, pixels: Tensor) -> tuple[nn.Module, nn.Module]:
    """The part of an encoder up to a layer, and the part after it.

    Args:
        path: the full name of the layer
        name: what to call the encoder in messages
        pixels: images (n, C, H, W) to try it on
    """
    calls, outputs = _called(module, pixels)
    if calls.count(path) != 1:
        raise UserError(
            f"the encoder {name} uses its layer {path} {calls.count(path)} times; name another with net.freeze_up_to"
        )
    at = calls.index(path)
    before, after = set(calls[:at]), set(calls[at + 1 :])
    around = {other for other in after if f"{path}.".startswith(f"{other}.") or not other}
    first, second = deepcopy(module), deepcopy(module)
    passed = _Passed(), _Passed()
    _idle(first, after - before - around, outputs, passed[0])
    _idle(second, before - after, outputs, passed[1])
    first.get_submodule(path).register_forward_hook(passed[0].keep)
    layer = second.get_submodule(path)
    _without_weights(layer)
    layer.forward = _Stored(outputs[path], passed[1])  # type: ignore[method-assign]
    return UpTo(first, passed[0]), After(second, outputs[path], pixels, passed[1])


class _Passed:
    """What a half is given, and in the first half the output of its last layer, while it computes."""

    given: Tensor | None = None
    output: Any = None

    def keep(self, layer: nn.Module, given: Any, output: Any) -> None:
        self.output = output


class UpTo(nn.Module):
    """An encoder up to a layer: images (B, C, H, W) -> maps or tokens."""

    def __init__(self, module: nn.Module, passed: _Passed) -> None:
        super().__init__()
        self.module = module
        self.passed = passed

    def forward(self, images: Tensor) -> Tensor:
        self.passed.given = images
        try:
            self.module(images)
            return _first_tensor(self.passed.output)
        finally:
            self.passed.given = self.passed.output = None


class After(nn.Module):
    """An encoder from a layer on: stored maps (B, c, h, w) -> features (B, D)."""

    def __init__(self, module: nn.Module, output: Any, pixels: Tensor, passed: _Passed) -> None:
        super().__init__()
        self.module = module
        self.shape, self.pixels = tuple(_first_tensor(output).shape[1:]), tuple(pixels.shape[1:])
        self.passed = passed

    def forward(self, maps: Tensor) -> Tensor:
        # Tokens (B, T, D) are stored as (B, 1, T, D).
        self.passed.given = maps.flatten(0, 1) if len(self.shape) == 2 and maps.ndim == 4 else maps
        try:
            found: Tensor = self.module(maps.new_zeros((maps.shape[0], *self.pixels)))
        finally:
            self.passed.given = None
        return found


class _Zeros:
    """Stands for a layer of the other half, whose output nothing in this half depends on."""

    def __init__(self, output: Any, passed: _Passed) -> None:
        self.output, self.passed = _pytree.tree_map_only(Tensor, _shape, output), passed

    def __call__(self, *given: Any, **more: Any) -> Any:
        batch = self.passed.given
        assert batch is not None
        return _pytree.tree_map_only(_Shape, lambda shape: batch.new_zeros((batch.shape[0], *shape.rest)), self.output)


class _Stored:
    """Stands for the layer at the cut: gives the stored maps in place of its first tensor."""

    def __init__(self, output: Any, passed: _Passed) -> None:
        self.several, self.passed = isinstance(output, tuple), passed

    def __call__(self, *given: Any, **more: Any) -> Any:
        return (self.passed.given,) if self.several else self.passed.given


class _Shape:
    """The shape of a tensor without the number of images."""

    def __init__(self, rest: tuple[int, ...]) -> None:
        self.rest = rest


def _shape(tensor: Tensor) -> _Shape:
    return _Shape(tuple(tensor.shape[1:]))


def _called(module: nn.Module, pixels: Tensor) -> tuple[list[str], dict[str, Any]]:
    """The names of layers in the order in which they finish, and what they gave."""
    calls: list[str] = []
    outputs: dict[str, Any] = {}

    def noted(path: str, output: Any) -> None:
        calls.append(path)
        outputs[path] = output

    hooks = [
        layer.register_forward_hook(lambda _, __, output, path=path: noted(path, output))
        for path, layer in module.named_modules()
    ]
    try:
        with torch.no_grad():
            module(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, outputs


def _idle(module: nn.Module, paths: Iterable[str], outputs: Mapping[str, Any], passed: _Passed) -> None:
    """Let layers of the other half give zeros, and empty them."""
    for path in paths:
        layer = module.get_submodule(path)
        layer.forward = _Zeros(outputs[path], passed)  # type: ignore[method-assign]
        _without_weights(layer)


def _without_weights(module: nn.Module) -> None:
    """Empty the layers of a module. Their weights keep shapes and types, which other layers may ask for."""
    for layer in module.modules():
        outside_state(layer, {name: value.new_zeros(()).expand(value.shape) for name, value in own_tensors(layer)})


def own_tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a layer itself, by name."""
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]


def outside_state(layer: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put buffers that are no part of the state in the place of a layer's tensors: they neither train nor travel."""
    for name, value in tensors.items():
        delattr(layer, name)
        layer.register_buffer(name, value.detach(), persistent=False)


def _first_tensor(output: Any) -> Tensor:
    """The maps among what a layer gives."""
    found = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(found, Tensor):
        raise UserError(
            f"a layer that net.freeze_up_to names gives {type(found).__name__} instead of maps; name a whole block"
        )
    return found
