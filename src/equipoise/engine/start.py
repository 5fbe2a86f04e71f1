"""The start of a run: what is checked before anything is written, and what its log tells first."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.contract.config import Config
from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import payload_bytes
from equipoise.core.errors import UserError
from equipoise.core.plugins import described
from equipoise.core.storage import write_text
from equipoise.core.version import __version__
from equipoise.data.federation import Federation
from equipoise.engine.disclosure import run_sheet
from equipoise.engine.engine import Engine
from equipoise.engine.opening import alone, approximate, cautions, ineffective, without_own_loss
from equipoise.engine.private import CERTIFICATE, certificate, check_private
from equipoise.nets import Net


def check_run(config: Config, method: Method, setting: Setting, federation: Federation, sites: Sequence[str]) -> None:
    """Check what can be checked before anything is written; `sites` are those that train."""
    limit = config.privacy.limit
    if not sites:
        few = f" of a class in at least privacy.least = {limit}" if limit > 1 else ""
        raise UserError(f"{federation.name}: no site has training images{few}")
    if method.pooled and limit > 1:
        raise UserError(
            f"{config.method} pools all images, so privacy.least = {limit} holds nothing back; set it to 0, or choose "
            "another method"
        )
    check_private(config, method, setting)
    if config.train.min_sites > len(sites):
        raise UserError(
            f"train.min_sites = {config.train.min_sites}, but {len(sites)} sites have training images; "
            f"set it to {len(sites)} or less"
        )
    if config.least_answers > len(sites):
        raise UserError(
            f"privacy.secure_sums adds up {config.least_answers} sites at least, but {len(sites)} have training "
            "images: with two, each could compute the other's values; add sites, or set it to false"
        )


def opening_warnings(
    engine: Engine, federation: Federation, told: Mapping[str, Any], sites: Sequence[str], tested: list[str], view: str
) -> list[str]:
    """Warnings about settings and data.

    Args:
        told: what the run tells of its data
        tested: the training sites with test images
        view: the models whose validation score selects the round
    """
    setting, method = engine.setting, engine.method
    return [
        *federation.warnings,
        *ineffective(setting, method, tested, view),
        *approximate(setting.config.privacy.limit, told),
        *alone(setting, method, sites),
        *cautions(setting, method, told["sites"]),
        *without_own_loss(setting, method),
        *setting.options.cautions(setting, told["sites"]),
    ]


def start_facts(
    engine: Engine, federation: Federation, told: Mapping[str, Any], warnings: Sequence[str], folder: Path
) -> dict[str, Any]:
    """What the log tells before the first round; the promise of differential privacy is also a file of the folder."""
    setting, method = engine.setting, engine.method
    config, net = setting.config, setting.new_net()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "run": config.run_name,
        "method": config.composition,
        "version": __version__,
        "device": setting.device.type,
        "config": config.model_dump(mode="json"),
        **told,
        "task": setting.task.name,
        "image_size": federation.image_size,
        "channels": federation.channels,
        **_of_encoder(net, federation),
        "warnings": warnings,
        "plugins": [vars(described(kind, name)) for kind, name in config.used_plugins()],
        "disclosure": run_sheet(method, engine.client, type(setting.task)),
        "paper": method.paper,
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "model_bytes": payload_bytes({"net": net.state_dict()}),
        **_certified(engine, federation, folder),
    }


def _certified(engine: Engine, federation: Federation, folder: Path) -> dict[str, Any]:
    if engine.setting.config.privacy.epsilon is None:
        return {}
    found = certificate(engine.setting.config, federation, engine.sees_images)
    write_text(folder / CERTIFICATE, json.dumps(found, indent=2) + "\n")
    return {"certificate": found}


def _of_encoder(net: Net, federation: Federation) -> dict[str, Any]:
    """What a run with a frozen encoder tells besides: the shape of its features, and what the encoder is like."""
    if net.frozen_parameters:
        return {"encoder": {"parameters": net.frozen_parameters}}
    seen = federation.features
    if seen is None:
        return {}
    encoder = {"parameters": seen.parameters, "seconds": seen.seconds}
    return {"features": list(seen.shape), "encoder": {key: v for key, v in encoder.items() if v is not None}}
