"""Nets from outside: `package.module:function`, `path/to/file.py:function`, `monai:NAME`, `hf:NAME_OR_FOLDER`, or an
object that Python gave.

A module that gives logits becomes a `Net`: the linear layer that makes the logits is its head, all before it the body.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import UserError, first_line, is_memory
from equipoise.core.extras import imported
from equipoise.core.outside import code_digest, give, reachable
from equipoise.core.plugins import find
from equipoise.core.suggestions import meant
from equipoise.nets.base import NORM_LAYERS, Net
from equipoise.nets.config import NetConfig
from equipoise.nets.extras import import_monai

Make = Callable[[int, int], nn.Module]

#: where the head of a net lies, once it was found; "" where a net has none
_heads: dict[str, str] = {}
#: pixels per side of the images that heads are looked for with; the first size that a net takes counts
PROBED = (64, 224, 32, 96, 128, 512)
#: what constructors of MONAI call dimensions, channels and classes
MONAI_WORDS = (
    ("spatial_dims", "in_channels", "out_channels"),
    ("spatial_dims", "in_channels", "num_classes"),
    ("spatial_dims", "n_input_channels", "num_classes"),
)


class Body(nn.Module):
    """A module from outside without its head: images (B, C, H, W) -> features (B, D)."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name

    def forward(self, images: Tensor) -> Tensor:
        try:
            return tensor_of(self.module(images)).flatten(1)
        except (RuntimeError, ValueError) as problem:
            if is_memory(problem):
                raise
            raise UserError(
                f"the net {self.name} cannot take images of the shape {tuple(images.shape)}: {first_line(problem)}; "
                "give it images of the size that it was made for, with augment.size"
            ) from problem


class OutsideNet(Net):
    """A net from outside with the linear layer that makes its logits as head.

    Args:
        norms: names in the body of layers that are norm layers, though torch does not know them as such
    """

    def __init__(self, body: nn.Module, head: nn.Linear, dropout: float = 0.0, norms: tuple[str, ...] = ()) -> None:
        super().__init__(body, head, dropout)
        self.norm_names = tuple(f"body.module.{name}" for name in norms)


class WholeNet(Net):
    """A net from outside of which only the logits are known: methods that need features or a head refuse it."""

    has_head = False

    def __init__(self, body: Body, norms: tuple[str, ...] = ()) -> None:
        nn.Module.__init__(self)
        self.body = body
        self.dropout = nn.Identity()
        self.smallest = 1
        self.norm_names = tuple(f"body.module.{name}" for name in norms)

    def features(self, images: Tensor) -> Tensor:
        """The logits: there is nothing before them that is known."""
        return super().features(images)

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
            f"the method needs {what} of its net, but in {self.body.name} no linear layer was found that makes the "
            "logits; name it with net.head, or choose a method that needs logits alone, such as fedavg"
        )


# ---- names -----------------------------------------------------------------------------------------------------------


def named(net: nn.Module | Make, name: str | None = None) -> str:
    """The name of a net that Python gives as an object, as configs hold it.

    A function of a module gets a name that every process can look up. All other objects are known to this process.

    Args:
        name: the name that the object must have, where a run knows it already
    """
    title = str(getattr(net, "__name__", type(net).__name__)).strip("<>")
    if isinstance(net, nn.Module):
        kept = deepcopy(net)
        return give(title, net, module_digest(net), lambda num_classes, channels: deepcopy(kept), name)
    if not callable(net):
        raise UserError(
            f"net = {net!r} is no net; give a name, a torch.nn.Module, or a function make(num_classes, channels)"
        )
    module, function = getattr(net, "__module__", ""), getattr(net, "__qualname__", "")
    if name is None and reachable(net, module, function):
        return f"{module}:{function}"
    return give(title, net, code_digest(net), name=name)


def module_digest(net: nn.Module) -> str:
    """Identifies a module by its layers and weights."""
    found = hashlib.sha256(repr(net).encode())
    for key, value in net.state_dict().items():
        found.update(key.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:8]


# ---- from a name to a net --------------------------------------------------------------------------------------------


def build_outside(config: NetConfig, num_classes: int, channels: int, dense: bool = False) -> Net:
    """The net of a configuration whose name leads out of this package.

    Args:
        dense: whether it gives a class for each pixel
    """
    if dense:
        from equipoise.nets.outside_dense import build_dense

        return build_dense(config, made_outside(config, num_classes, channels), num_classes, channels)
    module = made_outside(config, num_classes, channels)
    head = config.head if config.head is not None else _head_of(config.name, module, num_classes, channels)
    norms = norms_in(module, config.norm)
    if not head:
        return WholeNet(Body(module, config.name), norms)
    layers = dict(module.named_modules())
    if not isinstance(layers.get(head), nn.Linear):
        linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
        raise UserError(
            f"net.head = {head!r} is no linear layer of {config.name}; its linear layers are {', '.join(linear[-8:])}"
        )
    last = layers[head]
    assert isinstance(last, nn.Linear)
    if last.out_features != num_classes:
        raise _other_classes(config.name, last.out_features, num_classes)
    put(module, head, nn.Identity())
    return OutsideNet(Body(module, config.name), last, config.dropout or 0.0, norms)


