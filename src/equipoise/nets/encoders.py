"""Frozen encoders: nets whose features stand in place of images, with the size and normalisation that they expect."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.core.errors import UserError, first_line, parse_toml
from equipoise.core.outside import find
from equipoise.data.augment import AugmentConfig
from equipoise.data.augment.pipelines import Statistics, choose_statistics
from equipoise.nets.architectures import architecture, dense_names
from equipoise.nets.building import build_net
from equipoise.nets.cutting import cut
from equipoise.nets.net import Net
from equipoise.nets.net_config import NetConfig
from equipoise.nets.outside_modules import module_digest
from equipoise.nets.weights import read_state

#: nothing of an encoder depends on a number of classes
CLASSES = 2
#: pixels per side of the images that an encoder without a size of its own is tried on
TRIED = 64


class Frozen(nn.Module):
    """An encoder as a run uses it: normalised images (B, C, H, W) -> features (B, c, h, w), in the stored precision.

    Pooled features (B, D) become (B, D, 1, 1), tokens (B, T, D) become (B, 1, T, D).
    """

    def __init__(self, module: nn.Module, stored: str) -> None:
        super().__init__()
        self.module = module.eval().requires_grad_(False)
        self.precision = torch.float16 if stored == "float16" else torch.float32

    def forward(self, images: Tensor) -> Tensor:
        found = features_in(self.module(images))
        if found.ndim == 2:
            found = found[:, :, None, None]
        elif found.ndim == 3:
            found = found[:, None]
        return found.to(self.precision).float()


@dataclass(frozen=True)
class Encoder:
    """A frozen encoder.

    Args:
        module: gives what is stored
        rest: the layers after the cut, which train; None: pooled features are stored
        size: pixels per side that it expects; 0: those of the images
        statistics: mean and standard deviation that it expects images to be normalised by; None: ImageNet's
        digest: identifies layers, weights and cut
        parameters: their number in the whole encoder
        width: number of the features that the rest gives; 0 without one
    """

    name: str
    module: Frozen
    rest: nn.Module | None
    size: int
    statistics: Statistics | None
    digest: str
    parameters: int
    width: int = 0

    def augment(self, config: AugmentConfig, channels: int) -> AugmentConfig:
        """The run's augmentation, with the encoder's size and normalisation where the config leaves them open."""
        found: dict[str, Any] = {}
        if config.size is None and self.size:
            found["size"] = self.size
        if config.normalise is None and config.mean is None:
            mean, std = self.statistics or choose_statistics(AugmentConfig(normalise="imagenet"), channels)
            if len(mean) == channels:
                found |= {"mean": mean, "std": std}
        return config.model_copy(update=found)

    def shape(self, channels: int, size: int) -> tuple[int, int, int]:
        """The shape of the features of one image."""
        with torch.no_grad():
            device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
            try:
                found = self.module(torch.zeros(1, channels, size, size, device=device))
            except (RuntimeError, ValueError, AssertionError) as problem:
                raise UserError(
                    f"the encoder {self.name} takes no images of {size} pixels: {first_line(problem)}; set "
                    "augment.size to the size that it was made for"
                ) from problem
        if found.ndim != 4:
            raise UserError(
                f"the encoder {self.name} gives a tensor of the shape {tuple(found.shape)}; let it return features "
                "(B, D), maps (B, C, H, W) or tokens (B, T, D)"
            )
        channels, height, width = found.shape[1:]
        return channels, height, width


def build_encoder(config: NetConfig, channels: int = 3) -> Encoder:
    """The encoder that a config names, on the CPU.

    Raises:
        UserError: where it is unknown, its weights are missing, or a run was begun with other weights
    """
    assert config.encoder is not None
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)  # random weights, where asked for, are the same everywhere
        whole, size, statistics = _kind(config.encoder)(config.encoder, config, channels)
    whole = whole.eval().requires_grad_(False)
    digest = module_digest(whole)
    rest, width = None, 0
    if config.freeze_up_to is not None:
        digest += f"-{config.freeze_up_to}"
        whole, rest, width = cut(whole, config.freeze_up_to, config.encoder, (channels, size or TRIED))
    if config.encoder_digest not in (None, digest):
        raise UserError(
            f"the encoder {config.encoder} has changed since the run began (digest {digest}, then "
            f"{config.encoder_digest}); restore its weights, or start another run"
        )
    parameters = sum(p.numel() for part in (whole, rest) if part is not None for p in part.parameters())
    return Encoder(config.encoder, Frozen(whole, config.stored), rest, size, statistics, digest, parameters, width)


Made = tuple[nn.Module, int, Statistics | None]
"""A module that gives features, its size and its normalisation."""


def _kind(name: str) -> Callable[[str, NetConfig, int], Made]:
    kind = name.partition(":")[0]
    if ":" not in name and not name.endswith(".py"):
        return _built_in
    return {"run": _of_run, "hf": _from_hub, "monai": _from_monai}.get(kind, _from_outside)


class _FeaturesOf(nn.Module):
    """The pooled features of a net."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        if not net.has_head:
            net.body.requires_grad_(False)
        self.body = net.body

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.body(images)
        return found


