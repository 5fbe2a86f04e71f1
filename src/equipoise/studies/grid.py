"""The grid of a study: its runs, where they lie, and the config of each."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.core.outside import short_name
from equipoise.core.table import dotted
from equipoise.studies.study_file import DataSet, Row, StudyConfig


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    row: Row
    data: DataSet | None
    seed: int
    folder: Path
    fold: int | None = None

    @property
    def data_name(self) -> str:
        """The data set's name; empty where the study has no list of them."""
        return self.data.name if self.data else ""

    @property
    def label(self) -> str:
        """The run in words."""
        return f"{self.data.name}: {self.folder.name}" if self.data else self.folder.name


def grid(
    study: StudyConfig,
    folder: Path,
    only: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    full: bool = False,
) -> list[Cell]:
    """The runs of a study: every row's first seed before any second one, so that tables fill up evenly.

    `only` names rows, `seeds` replaces theirs, `full` adds those kept for later.
    """
    unknown = sorted(set(only or ()) - {row.name for row in study.rows})
    if unknown:
        names = ", ".join(repr(row.name) for row in study.rows)
        raise UserError(f"study {study.name} has no row {unknown[0]!r}; rows: {names}")
    rows = [row for row in study.rows if only is None or row.name in only]
    wanted = {row.name: _seeds(study, row, seeds, full) for row in rows}
    return [
        _cell(folder, row, data, wanted[row.name][place], fold)
        for place in range(max((len(own) for own in wanted.values()), default=0))
        for data in study.data_sets
        for row in rows
        if place < len(wanted[row.name])
        for fold in study.each_fold
    ]


def _seeds(study: StudyConfig, row: Row, seeds: Sequence[int] | None, full: bool) -> tuple[int, ...]:
    if seeds is not None:
        return tuple(seeds)
    first = study.seeds if row.seeds is None else row.seeds
    return first + row.later if full else first


def _runs_folder(folder: Path, data: DataSet | None) -> Path:
    return folder / "runs" / data.name if data else folder / "runs"


def _cell(folder: Path, row: Row, data: DataSet | None, seed: int, fold: int | None) -> Cell:
    name = f"{row.name}-seed{seed}" + ("" if fold is None else f"-fold{fold}")
    return Cell(row, data, seed, _runs_folder(folder, data) / name, fold)


#: the name of a run's folder: its row, its seed and, in a cross-validation, its fold
RUN_NAME = re.compile(r"(.*)-seed(\d+)(?:-fold(\d+))?")


def known_cells(study: StudyConfig, folder: Path, beyond: Container[Path] = ()) -> list[Cell]:
    """Every run of the study that has a folder, of any seed, except those in the folders `beyond`."""
    found = []
    for data in study.data_sets:
        begun: dict[str, list[tuple[int, int | None]]] = {}
        for path in _runs_folder(folder, data).glob("*-seed*"):
            named = RUN_NAME.fullmatch(path.name)
            if named and path not in beyond and ((path / "events.jsonl").is_file() or (path / "models").is_dir()):
                fold = None if named[3] is None else int(named[3])
                if fold in study.each_fold:
                    begun.setdefault(named[1], []).append((int(named[2]), fold))
        found += [
            _cell(folder, row, data, seed, fold)
            for row in study.rows
            for seed, fold in sorted(begun.get(row.name, ()), key=lambda one: (one[0], one[1] or 0))
        ]
    return found


def strangers(study: StudyConfig, folder: Path) -> list[str]:
    """Runs in the study's folder that belong to no row of it, after a change of names, say."""
    known, runs = {row.name for row in study.rows}, folder / "runs"
    places = (_runs_folder(folder, data).glob("*-seed*/events.jsonl") for data in study.data_sets)
    names = [path.parent for place in places for path in sorted(place)]
    return [str(path.relative_to(runs)) for path in names if _row_of(path.name) not in known]


def _row_of(name: str) -> str:
    """The row in the name of a run's folder."""
    named = RUN_NAME.fullmatch(name)
    return named[1] if named else name.rpartition("-seed")[0]


