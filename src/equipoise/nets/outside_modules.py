"""Modules from outside: `package.module:function`, `path/to/file.py:function`, `monai:NAME`, `hf:NAME_OR_FOLDER`, or an
object that Python gave. `nets/outside_nets.py` makes nets of them.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equipoise.core.errors import UserError, first_line
from equipoise.core.extras import imported
from equipoise.core.outside import code_digest, give, reachable
from equipoise.core.plugins import find
from equipoise.core.suggestions import meant
from equipoise.nets.net_config import NetConfig

Make = Callable[[int, int], nn.Module]

#: what constructors of MONAI call dimensions, channels and classes
MONAI_WORDS = (
    ("spatial_dims", "in_channels", "out_channels"),
    ("spatial_dims", "in_channels", "num_classes"),
    ("spatial_dims", "n_input_channels", "num_classes"),
)


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


# ---- from a name to a module ----------------------------------------------------------------------------------------


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
    nets = imported("monai.networks.nets", "monai", "this net")
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
    if not folder.is_dir() and (folder.is_absolute() or name.startswith((".", "~"))):
        raise UserError(f"the net hf:{name} cannot be loaded: there is no such folder; name one that holds config.json")
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
