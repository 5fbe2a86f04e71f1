"""A run from Python: a federation, a method, and any setting of a config. The command line starts runs here, too."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from equipoise import report
from equipoise.api.objects import component_settings, name_of, refuse_workers, with_names
from equipoise.api.progress import ProgressDisplay
from equipoise.contract.component import Component
from equipoise.contract.config import Config
from equipoise.contract.method import Method
from equipoise.core.errors import UserError
from equipoise.core.table import dotted
from equipoise.data.federation import Federation
from equipoise.engine.payload_files import refuse_foreign
from equipoise.engine.runs import make_config, prepare_run, refuse_idle_options, refuse_idle_parts
from equipoise.engine.tracking import Trackers, check_trackers

if TYPE_CHECKING:
    from equipoise.api.result import Result

RUNS = Path("runs")


def load_federation(source: str | Path | Any, **settings: Any) -> Federation:
    """The federation of a source: `phantom`, `folder:DIR`, `manifest:FILE` or a built-in data set.

    A drawn partition follows the seed of the run that trains on it, as in a config. `Federation.table` shows it for
    seed 1, and `partition_seed=1` makes it the same for all runs.

    >>> load_federation("phantom", phantom={"images": 200, "sites": 2, "size": 16}).table().sum().sum()
    np.int64(200)

    Args:
        source: as `equipoise data list` lists them, `file.py`, `package.module:NAME`, or an object with what the
            built-in sources have: TITLE, SIZE, PARTITION and `listing(config, root)`
        **settings: any setting of the table `data`: `sites=5, partition="dirichlet_per_class"`, `root="downloads"`

    Raises:
        UserError: when the data is not there or cannot make a federation
    """
    from equipoise.data.from_python import loaded

    return loaded(str(source) if isinstance(source, Path) else name_of("source", source), settings)


def train(
    federation: Federation | str | None,
    method: str | Method = "fedavg",
    *,
    components: Sequence[str | type[Component] | Component] = (),
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    net: Any = None,
    seed: int | None = None,
    device: str | None = None,
    workers: int | None = None,
    out: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset: str | Path | None = None,
    track: Sequence[str] = (),
    resume: bool = False,
    anyway: bool = False,
    progress: bool | None = None,
) -> Result:
    """Train a federation, test the selected models, and write the run's folder with its report.

    The same run by the command line or from its `config.toml` gives the same bits.

    >>> from equipoise import load_federation, train
    >>> fed = load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> result = train(fed, "fedavg", rounds=2, epochs=1, seed=1, out="runs/first")
    >>> result.finished
    True

    Args:
        federation: from `load_federation` or `Federation.from_...`, the name of a source such as `phantom`, or None
            for the data that the preset or the settings name
        method: a name that `equipoise methods` lists, `file.py`, `package.module:NAME`, or a `Method`
        components: ideas to put on the method: names, `file.py`, `package.module:NAME`, classes or instances
        net: the name of a net, a `torch.nn.Module`, or a function `make(num_classes, channels)` that gives one
        seed: of weights, batches and drawn partitions; 1 by default
        out: the run's folder; by default `runs/` and a name made of method, data and seed
        settings: any other key of a config: `{"prr.pfa": "off", "train.aggregation": "uniform"}`. `train.loss` takes a
            function of logits and labels as well, `evaluation.metric` a function of a `Tally`
        preset: a preset, or a TOML file, that the other arguments change
        track: trackers that get the scores as well: "tensorboard", "mlflow"
        resume: go on after the last complete round of the run in `out`
        anyway: run also where the settings leave the method's distinctive part without effect
        progress: show bars and losses; by default in a terminal or a notebook

    Raises:
        UserError: for settings that make no sense, before anything is written
    """
    given = named_settings(
        settings,
        method=method,
        components=components,
        rounds=rounds,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        net=net,
        seed=seed,
        device=device,
        workers=workers,
    )
    refuse_no_data(federation, given, preset)
    source = None if preset is None else str(preset)
    where = "settings" if source is None else f"{source} with settings"
    config = make_config(source, where=where, **nested(given | data_of(federation, given)))
    refuse_idle_options([*dotted(settings or {})], config.method, config.components)
    refuse_workers(config)
    folder = None if out is None else Path(out)
    return run_config(config, folder, resume=resume, track=track, anyway=anyway, progress=progress)


def run_config(
    config: Config,
    folder: Path | None = None,
    *,
    resume: bool = False,
    track: Sequence[str] = (),
    anyway: bool = False,
    progress: bool | None = None,
    console: Console | None = None,
) -> Result:
    """Run a config in a folder to the end, and write the report; by default in `runs/`, under the run's name."""
    folder = folder or RUNS / config.run_name
    names = check_trackers(track)
    if not (anyway or resume):
        refuse_idle_parts(config)
    refuse_foreign(folder)
    console = console or Console()
    shown = is_watched(console) if progress is None else progress
    with Trackers(names, folder) as trackers:
        with ProgressDisplay(console, config.train.rounds, config.evaluation.metric, config.run_name, shown) as display:
            for _ in prepare_run(config, folder, [display, trackers], shown).steps(resume):
                pass
        trackers.report = report.write_report([folder])
    from equipoise.api.result import Result  # its tables need pandas, for which the first step need not wait

    return Result(folder)


