"""Predictions of a finished run's models for new images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from equipoise.contract.composed_client import adapts
from equipoise.contract.config import Config
from equipoise.contract.method import Batch, Client, Setting
from equipoise.contract.protocol import Payload
from equipoise.core.errors import UserError
from equipoise.data.augment import AugmentConfig, build_augmentation
from equipoise.data.pixels import squares
from equipoise.data.preparation import relight
from equipoise.data.raw import SUFFIXES, decode, walk_images
from equipoise.engine.events import first_event
from equipoise.engine.payload_files import damage_named, read_payload, safe_name
from equipoise.engine.runs import config_of
from equipoise.engine.states import KEPT
from equipoise.methods import get_method
from equipoise.nets.encoders import Frozen, build_encoder
from equipoise.tasks import get_task


class Predictor(nn.Module):
    """A run's selected model as one module: pixels, uint8 (n, channels, size, size), to probabilities (n, classes).

    Of a model for segmentation, probabilities are (n, classes, size, size).

    Its submodules are the client's, without those that take no part in a prediction (generators, other models).

    Args:
        view: which of the client's models predicts, "global" or "personal"
        start: the run's first event, which holds what its data were like
    """

    def __init__(self, client: Client, view: str, start: Mapping[str, Any]) -> None:
        super().__init__()
        self.classes: tuple[str, ...] = tuple(start["classes"])
        self.size: int = start["image_size"]
        self.channels: int = start["channels"]
        self.config, self.view = client.setting.config, view
        self.task = client.setting.task
        self._client = client
        self.encoder, augment = encoder_of(client.setting.config, self.channels)
        self._augmentation = build_augmentation(augment, self.size, self.channels)
        self.parts = nn.ModuleList(self._used(client.workplace.modules()))

    def _used(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Those that are called, or of which a part is, when an image is classified."""
        called: set[nn.Module] = set()
        with register_module_forward_hook(lambda module, inputs, output: called.add(module)), torch.no_grad():
            self(torch.zeros(1, self.channels, self.size, self.size, dtype=torch.uint8))
        # The net that trains and the one that travels may be one.
        return [module for module in dict.fromkeys(modules) if not called.isdisjoint(module.modules())]

    def forward(self, pixels: Tensor) -> Tensor:
        """Probabilities (n, classes, ...) of pixels (n, channels, size, size)."""
        return self.logits(pixels).softmax(1)

    def logits(self, pixels: Tensor) -> Tensor:
        """Logits (n, classes, ...) of pixels (n, channels, size, size)."""
        return self.logits_of(self._augmentation.plain(pixels, None))

    def prepared(self, pixels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Images as the net takes them, and the targets that belong to them."""
        return self.task.augmented(self._augmentation.plain, pixels, targets, None)

    def logits_of(self, images: Tensor) -> Tensor:
        """Logits (n, classes, ...) of prepared images."""
        return self._client.predict(self.view, Batch(image=images if self.encoder is None else self.encoder(images)))


def encoder_of(config: Config, channels: int) -> tuple[Frozen | None, AugmentConfig]:
    """The frozen encoder that images go through before the net of a run, if any, and how they are made ready for it."""
    if not config.net.frozen:
        return None, config.augment
    encoder = build_encoder(config.net, channels)
    return encoder.module, encoder.augment(config.augment, channels)


def input_shape(config: Config, channels: int, size: int) -> tuple[int, int]:
    """Channels and pixels of what a run's net is given: images, or the features of a frozen encoder."""
    encoder, augment = encoder_of(config, channels)
    if encoder is None:
        return channels, size
    with torch.no_grad():
        shape = encoder(torch.zeros(1, channels, *(augment.size or size,) * 2)).shape
    return shape[1], shape[3]


def run_damage_named(run: Path) -> AbstractContextManager[None]:
    """Says that a run is damaged where what it holds cannot be used; weights of another shape are a RuntimeError."""
    return damage_named(f"the run in {run}", "take it from a copy, or train it again", RuntimeError)


def load_predictor(run: Path, site: str | None = None) -> Predictor:
    """The selected global model of a finished run, or a site's personal one, on the CPU."""
    with run_damage_named(run):
        return _load(run, site)


def probabilities_of(predictor: Predictor, pixels: Tensor) -> Tensor:
    """Probabilities (n, classes) of pixels (n, channels, size, size); a model that gives none is refused."""
    with torch.no_grad():
        probabilities = predictor(pixels)
    if not torch.isfinite(probabilities).all():
        raise UserError(
            "the run's model does not predict: its outputs are not finite; training has diverged, train again with a "
            "lower train.optimiser.lr"
        )
    return probabilities


def predict_images(run: Path, images: Sequence[Path], site: str | None = None) -> tuple[tuple[str, ...], Tensor]:
    """Class names and probabilities (n, C) of a run's selected global model, or of a site's personal one."""
    predictor = load_predictor(run, site)
    refuse_masks(predictor, "give --out FOLDER")
    return predictor.classes, probabilities_of(predictor, pixels_of(predictor, images)[0])


def refuse_masks(predictor: Predictor, remedy: str) -> None:
    """Refuse a model for segmentation where images are to be classified."""
    if predictor.task.dense:
        raise UserError(f"{predictor.config.run_name} predicts a mask for each image, and no class; {remedy}")


def pixels_of(predictor: Predictor, images: Any) -> tuple[Tensor, list[Any]]:
    """Images as a run's models take them, uint8 (n, 3, size, size), and their names.

    Args:
        images: files, a folder of them, or arrays as `equipoise.data.pixels` reads them
    """
    if isinstance(images, str | Path):
        images = files_in(Path(images))
    if not len(images):
        raise UserError("there are no images to predict; name one or more")
    if all(isinstance(image, str | Path) for image in images):
        files = [Path(image) for image in images]
        return torch.from_numpy(np.stack([_read(file, predictor.size, predictor.config) for file in files])), files
    batches = squares(images, predictor.size, predictor.config.data)
    return torch.from_numpy(np.concatenate([*batches])), [*range(len(images))]


def files_in(path: Path) -> list[Path]:
    """The image files of a folder and the folders in it, or the one file."""
    if not path.is_dir():
        return [path]
    found = [location.file for location in walk_images(path) if location.member is None]
    if not found:
        raise UserError(f"{path} has no images; known are {', '.join(sorted(SUFFIXES))}")
    return found


def _load(run: Path, site: str | None) -> Predictor:
    if not run.is_dir():
        raise UserError(f"{run} is not a folder. Name the folder of a run; `equipoise runs` lists them")
    if not (run / "models" / "global.safetensors").exists():
        raise UserError(
            f"{run} holds no finished run: models/global.safetensors is missing; "
            "an interrupted run goes on with `equipoise resume`"
        )
    config = config_of(run)
    start = first_event(run / "events.jsonl")
    method = get_method(config.method)
    channels, size = input_shape(config, start["channels"], start["image_size"])
    setting = Setting(
        config=config,
        options=method.options_of(config),
        task=get_task(start.get("task", "classification"))(start["classes"]),
        channels=channels,
        image_size=size,
        device=torch.device("cpu"),
    )
    client = method.client_class(config)(setting)
    view, personal = _model(run, site, client)
    kept: Any = personal.pop(KEPT, None)
    client.workplace.begin(read_payload(run / "models" / "global.safetensors") | personal, kept)
    client.workplace.set_mode(False)
    for tensor in client.workplace.tensors():
        tensor.requires_grad_(False)
    return Predictor(client, view, start).eval()


def _model(run: Path, site: str | None, client: Client) -> tuple[str, Payload]:
    """Which view predicts, and what it needs besides the global model."""
    views = client.views
    if site is None:
        if "global" not in views:
            known = _sites_of(run)
            raise UserError(f"this method has only personal models; name a site with --site or site= ({known})")
        return "global", {}
    if "personal" in views and adapts(type(client)):
        raise UserError(f"{client.setting.config.method} fine-tunes a site's model before each use and stores none")
    path = run / "models" / "personal" / f"{safe_name(site)}.safetensors"
    if "personal" not in views or not path.exists():
        known = _sites_of(run)
        advice = f"there are those of {known}" if known else "leave --site out for the global one"
        raise UserError(f"{run} has no personal model of site '{site}'; {advice}")
    return "personal", read_payload(path)


def sites_with_models(run: Path) -> list[str]:
    """The names of the sites that have a personal model in a run."""
    return sorted(unquote(path.stem) for path in (run / "models" / "personal").glob("*.safetensors"))


def _sites_of(run: Path) -> str:
    return ", ".join(sites_with_models(run))


def _read(path: Path, size: int, config: Config) -> np.ndarray:
    if not path.is_file():
        raise UserError(
            f"{path} is a folder: name its images"
            if path.is_dir()
            else f"{path}: there is no such image or folder; check its path"
        )
    try:
        pixels = decode(path.read_bytes(), size, config.data.crop, config.data.window)
        return relight(torch.from_numpy(pixels)[None], config.data)[0].numpy()
    except Exception as problem:
        raise UserError(f"{path} cannot be read as an image: {problem}") from None
