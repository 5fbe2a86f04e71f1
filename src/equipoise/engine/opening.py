"""Where a run begins: at the start, or after its folder's last checkpoint of the same run. Its opening warnings are
here, too.

A folder with a run in it is never overwritten unasked.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.components import get_component
from equipoise.contract.component import Component, Options
from equipoise.contract.config import Config
from equipoise.contract.method import Method, Setting
from equipoise.core.errors import UserError, parse_toml
from equipoise.core.table import dotted, tables_in
from equipoise.data.federation import Federation, Site
from equipoise.engine.checkpoint import Checkpoints, Manifest, fingerprint
from equipoise.engine.events import events_in, first_event

SHOWN_CHANGES, NOT_SET = 5, "not written down"


def check_new(folder: Path, log: Path) -> None:
    """Refuse to begin where there is a run."""
    if log.exists():
        raise UserError(f"{folder} already holds a run; use --resume to go on, or another --out")


def resumed(
    folder: Path,
    log: Path,
    checkpoints: Checkpoints,
    config: Config,
    data: str,
    check_sites: Callable[[Mapping[str, str]], None],
) -> Manifest | None:
    """The checkpoint to go on from; None where the run in the folder, if any, has not finished a round.

    Args:
        data: fingerprint of the federation
        check_sites: reads the site versions that a manifest names
    """
    latest = checkpoints.latest(check_sites)
    if latest is None:
        if log.exists() and any(event.get("event") == "round" for event in events_in(log.read_bytes())):
            raise UserError(
                f"{folder} has no checkpoint to go on from; delete the folder to run it anew, or choose another --out"
            )
        return None
    if latest.digest != config.digest() and not _extends(folder, config, latest):
        if (longest := _longer(folder, config, latest)) is not None:
            raise UserError(
                f"the run in {folder} has {longest} rounds and cannot be made shorter, to {config.train.rounds}; ask "
                f"for {longest} or more, or choose another --out"
            )
        changes = _changes(folder, config)
        raise UserError(
            f"{folder} holds a run of another config{changes}; choose another --out"
            if changes
            else f"{folder}/config.toml was edited after its run began; undo the edit, or start a new run of a copy"
        )
    _check_plugins(folder, config)
    if latest.data != data:
        raise UserError(f"the data has changed since the run in {folder} began; choose another --out")
    return latest


def _check_plugins(folder: Path, config: Config) -> None:
    """Refuse to go on with a plug-in whose source has changed since the run began."""
    recorded = _config_written(folder).get("plugins", {})
    for name, digest in config.plugins.items():
        if recorded.get(name, digest) != digest:
            raise UserError(
                f"the {name} has changed since the run in {folder} began; put its file back, or choose another --out"
            )


def warned_on_resume(log: Path, useless: Sequence[int], device: str) -> Iterator[str]:
    """Warnings about what a run that goes on met: checkpoints of `useless` rounds, another device than it began on."""
    if useless:
        yield f"damaged checkpoints were deleted when the run went on: round {', '.join(map(str, useless))}"
    began = first_event(log).get("device", device)
    if began != device:
        yield (
            f"the run began on {began} and continues on {device}, so its scores may differ slightly from either's; "
            f"add --device {began}"
        )


def rounds_before(folder: Path, config: Config) -> int | None:
    """The number of rounds that the run in a folder had so far, where its config now asks for more; else None."""
    before = _rounds_written(folder)
    return before if before is not None and before < config.train.rounds else None


def _config_written(folder: Path) -> dict[str, Any]:
    """The config that the run in a folder wrote; nothing where it wrote none."""
    path = folder / "config.toml"
    return parse_toml(path.read_bytes(), f"{path}, which the run wrote,") if path.exists() else {}


def _rounds_written(folder: Path) -> int | None:
    before = dotted(_config_written(folder)).get("train.rounds")
    return before if isinstance(before, int) else None


def _longer(folder: Path, config: Config, latest: Manifest) -> int | None:
    """The rounds of the run in the folder, where the config asks for fewer and differs in nothing else; else None."""
    before = _rounds_written(folder)
    alike = before is not None and config.with_rounds(before).digest() == latest.digest
    return before if alike else None


def _extends(folder: Path, config: Config, latest: Manifest) -> bool:
    """Whether a config differs from that of the run in the folder in nothing but more rounds."""
    before = rounds_before(folder, config)
    return before is not None and config.with_rounds(before).digest() == latest.digest


def _changes(folder: Path, config: Config) -> str:
    """Which settings differ from those of the run in the folder, in words."""
    before, now = dotted(_config_written(folder)), dotted(tomllib.loads(config.to_toml()))
    if not before:
        return ""
    keys = [key for key in sorted({**before, **now}) if before.get(key) != now.get(key)]
    changes = [f"{key} was {before.get(key, NOT_SET)}, is {now.get(key, NOT_SET)}" for key in keys[:SHOWN_CHANGES]]
    return f": {', '.join(changes)}" if changes else ""


# ---- warnings at a run's start ------------------------------------------------------------------------------------


def class_counts(site: Site, num_classes: int, least: int = 0) -> dict[str, Any]:
    """How many images of each class a site has in each part; 0 of a class of fewer than `least`."""
    counts = {part: site.class_counts(num_classes, part) for part in ("train", "valid", "test")}
    return {"name": site.name} | {part: np.where(own < least, 0, own).tolist() for part, own in counts.items()}


def data_told(federation: Federation, least: int = 0) -> dict[str, Any]:
    """What the start of a run tells of its data: numbers, and fingerprints of all images and of those that judge."""
    return {
        "classes": list(federation.classes),
        "sites": [class_counts(place, len(federation.classes), least) for place in federation.places()],
        "data": fingerprint(federation),
        "judging_data": fingerprint(federation, ("valid", "test")),
    }


def cautions(setting: Setting, method: Method, sites: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Warnings about settings that can do harm on this data; `sites` as `class_counts` has them.

    At a site that lacks a class, only weight decay moves the class's weights. Adam turns this into full steps, which
    erase the other sites' training of the class in every round.
    """
    config, optimiser = setting.config, setting.config.train.optimiser
    for component in method.components_of(config):
        yield from component.remarks(setting)
    if optimiser.name != "adam" or not optimiser.weight_decay or not config.npr.supervised:
        return
    if not optimiser.decay_absent:
        return
    trained = [site["train"] for site in sites if any(site["train"])]
    missing_somewhere = any(any(counts) and not all(counts) for counts in zip(*trained, strict=True))
    components = method.components_of(config)
    lacks = setting.options.lacks().union(*(component.lacks() for component in components))
    given = {word for component in components for word in component.gives()}
    if missing_somewhere and "absent classes" in lacks - given:
        yield (
            f"some sites lack classes that others have, and {config.method} hardly trains the weights of these "
            "classes there. Weight decay still moves them with Adam's full steps, so models may predict them much too "
            "often or never. Set train.optimiser.decay_absent = false. Or "
            'set name = "adamw" to decouple weight decay, or weight_decay = 0 to remove it'
        )