def cell_config(study: StudyConfig, cell: Cell, settings: Sequence[str] = ()) -> Config:
    """The config of one run: preset, study, data set, row, then `key=value` settings of the command line."""
    from equipoise.engine.runs import make_config, refuse_idle_options
    from equipoise.methods import get_method

    tables = (study.settings, cell.data.settings if cell.data else {}, cell.row.settings)
    over = [setting for table in tables for setting in as_settings(table)]
    over += [] if cell.fold is None else [f"data.folds={study.folds}", f"data.fold={cell.fold}"]
    if (cell.row.view or study.scope) == "trained":
        over.append(f"evaluation.{'trained_test' if study.part == 'test' else 'trained'}=true")
    where = f"study {study.name}, row {cell.row.name}" + (" with what the command line sets" if settings else "")
    try:
        refuse_idle_options(list(as_settings(cell.row.settings)), cell.row.method)
    except UserError as problem:
        raise UserError(f"{where}: {str(problem).removeprefix('--set ')}") from None
    top: dict[str, Any] = {"method": cell.row.method, "seed": cell.seed, "name": cell.folder.name}
    config = make_config(study.preset, [*over, *settings], where, **top)
    views = get_method(config.method).client_class(config).views
    if cell.row.view in ("global", "personal") and cell.row.view not in views:
        raise UserError(f"{where}: view = '{cell.row.view}', but {config.method} has only {' and '.join(views)} models")
    if study.scope == "common" and "global" in views:
        over.append("evaluation.view=global")  # the model that is reported is the one that is selected
        config = make_config(study.preset, [*over, *settings], where, **top)
    return config


def no_common_set(study: StudyConfig, whose: str, part: str, held: str = "") -> UserError:
    """The message, with advice, if a study of a common set finds none; `held` names who has its images."""
    holders = f": {part} images are held by {held}" if held else ""
    return UserError(
        f'study {study.name} has scope = "common", but the data of {whose} has no common {part} set{holders}. Write '
        'scope = "sites" into the study file, or run it on data with a common set: a store made with one, '
        "data.phantom.common = true, or a drawn data.partition"
    )


def as_settings(table: Mapping[str, Any]) -> Iterator[str]:
    """Nested tables as the `key=value` settings that `--set` takes."""
    for key, value in dotted(table).items():
        text = tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
        yield f"{key}={text}"


def deviations(planned: Config, recorded: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings in which a run's recorded config differs from the planned one: {key: (recorded, planned)}.

    What the config left to the data (the net's name), where a run is computed and stored, how many images are scored at
    once, and options of other methods do not count; the precision does. A setting that the run's version did not know
    yet, or an option that it did not write down, was at its default.
    """
    from equipoise.methods import all_options, method_names

    wanted = dotted(planned.model_dump(mode="json"))
    defaults = {"methods": {short_name(planned.method): all_options(planned.method, {})}}
    found = _usual() | dotted(defaults) | dotted(recorded)
    if "name" not in planned.net.model_fields_set:
        found["net.name"] = wanted["net.name"]
    others = tuple(f"methods.{method}." for method in method_names() if method != planned.method)
    ignored = (
        "name",
        "report.",
        "compute.",
        "checkpoint.",
        "data.root",
        "data.store",
        "evaluation.batch_size",
        *others,
    )
    keys = [key for key in {**wanted, **found} if key == "compute.precision" or not key.startswith(ignored)]
    differing = [key for key in keys if found.get(key) != wanted.get(key) and not _unrecorded(key, found)]
    return {key.removeprefix("methods."): (found.get(key), wanted.get(key)) for key in differing}


@cache
def _usual() -> dict[str, Any]:
    """Every setting at its default."""
    return dotted(Config().model_dump(mode="json"))


def _unrecorded(key: str, recorded: Mapping[str, Any]) -> bool:
    """Whether a key is the hash of a plug-in, which runs of earlier versions did not write down."""
    return key.startswith("plugins.") and key not in recorded


def listed(names: Iterable[str]) -> str:
    """Names of rows or runs in a sentence; names with a comma are in quotation marks."""
    return ", ".join(f"'{name}'" if "," in name else name for name in names)