def _built_in(name: str, config: NetConfig, channels: int) -> Made:
    known = [net for net in dense_names(False) if not architecture(net).configured]
    if name not in known:
        raise UserError(
            f"there is no encoder {name!r}; encoders are {', '.join(known)}, hf:NAME_OR_FOLDER, monai:NAME, "
            "run:FOLDER, package.module:NAME and file.py:NAME"
        )
    found = architecture(name)
    weights = config.encoder_weights
    if weights is None and not found.imagenet:
        raise UserError(
            f"the encoder {name} comes without weights; give a file with net.encoder_weights, name a finished run "
            "(run:FOLDER), or choose efficientnet-lite0"
        )
    net = build_net(NetConfig(name=name, weights=weights or "imagenet"), CLASSES, channels)
    statistics = choose_statistics(AugmentConfig(normalise=found.normalise), channels)
    return _FeaturesOf(net), found.size, statistics


def _from_monai(name: str, config: NetConfig, channels: int) -> Made:
    if config.encoder_weights is None:
        raise UserError(
            f"the encoder {name} comes without weights; give a file with net.encoder_weights, or none for random ones"
        )
    net = build_net(NetConfig(name=name, weights=config.encoder_weights, arguments=config.arguments), CLASSES, channels)
    return _FeaturesOf(net), 0, None


def _from_hub(name: str, config: NetConfig, channels: int) -> Made:
    weights = config.encoder_weights or "pretrained"
    net = build_net(NetConfig(name=name, weights=weights, arguments=config.arguments), CLASSES, channels)
    size, statistics = hub_preparation(name.partition(":")[2])
    about = getattr(getattr(getattr(net.body, "module", None), "config", None), "image_size", None)
    if about is not None:
        size = about if isinstance(about, int) else max(about)
    return _FeaturesOf(net), size, statistics


def hub_preparation(name: str) -> tuple[int, Statistics | None]:
    """Pixels per side, and mean and standard deviation, by the file of a model's own preparation; 0 and None without.

    The file is read as it is: transformers' own classes for it need torchvision.
    """
    from transformers import ImageProcessingMixin

    folder = Path(name).expanduser()
    try:
        told, _ = ImageProcessingMixin.get_image_processor_dict(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError):
        return 0, None
    size = told.get("crop_size") or told.get("size") or 0
    size = max(size.values()) if isinstance(size, dict) else size
    statistics = (told.get("image_mean"), told.get("image_std")) if told.get("do_normalize", True) else (None, None)
    mean, std = statistics
    return int(size), None if mean is None or std is None else (tuple(mean), tuple(std))


def _from_outside(name: str, config: NetConfig, channels: int) -> Made:
    """A module, a function that gives one, or a function `make(num_classes, channels)` that gives a net.

    The module or function may have attributes `input_size`, `mean` and `std`.
    """
    found = find(name)
    if not isinstance(found, nn.Module) and not callable(found):
        raise UserError(f"{name} is no module and no function; name one that gives features (B, D) of images")
    about = found
    if not isinstance(found, nn.Module):
        wanted = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
        if len(wanted) >= CLASSES:
            net = build_net(NetConfig(name=name, arguments=config.arguments), CLASSES, channels)
            found = _FeaturesOf(net)
        else:
            found = found(**config.arguments or {})
    if not isinstance(found, nn.Module):
        raise UserError(f"{name} gave {type(found).__name__}, not a torch.nn.Module; let it return the encoder")
    if config.encoder_weights not in (None, "none"):
        assert config.encoder_weights is not None
        try:
            found.load_state_dict(read_state(Path(config.encoder_weights)))
        except RuntimeError as problem:
            raise UserError(f"{config.encoder_weights} does not fit the encoder {name}: {problem}") from problem
    mean, std = getattr(about, "mean", None), getattr(about, "std", None)
    return (
        found,
        int(getattr(about, "input_size", 0)),
        None if mean is None or std is None else (tuple(mean), tuple(std)),
    )


def _of_run(name: str, config: NetConfig, channels: int) -> Made:
    """The body of a finished run's own global model, with that run's size and normalisation."""
    folder = Path(name.partition(":")[2]).expanduser()
    model, told, log = folder / "models" / "global.safetensors", folder / "config.toml", folder / "events.jsonl"
    if not model.is_file() or not told.is_file():
        raise UserError(f"{folder} holds no finished run: {model.name} is missing; name the folder of one")
    raw = parse_toml(told.read_bytes(), str(told))
    with log.open(encoding="utf-8") as lines:
        start = json.loads(lines.readline())
    net_config = NetConfig.model_validate({**raw["net"], "weights": "none"})
    augment = AugmentConfig.model_validate(raw["augment"])
    if net_config.frozen:
        raise UserError(f"the run in {folder} has a frozen encoder itself; name that one: {net_config.encoder}")
    if start["channels"] != channels:
        raise UserError(f"the run in {folder} took images of {start['channels']} channels, these have {channels}")
    net = build_net(net_config, len(start["classes"]), channels)
    state = {key.removeprefix("model/"): value for key, value in read_state(model).items() if key.startswith("model/")}
    own = net.state_dict()
    missing = [
        key for key in own if key.startswith("body.") and (key not in state or state[key].shape != own[key].shape)
    ]
    if missing:
        raise UserError(f"the run in {folder} has no whole global model ({missing[0]} is missing); name another run")
    with torch.no_grad():
        for key, value in own.items():
            if key.startswith("body."):
                value.copy_(state[key])
    return _FeaturesOf(net), augment.size or start["image_size"], choose_statistics(augment, channels)


def features_in(output: Any) -> Tensor:
    """The features among what a module gives."""
    for name in ("pooler_output", "last_hidden_state", "logits"):
        if getattr(output, name, None) is not None:
            output = getattr(output, name)
            break
    output = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(output, Tensor):
        raise UserError(f"an encoder gave {type(output).__name__} instead of features (B, D); let it return a tensor")
    return output
