"""From a config to a finished run folder: what the command line, studies and tests call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.components import component_names, component_of, defaults_of, get_component, loss_names
from equipoise.contract.component import Options
from equipoise.contract.config import Config
from equipoise.contract.config_files import override, parse_config, read_raw
from equipoise.core.device_names import places_of_run
from equipoise.core.errors import UserError, parse_toml
from equipoise.core.outside import short_name
from equipoise.core.plugins import check_unchanged, described, is_plugin
from equipoise.core.table import dotted, written
from equipoise.data import load_federation
from equipoise.data.federation import Federation
from equipoise.engine.loop import Observer, Run
from equipoise.methods import all_options, check_task, get_method, method_names, option_tables
from equipoise.metrics import metric_of
from equipoise.tasks import get_task

#: images up to this size train the small net where the config names none
SMALL_PIXELS = 64


def make_config(source: str | None = None, settings: Sequence[str] = (), where: str = "", **top: Any) -> Config:
    """A config from a preset or file, with top-level values and `key=value` settings over it.

    A method's table may hold defaults for that method alone: under `[fednpr.npr]`, FedNPR gets a weight that the
    methods it is compared with do not. All options of the method are in the config, so that it states the run even if
    another version has other defaults.

    Args:
        where: what to call the config in messages
    """
    read = read_raw(source)
    raw = override(_merged(read, {k: v for k, v in top.items() if v is not None}), settings)
    raw = _composition_split(raw)
    name, added = raw["method"], raw.get("components", [])
    raw, own = _without_own_defaults(raw, name)
    implied = {} if _states_a_run(read, name, added) else _defaults(name, added)
    raw = _merged(own, raw)
    net = raw.get("net")
    if not (isinstance(net, Mapping) and net.get("encoder")):
        implied.pop("net", None)  # what a method implies of nets is about adapters
    raw = _merged(implied, raw)
    set_here = "what the command line sets" if settings or any(value is not None for value in top.values()) else ""
    where = where or " with ".join(text for text in (source, set_here) if text) or "config"
    config = parse_config(raw, option_tables(raw), where)
    table = short_name(name)
    config = _suited(
        config, {table: get_method(name).options} | {get_component(each).name: get_component(each) for each in added}
    )
    options = {table: all_options(name, config.methods.get(table, {}))}
    components = [component_of(each, config) for each in added if each != "npr"]
    options |= {component.name: written(component) for component in components}
    tables = config.methods | {key: table for key, table in options.items() if table}
    config = config.model_copy(update={"methods": dict(sorted(tables.items())), "plugins": _hashes(config)})
    get_method(name).components_of(config)  # settings that do not fit together fail here, before anything is written
    if is_plugin("metric", config.evaluation.metric):
        metric_of(config.evaluation.metric)
    return config


def _suited(config: Config, kinds: Mapping[str, type[Options]]) -> Config:
    """The config with options that suit its number of rounds, where it sets none."""
    found = {
        table: {**kind.suited(config.train.rounds)} | config.methods.get(table, {}) for table, kind in kinds.items()
    }
    return config.model_copy(update={"methods": config.methods | {table: own for table, own in found.items() if own}})


@dataclass(frozen=True)
class Planned:
    """What is known of a run before its data is loaded."""

    config: Config


def refuse_idle_parts(config: Config) -> None:
    """Refuse a run in which the defining part of its method or component cannot act."""
    added = [component_of(name, config) for name in config.components]
    parts = [(config.method, get_method(config.method).options_of(config))]
    for where, part in (*parts, *((component.name, component) for component in added)):
        idle = part.without_effect(Planned(config))
        for name in part.distinctive:
            if name in idle:
                raise UserError(
                    f"{where}.{name} = {getattr(part, name)!r} could not act: {idle[name]}. Change that, or run it "
                    "all the same with --anyway (anyway=True in Python)"
                )


def _hashes(config: Config) -> dict[str, str]:
    """The hashes of a config's plug-ins, once none differs from a hash that the config has written down."""
    found = {}
    for kind, name in config.used_plugins():
        plugin = described(kind, name)
        recorded = config.plugins.get(f"{kind} {name}")
        if recorded is not None:
            check_unchanged(plugin, recorded)
        found[f"{kind} {name}"] = plugin.digest
    return found