def approximate(least: int, told: Mapping[str, Any]) -> Iterator[str]:
    """What `privacy.least` does to the scores of a run, where it does anything; `told` as `data_told` has it."""
    if least > 1:
        yield (
            f"privacy.least = {least}: scores leave out the images of classes of which a site has fewer than {least} "
            f"in a part. Confusion cells below {least} join others, so recall, F1, accuracy and ECE are approximate; "
            "AUC and loss are exact"
        )
        for part, what in (("valid", "validation"), ("test", "test")):
            counts = zip(*(site[part] for site in told["sites"]), strict=True)
            silent = [name for name, own in zip(told["classes"], counts, strict=False) if not any(own)]
            if 0 < len(silent) < len(told["classes"]):
                yield (
                    f"privacy.least = {least}: no site may tell of its {what} images of {', '.join(silent)}. The "
                    f"{what} scores are those of the other classes alone, and say nothing of these"
                )


def without_own_loss(setting: Setting, method: Method) -> Iterator[str]:
    """A warning where a preset or the user takes away the loss that a method consists of."""
    usual, loss = method.defaults.get("train", {}).get("loss"), setting.config.train.loss
    if usual and loss != usual:
        yield (
            f"train.loss = '{loss}' replaces {usual}, the default loss of {setting.config.method}; "
            f"--set train.loss={usual} restores it"
        )


def alone(setting: Setting, method: Method, sites: Sequence[str]) -> Iterator[str]:
    """A warning where a method exchanges models, and there is one site to train on."""
    config = setting.config
    exchanges = not method.pooled and any(method.client_class(config).discloses.values())
    if len(sites) == 1 and exchanges:
        yield (
            f"only one site trains ({sites[0]}), so {config.method} exchanges nothing with other sites. Name the "
            "hospitals in a column site or in folders site/class/, or divide the images with data.partition and "
            "data.sites"
        )


def ineffective(setting: Setting, method: Method, tested: Sequence[str], judged: str) -> Iterator[str]:
    """Warnings about settings that differ from their defaults but do nothing under this method or on this data.

    `tested` are the training sites with test images, `judged` is the view whose validation scores choose the round.
    """
    config, components = setting.config, method.components_of(setting.config)
    replaced = _replaced(setting, components)
    values, usual = config.model_dump(), Config().model_dump()
    for key, reason in replaced.items():
        table, _, name = key.partition(".")
        if values[table][name] != usual[table][name]:
            yield f"{key} = {values[table][name]!r} has no effect: {reason}"
    chosen = {get_component(name).name for name in config.components}
    added = [(component.name, component) for component in components if component.name in chosen]
    for where, part in (*tables_in(config), (config.method, setting.options), *added):
        idle = {} if where in replaced else part.without_effect(setting)
        always = part.distinctive if isinstance(part, Options) else ()
        suited = part.suited(config.train.rounds) if isinstance(part, Options) else {}
        for name, reason in idle.items():
            if "." not in name:
                value = getattr(part, name)
                usual = suited.get(name, type(part).model_fields[name].default)
                if name in always or value != usual:
                    yield f"{where}.{name} = {value!r} has no effect: {reason}"
    usual_loss = method.defaults.get("train", {}).get("loss", "ce")
    if config.train.loss == "ce" != usual_loss and "train.loss" not in replaced and not config.components:
        yield f"train.loss = 'ce' replaces {usual_loss}, the loss of {config.method}; leave train.loss out to keep it"
    if config.evaluation.select == "site" and judged == "global":
        yield "evaluation.select = 'site' has no effect: the global model selects the round, and all sites share it"
    if config.evaluation.trained_test and not tested:
        yield "evaluation.trained_test = True has no effect: no training site has separate test images"


def _replaced(setting: Setting, components: Sequence[Component]) -> dict[str, str]:
    """General settings that the method or a component replaces, and why."""
    config = setting.config
    found: dict[str, str] = {}
    for part in (setting.options, *components):
        found |= {key: why for key, why in part.without_effect(setting).items() if "." in key}
    if setting.options.holds() & {"loss", "train.loss"}:
        found["train.loss"] = f"{config.method} brings its own"
    for component in components:
        if "loss" in component.holds() and getattr(component, "loss_name", "") != config.train.loss:
            found["train.loss"] = f"{component.name} is the loss"
    return found
