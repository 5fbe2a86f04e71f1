"""A study as it stands in its TOML file: rows (a method with settings) x seeds x data sets, and the paper's numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from equipoise.contract.config import Config, Table, parse_toml, validated
from equipoise.core.errors import UserError
from equipoise.core.table import dotted
from equipoise.engine.runs import make_config, refuse_idle_options
from equipoise.methods import all_options, get_method, method_names
from equipoise.metrics import METRICS

#: the metrics of a study that names none
STUDY_METRICS = tuple(m.name for m in sorted(METRICS, key=lambda metric: metric.study_place) if m.in_tables)
if TYPE_CHECKING:
    StudyMetric = str
else:
    StudyMetric = Literal[STUDY_METRICS]


def check_name(name: str) -> str:
    """Refuse a name that could not be a folder's.

    Raises:
        ValueError: saying what names are made of
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 .,+=_-]{0,99}", name) or name != name.rstrip():
        raise ValueError(
            "a name has up to 100 letters, digits, spaces and .,+=_-; it begins with a letter or digit, and ends in no "
            "space"
        )
    return name


Name = Annotated[str, AfterValidator(check_name)]
PART_TITLES = {"test": "test", "valid": "validation"}
PerCent = Annotated[float, Field(ge=0, le=100)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
#: what a row and its seed decide, and no setting may
DECIDED = ("method", "seed", "name")


def listed(names: Iterable[str]) -> str:
    """Names of rows or runs in a sentence; those that have a comma of their own are in quotation marks."""
    return ", ".join(f"'{name}'" if "," in name else name for name in names)


def check_undecided(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse settings of what rows and seeds decide.

    Raises:
        ValueError: naming the first
    """
    for key in DECIDED:
        if key in settings:
            raise ValueError(f"'{key}' is no setting of a study: rows name their method, and seeds are listed")
    return settings


Settings = Annotated[dict[str, Any], AfterValidator(check_undecided)]


class Row(Table):
    """One line of a table: a method with settings of its own."""

    name: Name
    method: str
    settings: Settings = Field({}, description="config tables over those of the study")
    seeds: tuple[Seed, ...] | None = Field(None, description="default: the study's; none at all: only later ones")
    later: tuple[Seed, ...] = Field((), description="further seeds of the full grid")
    tables: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="the tables that the row stands in; default the study's one table"
    )
    paper: dict[StudyMetric, PerCent] = Field({}, description="what the paper reports, in per cent")
    paper_cohort: dict[StudyMetric, PerCent] = Field({}, description="the same for the unseen cohort")
    view: Literal["global", "personal", "trained"] | None = Field(
        None, description="the models that the row reports, trained: right after local training; default by scope"
    )
    note: str = ""


class DataSet(Table):
    """One of several data sets (or ways to share one out) that every row is run on."""

    name: Name
    settings: Settings = Field({}, description="config tables over those of the study")


def check_different(seeds: Sequence[int], what: str) -> None:
    """Refuse a seed that is named twice: its run would be one and the same.

    Raises:
        ValueError: naming it
    """
    twice = sorted({seed for seed in seeds if list(seeds).count(seed) > 1})
    if twice:
        raise ValueError(f"{what}: {', '.join(map(str, twice))} is named twice")


class StudyConfig(Table):
    """A whole study."""

    name: Name
    title: str = ""
    preset: str | None = Field(None, description="preset or file that all runs start from")
    settings: Settings = Field({}, description="config tables over the preset's, for all runs")
    scope: Literal["sites", "trained", "common"] = Field(
        "sites",
        description="sites: mean over sites, personal models where there are any; "
        "trained: mean over sites, models right after local training; "
        "common: the global model on the one common test set",
    )
    part: Literal["test", "valid"] = Field(
        "test",
        description="the images whose scores are shown; valid: for a study that chooses settings, "
        "with the validation scores of the selected round and no test score",
    )
    metrics: tuple[StudyMetric, ...] = Field(
        STUDY_METRICS, min_length=1, description="columns; the first one compares rows"
    )
    seeds: tuple[Seed, ...] = (1,)
    pairs: Literal["seeds", "seeds and sites"] = Field("seeds", description="what paired tests pair results by")
    paper: str = Field("", description="where the paper's numbers stand")
    paper_label: str = Field("paper", description="what heads the columns of the paper's numbers")
    cohort_table: str = Field("", description="what the paper calls its table of an unseen cohort")
    differs: tuple[str, ...] = Field((), description="what differs from the paper, a sentence each")
    all_methods: bool = Field(False, strict=True, description="a row for every registered method that no row names")
    data: tuple[DataSet, ...] = ()
    rows: tuple[Row, ...] = Field((), alias="row")

    @field_validator("rows", "data")
    @classmethod
    def _different_names(cls, entries: tuple[Row | DataSet, ...], info: ValidationInfo) -> tuple[Row | DataSet, ...]:
        # Names are folders, and on some disks "A" is the folder "a".
        names = [entry.name.casefold() for entry in entries]
        twice = [entry.name for entry in entries if names.count(entry.name.casefold()) > 1]
        if twice:
            what = "rows" if info.field_name == "rows" else "data sets"
            raise ValueError(f"two {what} are called {' and '.join(dict.fromkeys(twice))}")
        return entries

    @field_validator("metrics")
    @classmethod
    def _different_metrics(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(metrics)) < len(metrics):
            raise ValueError("a metric is named twice")
        return metrics

    @model_validator(mode="after")
    def _different_seeds(self) -> StudyConfig:
        check_different(self.seeds, "seeds of the study")
        for row in self.rows:
            check_different(row.seeds or (), f"seeds of {row.name}")
            check_different(row.later, f"later seeds of {row.name}")
            own = self.seeds if row.seeds is None else row.seeds
            check_different((*own, *row.later), f"seeds and later seeds of {row.name}")
        return self

    @model_validator(mode="after")
    def _complete(self) -> StudyConfig:
        if not self.rows and not self.all_methods:
            raise ValueError("a study needs rows: [[row]] with name and method")
        for row in self.rows:
            if len(set(row.tables)) < len(row.tables):
                raise ValueError(f"row {row.name} names a table twice")
        if len(self.data) > 1 and any(row.paper for row in self.rows):
            raise ValueError("paper numbers belong to one data set: give each data set a study of its own")
        if self.part == "valid" and any(row.paper or row.paper_cohort for row in self.rows):
            raise ValueError("paper numbers are test scores: a study with part = 'valid' shows none")
        return self

    @property
    def primary(self) -> str:
        """The metric that rows are compared by."""
        return self.metrics[0]

    @property
    def data_sets(self) -> tuple[DataSet | None, ...]:
        """The data sets; None where the study has the one of its preset."""
        return self.data or (None,)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the study's tables, in order of first mention; the empty name for rows without one."""
        return tuple(dict.fromkeys(table for row in self.rows for table in row.tables or ("",)))


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    row: Row
    data: DataSet | None
    seed: int
    folder: Path

    @property
    def label(self) -> str:
        """The run in words."""
        return f"{self.data.name}: {self.folder.name}" if self.data else self.folder.name


def load_study(source: str) -> StudyConfig:
    """The study of this name, or of this TOML file."""
    if source in study_names():
        content = (resources.files(__package__) / "grids" / f"{source}.toml").read_bytes()
    elif Path(source).is_file():
        content = Path(source).read_bytes()
    else:
        raise UserError(f"'{source}' is neither a file nor a study; studies: {', '.join(study_names()) or 'none'}")
    study = validated(StudyConfig, parse_toml(content, source), source)
    beside = Path(source).parent / (study.preset or "")
    if study.preset and source not in study_names() and beside.is_file():  # a file is looked for beside the study's
        study = study.model_copy(update={"preset": str(beside)})
    if study.all_methods:
        named = {row.name.casefold() for row in study.rows}
        more = tuple(Row(name=name, method=name) for name in method_names() if name not in named)
        study = study.model_copy(update={"rows": tuple(sorted(study.rows + more, key=lambda row: row.name))})
    _check_methods(study, source)
    return study


def _check_methods(study: StudyConfig, source: str) -> None:
    """Refuse rows of methods that do not exist, and options of methods that no row has."""
    known, methods = method_names(), {row.method for row in study.rows}
    for row in study.rows:
        if row.method not in known:
            raise UserError(f"{source}: row {row.name}: there is no method '{row.method}'; methods: {', '.join(known)}")
    for settings in (study.settings, *(data.settings for data in study.data)):
        for table in settings:
            if table in known and table not in methods:
                raise UserError(f"{source}: settings of {table}, but no row has this method: they have no effect")


def study_names() -> list[str]:
    """The studies shipped with the package."""
    folder = resources.files(__package__) / "grids"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


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
        Cell(row, data, wanted[row.name][place], _run_folder(folder, row, data, wanted[row.name][place]))
        for place in range(max((len(own) for own in wanted.values()), default=0))
        for data in study.data_sets
        for row in rows
        if place < len(wanted[row.name])
    ]


def _seeds(study: StudyConfig, row: Row, seeds: Sequence[int] | None, full: bool) -> tuple[int, ...]:
    if seeds is not None:
        return tuple(seeds)
    first = study.seeds if row.seeds is None else row.seeds
    return first + row.later if full else first


def _runs_folder(folder: Path, data: DataSet | None) -> Path:
    return folder / "runs" / data.name if data else folder / "runs"


def _run_folder(folder: Path, row: Row, data: DataSet | None, seed: int) -> Path:
    return _runs_folder(folder, data) / f"{row.name}-seed{seed}"


def known_cells(study: StudyConfig, folder: Path) -> list[Cell]:
    """Every run of the study that has a folder, of whatever seed."""
    found = []
    for data in study.data_sets:
        for row in study.rows:
            places = _runs_folder(folder, data).glob("*-seed*")
            seeds = (path.name.rpartition("-seed")[2] for path in places)
            for seed in sorted({int(seed) for seed in seeds if seed.isdecimal()}):
                path = _run_folder(folder, row, data, seed)
                if (path / "events.jsonl").is_file() or (path / "models").is_dir():
                    found.append(Cell(row, data, seed, path))
    return found


def strangers(study: StudyConfig, folder: Path) -> list[str]:
    """Runs in the study's folder that belong to no row of it, after a change of names, say."""
    found, known = [], {row.name for row in study.rows}
    for data in study.data_sets:
        names = [path.parent.name for path in sorted(_runs_folder(folder, data).glob("*-seed*/events.jsonl"))]
        own = [name for name in names if name.rpartition("-seed")[0] not in known]
        found += [f"{data.name}/{name}" if data else name for name in own]
    return found


def cell_config(study: StudyConfig, cell: Cell, settings: Sequence[str] = ()) -> Config:
    """The config of one run: preset, study, data set, row, then `key=value` settings of the command line."""
    tables = (study.settings, cell.data.settings if cell.data else {}, cell.row.settings)
    over = [setting for table in tables for setting in as_settings(table)]
    if (cell.row.view or study.scope) == "trained":
        over.append(f"evaluation.{'trained_test' if study.part == 'test' else 'trained'}=true")
    where = f"study {study.name}, row {cell.row.name}" + (" with what the command line sets" if settings else "")
    try:
        refuse_idle_options(list(as_settings(cell.row.settings)), cell.row.method)
    except UserError as problem:
        raise UserError(f"{where}: {str(problem).removeprefix('--set ')}") from None
    top = {"method": cell.row.method, "seed": cell.seed, "name": cell.folder.name}
    config = make_config(study.preset, [*over, *settings], where, **top)
    views = get_method(config.method).client_class(config).views
    if cell.row.view in ("global", "personal") and cell.row.view not in views:
        raise UserError(f"{where}: view = '{cell.row.view}', but {config.method} has only {' and '.join(views)} models")
    if study.scope == "common" and "global" in views:
        over.append("evaluation.view=global")  # the model that is reported is the one that is selected
        config = make_config(study.preset, [*over, *settings], where, **top)
    return config


def no_common_set(study: StudyConfig, whose: str, part: str, held: str = "") -> UserError:
    """What is told, and advised, where a study of a common set finds none; `held` names who has its images."""
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
    usual, wanted = (dotted(config.model_dump(mode="json")) for config in (Config(), planned))
    defaults = {"methods": {planned.method: all_options(planned.method, {})}}
    found = usual | dotted(defaults) | dotted(recorded)
    if "name" not in planned.net.model_fields_set:
        found["net.name"] = wanted["net.name"]
    others = tuple(f"methods.{method}." for method in method_names() if method != planned.method)
    ignored = ("name", "compute.", "checkpoint.", "data.root", "data.store", "evaluation.batch_size", *others)
    keys = [key for key in {**wanted, **found} if key == "compute.precision" or not key.startswith(ignored)]
    differing = [key for key in keys if found.get(key) != wanted.get(key)]
    return {key.removeprefix("methods."): (found.get(key), wanted.get(key)) for key in differing}