def _composition_split(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The raw config with `method = "fedbn+margins"` taken apart, and its components in alphabetical order."""
    name, *more = str(raw.get("method", Config.model_fields["method"].default)).split("+")
    named = raw.get("components", ())
    if isinstance(named, str):
        named = [each.strip() for each in named.split(",") if each.strip()]
    if not isinstance(named, Sequence):
        raise UserError(f'components = {named!r}: expected a list of names, such as ["margins", "npr"]')
    added = sorted({*map(str, named), *more})
    for component in added:
        get_component(component)
    return {**raw, "method": name} | ({"components": added} if added else {})


def _states_a_run(raw: Mapping[str, Any], method: str, added: Sequence[str]) -> bool:
    """Whether a config states a whole run of the method, as run folders do: a setting that it lacks is not set."""
    same = (raw.get("method"), sorted(raw.get("components", []))) == (method, sorted(added))
    return same and dotted(written(Config())).keys() <= dotted(raw).keys()


def _defaults(method: str, added: Sequence[str]) -> Any:
    """Config values that a method and the components on it imply; an added loss replaces the method's usual one."""
    found = _merged(get_method(method).defaults, defaults_of(added))
    if any("loss" in get_component(name)().holds() for name in added) and "train" in found:
        found = {**found, "train": {key: value for key, value in found["train"].items() if key != "loss"}}
    return {**found}


def config_of(folder: Path) -> Config:
    """The config of the run in a folder."""
    path = folder / "config.toml"
    if not path.is_file():
        raise UserError(f"{folder} holds no run: it has no config.toml; name a folder that a run has written")
    raw = parse_toml(path.read_bytes(), str(path))
    return parse_config(raw, option_tables(raw), str(path))


def refuse_twice(settings: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuse `key=value` settings that an option of the command line gives as well.

    Args:
        options: what options give, as tables; None where they give nothing
    """
    by_option = {key for key, value in dotted(options).items() if value is not None}
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key in by_option:
            raise UserError(f"--set {setting}: an option of the command line gives {key}, too; leave one out")


def refuse_idle_options(settings: Sequence[str], method: str, components: Sequence[str] = ()) -> None:
    """Refuse `key=value` settings that are options of a method or a component which is not in the run."""
    name, *more = method.split("+")
    used = {"npr", *(get_component(each).name for each in (*components, *more)), *loss_names().values()}
    for setting in settings:
        table = setting.partition(".")[0].strip()
        if table in method_names() and table != name:
            raise UserError(
                f"--set {setting}: the method is {name}, on which options of {table} have no effect; leave it out, or "
                f"use --method {table}"
            )
        if table in component_names() and table not in used:
            raise UserError(f"--set {setting}: the component {table} was not put on {name}; add --with {table}")


def _without_own_defaults(raw: Mapping[str, Any], method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config without general tables inside those of methods, and the ones that were inside this method's."""
    plain: dict[str, Any] = dict(raw)
    own: dict[str, Any] = {}
    for name in raw.keys() & set(method_names()):
        if isinstance(raw[name], Mapping):
            inner = {key: table for key, table in raw[name].items() if key in Config.model_fields}
            options = {key: value for key, value in plain.pop(name).items() if key not in inner}
            plain |= {name: options} if options else {}
            own = inner if name == method else own
    return plain, own


def _merged(old: Any, new: Any) -> Any:
    """New values over old ones, table by table."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return dict(old) | {key: _merged(old.get(key), value) for key, value in new.items()}
    return new


def choose_device(wanted: str) -> str:
    """The device that a name means, the first of several; "auto" is the GPU where there is one."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    places = places_of_run(wanted)
    for place in places:
        _check_device(place)
    if torch.device(places[0]).type == "cuda" and ":" in places[0]:
        torch.cuda.set_device(places[0])  # streams, captures and Equipoise's kernels go to the current one
    return places[0]


def _check_device(name: str) -> None:
    """Refuse a device that this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"compute.device = {name!r} is no device; use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("compute.device = 'cuda', but this machine has no usable GPU; use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"compute.device = {name!r}: only auto, cpu and cuda are supported; on a Mac use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"compute.device = {name!r}, but this machine has {torch.cuda.device_count()} usable GPUs")


def prepare_run(config: Config, folder: Path, observers: Sequence[Observer] = (), progress: bool = False) -> Run:
    """A run that is ready to execute: data loaded, what the config leaves open decided by the data.

    Args:
        progress: show a bar where features of a frozen encoder are computed
    """
    device = choose_device(config.compute.device)
    federation = load_federation(config.data, config.seed)
    config, federation = with_encoder(decided_by_data(config, federation), federation, device, progress)
    return Run(config, get_method(config.method), federation, folder, observers, device)


def decided_by_data(config: Config, federation: Federation) -> Config:
    """The config with a net and a metric that suit the data, where it names none; what does not suit is refused."""
    task = get_task(federation.task)
    found: dict[str, Any] = {}
    if "name" not in config.net.model_fields_set:
        large = (config.augment.size or federation.image_size) > SMALL_PIXELS
        found["net"] = config.net.model_copy(update={"name": task.nets[large]})
    known = [metric.name for metric in task.metrics if metric.chooses]
    if task.name == "classification" and is_plugin("metric", config.evaluation.metric):
        known.append(config.evaluation.metric)
    if config.evaluation.metric not in known:
        if "metric" in config.evaluation.model_fields_set:
            raise UserError(
                f"evaluation.metric = '{config.evaluation.metric}' is no score of {task.name}; choose one of "
                + ", ".join(known)
            )
        found["evaluation"] = config.evaluation.model_copy(update={"metric": known[0]})
    config = config.model_copy(update=found)
    check_task(config, task)
    return config


def with_encoder(
    config: Config, federation: Federation, device: str = "cpu", progress: bool = False
) -> tuple[Config, Federation]:
    """The config with its encoder pinned down, and the federation with that encoder's features for images.

    LoRA trains on images: the federation keeps them, and the config says how the encoder expects them. Without an
    encoder both stay unchanged.
    """
    if config.net.encoder is None or federation.features is not None:
        return config, federation
    augment = config.augment
    if config.net.low_rank:
        from equipoise.nets.encoders import build_encoder

        encoder = build_encoder(config.net, federation.channels)
        digest, augment = encoder.digest, encoder.augment(augment, federation.channels)
    else:
        from equipoise.nets.features import with_features

        federation = with_features(federation, config.net, augment, device, progress)
        assert federation.features is not None
        digest = federation.features.encoder
    net = config.net.model_copy(update={"encoder_digest": digest})
    return config.model_copy(update={"net": net, "augment": augment}), federation