def made_outside(config: NetConfig, num_classes: int, channels: int) -> nn.Module:
    """The module that a name leads to."""
    kind, _, name = config.name.partition(":")
    arguments = config.arguments or {}
    if kind == "monai":
        return _from_monai(name, num_classes, channels, arguments)
    if kind == "hf":
        return _from_hub(name, num_classes, channels, config.weights, arguments)
    make = find("net", config.name)
    if not callable(make):
        raise UserError(f"{config.name} is no function; name one that takes (num_classes, channels) and gives a module")
    made = make(num_classes, channels, **arguments)
    if not isinstance(made, nn.Module):
        raise UserError(f"{config.name} gave {type(made).__name__}, not a torch.nn.Module; let it return the net")
    return made


def _from_monai(name: str, num_classes: int, channels: int, arguments: Mapping[str, Any]) -> nn.Module:
    nets = import_monai()
    make = getattr(nets, name, None)
    if make is None or not callable(make):
        close = meant(name, [other for other in vars(nets) if callable(getattr(nets, other))])
        hint = f"did you mean monai:{close}?" if close else "see monai.networks.nets"
        raise UserError(f"MONAI has no net {name}; {hint}")
    takes = inspect.signature(make).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    problem: Exception | None = None
    for words in (words for words in MONAI_WORDS if open_ended or words[-1] in takes):
        usual = dict(zip(words, (2, channels, num_classes))) | {"pretrained": False}
        known = {word: value for word, value in usual.items() if word in takes or (open_ended and word != "pretrained")}
        try:
            made = make(**(known | dict(arguments)))
            assert isinstance(made, nn.Module)
            return made
        except TypeError as error:
            problem = problem or error
    raise UserError(
        f"MONAI's {name} cannot be made: {problem or 'it has no classes'}; give what it needs in net.arguments"
    ) from problem


def _from_hub(name: str, num_classes: int, channels: int, weights: str, arguments: Mapping[str, Any]) -> nn.Module:
    """An image classifier of Hugging Face's transformers, from a hub, the cache or a folder."""
    transformers = imported("transformers", "hub", f"the net hf:{name}")
    classifier = transformers.AutoModelForImageClassification
    transformers.utils.logging.disable_progress_bar()  # one for each net that is made
    folder = Path(name).expanduser()
    source = str(folder) if folder.is_dir() else name
    try:
        about = transformers.AutoConfig.from_pretrained(source, num_labels=num_classes, **arguments)
        about.num_channels = channels
        if weights == "none":
            made = classifier.from_config(about)
        else:
            made = classifier.from_pretrained(source, config=about, ignore_mismatched_sizes=True)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"the net hf:{name} cannot be loaded: {first_line(problem)}; without a connection, copy the model's folder "
            "here and name it hf:FOLDER, or fill the cache elsewhere with `hf download`"
        ) from problem
    assert isinstance(made, nn.Module)
    return made


# ---- the parts of a net ----------------------------------------------------------------------------------------------


def tensor_of(output: Any) -> Tensor:
    """The logits among what a module gives: a tensor, the first of several, or an object with `logits`."""
    output = getattr(output, "logits", output)
    output = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(output, Tensor):
        raise UserError(f"a net gave {type(output).__name__} instead of logits (B, classes); let it return a tensor")
    return output


def _head_of(name: str, module: nn.Module, num_classes: int, channels: int) -> str:
    """The name of the linear layer whose outputs are the logits; "" where there is none."""
    if name not in _heads:
        _heads[name] = _found_head(name, module, num_classes, channels)
    return _heads[name]


def _found_head(name: str, module: nn.Module, num_classes: int, channels: int) -> str:
    outputs: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, output, path=path: outputs.update({path: output}))
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    training = module.training
    try:
        logits = probed(name, module.eval(), channels)
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    if logits.shape[-1] != num_classes or logits.ndim != 2:
        raise _other_classes(name, logits.shape[-1], num_classes)
    alike = [path for path, output in outputs.items() if output.shape == logits.shape and torch.equal(output, logits)]
    return alike[-1] if alike else ""


def probed(name: str, module: nn.Module, channels: int) -> Tensor:
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


def put(module: nn.Module, path: str, layer: nn.Module) -> None:
    """Put a layer in the place of another."""
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, layer)