#: the keys of a config that arguments of `train` and `compare` stand for, where the names differ
KEYS = {
    "rounds": "train.rounds",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "lr": "train.optimiser.lr",
    "net": "net.name",
    "device": "compute.device",
    "workers": "compute.workers",
}


def named_settings(settings: Mapping[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """Settings by dotted key: those that arguments stand for, and all others; none may be given twice."""
    if not isinstance(settings, Mapping | None):
        raise UserError(f"settings = {settings!r} is no table; give keys with their values: {{'train.rounds': 20}}")
    parts = component_settings(arguments.pop("components", ()))
    given = with_names({KEYS.get(name, name): value for name, value in arguments.items() if value is not None}) | parts
    more = with_names(dotted(settings or {}))
    twice = sorted(given.keys() & more.keys())
    if twice:
        raise UserError(f"{twice[0]} is given as an argument and in settings; leave one out")
    return given | more


def refuse_no_data(federation: Any, settings: Mapping[str, Any], preset: str | Path | None) -> None:
    """Refuse to train on built-in images in place of data that the program forgot to give."""
    if federation is None and preset is None and "data.name" not in settings:
        raise UserError(
            "federation is None, and no preset and no data.name tells the images; give a federation, or the name of a "
            "source such as 'phantom', the built-in images"
        )
    refuse_no_federation(federation)


def refuse_no_federation(federation: Any) -> None:
    """Refuse what is neither a federation nor the name of a source."""
    if not isinstance(federation, Federation | str | None):
        raise UserError(
            f"federation = {type(federation).__name__} is no federation; make one with load_federation or "
            "Federation.from_arrays, or name a source"
        )


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{dotted key: value} as nested tables.

    >>> nested({"train.rounds": 2, "train.epochs": 1, "seed": 3})
    {'train': {'rounds': 2, 'epochs': 1}, 'seed': 3}
    """
    tables: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise UserError(f"settings: {key} lies in {part}, which is a value and no table; leave one out")
        table[name] = value
    return tables


def data_of(federation: Federation | str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a federation's data, without those that are given anew."""
    if federation is None:
        return {}
    if isinstance(federation, str):
        return {"data.name": federation}
    if federation.config is None:
        raise UserError(
            "this federation does not name its images' source, so an interrupted run could not resume; make it with "
            "load_federation or Federation.from_arrays"
        )
    told = dotted(federation.config.model_dump(mode="json", exclude_unset=True, exclude_none=True), "data.")
    return {key: value for key, value in told.items() if key not in settings}


def is_watched(console: Console) -> bool:
    """Whether somebody sees what a console paints: a terminal or a notebook."""
    return console.is_terminal or console.is_jupyter or sys.stdout.isatty()
