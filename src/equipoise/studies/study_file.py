"""A study as it stands in its TOML file: rows (a method with settings), seeds, data sets, and the paper's numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from equipoise.core.definitions import modules_in, names_in_papers
from equipoise.core.errors import UserError, parse_toml
from equipoise.core.plugins import entry_names, is_plugin
from equipoise.core.suggestions import meant_or_all, unknown
from equipoise.core.table import Table
from equipoise.core.validation import validated
from equipoise.mask_metrics import MASK_METRICS
from equipoise.metrics import METRICS

#: the metrics of a study that names none
STUDY_METRICS = tuple(m.name for m in sorted(METRICS, key=lambda metric: metric.study_place) if m.in_tables)
OF_MASKS = tuple(metric.name for metric in MASK_METRICS if metric.in_tables)
if TYPE_CHECKING:
    StudyMetric = str
else:
    StudyMetric = Literal[(*STUDY_METRICS, *OF_MASKS)]


def check_name(name: str) -> str:
    """Refuse a name that could not be a folder's."""
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


def check_undecided(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse settings of what rows and seeds decide."""
    for key in DECIDED:
        if key in settings:
            raise ValueError(f"'{key}' is no setting of a study: rows name their method, and seeds are listed")
    return settings


Settings = Annotated[dict[str, Any], AfterValidator(check_undecided)]


class Row(Table):
    """One line of a table: a method with its settings."""

    name: Name
    method: str
    settings: Settings = Field({}, description="config tables over those of the study")
    seeds: tuple[Seed, ...] | None = Field(None, description="default: the study's; an empty list: only later seeds")
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
    """Refuse a seed that is named twice: it has only one run."""
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
    folds: int = Field(0, description="cross-validation: a run for each fold of groups; scores are means over folds")
    leave_out: tuple[Name, ...] = Field(
        (), description="a run for each of these sites, which takes no part and tests the models"
    )
    pairs: Literal["seeds", "seeds and sites"] = Field("seeds", description="what paired tests pair results by")
    paper: str = Field("", description="where the paper's numbers stand")
    paper_label: str = Field("paper", description="what heads the columns of the paper's numbers")
    cohort_table: str = Field("", description="what the paper calls its table of an unseen cohort")
    differs: tuple[str, ...] = Field((), description="what differs from the paper, a sentence each")
    anyway: bool = Field(False, description="also rows whose method's distinctive part has no effect")
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
        if distances := [metric.name for metric in MASK_METRICS if metric.name in metrics and not metric.share]:
            raise ValueError(
                f"{' and '.join(distances)} are distances, and a study's tables are in per cent; leave them out: "
                "the report of each run shows them"
            )
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
        if self.folds == 1 or self.folds < 0:
            raise ValueError(f"folds = {self.folds}: a cross-validation has two folds or more")
        if len(self.data_sets) > 1 and any(row.paper for row in self.rows):
            raise ValueError("paper numbers belong to one data set: give each data set a separate study")
        if self.part == "valid" and any(row.paper or row.paper_cohort for row in self.rows):
            raise ValueError("paper numbers are test scores: a study with part = 'valid' shows none")
        return self

    @property
    def primary(self) -> str:
        """The metric that rows are compared by."""
        return self.metrics[0]

    @property
    def kept_metrics(self) -> tuple[str, ...]:
        """The metrics that files of results hold: all of the task."""
        return OF_MASKS if self.primary in OF_MASKS else STUDY_METRICS

    @property
    def data_sets(self) -> tuple[DataSet | None, ...]:
        """The data sets; None where the study has the one of its preset. Each comes once without each site that is
        left out in turn."""
        if not self.leave_out:
            return self.data or (None,)
        return tuple(_without(data, site) for data in self.data or (None,) for site in self.leave_out)

    @property
    def each_fold(self) -> tuple[int | None, ...]:
        """The folds of a cross-validation; None where the study is none."""
        return (*range(self.folds),) if self.folds else (None,)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the study's tables, in order of first mention; the empty name for rows without one."""
        return tuple(dict.fromkeys(table for row in self.rows for table in row.tables or ("",)))


def _without(data: DataSet | None, site: str) -> DataSet:
    """A data set, or the study's own, whose site takes no part."""
    settings = dict(data.settings) if data else {}
    settings["data"] = {**settings.get("data", {}), "leave_out": site}
    return DataSet(name=f"{data.name} without {site}" if data else f"without {site}", settings=settings)


def load_study(source: str) -> StudyConfig:
    """The study of this name, or of this TOML file."""
    if source in study_names():
        content = (resources.files(__package__) / "grids" / f"{source}.toml").read_bytes()
    elif Path(source).is_file():
        content = Path(source).read_bytes()
    else:
        raise UserError(f"'{source}' is neither a file nor a study; {meant_or_all(source, study_names(), 'studies')}")
    tables = parse_toml(content, source)
    if "row" not in tables and {"method", "train"} & tables.keys():
        raise UserError(f"{source} is the config of a run and no study; start it with: equipoise run {source}")
    study = validated(StudyConfig, tables, source)
    beside = Path(source).parent / (study.preset or "")
    if study.preset and source not in study_names() and beside.is_file():  # a file is looked for beside the study's
        study = study.model_copy(update={"preset": str(beside)})
    if study.all_methods:
        named = {row.name.casefold() for row in study.rows}
        more = tuple(Row(name=name, method=name) for name in modules_in("methods") if name not in named)
        study = study.model_copy(update={"rows": tuple(sorted(study.rows + more, key=lambda row: row.name))})
    _check_methods(study, source)
    return study


def _check_methods(study: StudyConfig, source: str) -> None:
    """Refuse rows of methods that do not exist, and options of methods that no row has."""
    known, methods = list(modules_in("methods")), {row.method.split("+")[0] for row in study.rows}
    for row in study.rows:
        name = row.method.split("+")[0]
        if name not in known and not is_plugin("method", name):
            told = unknown("method", name, [*known, *entry_names("method")], names_in_papers("methods"))
            raise UserError(f"{source}: row {row.name}: {told}")
    for settings in (study.settings, *(data.settings for data in study.data)):
        for table in settings:
            if table in known and table not in methods:
                raise UserError(f"{source}: settings of {table}, but no row has this method: they have no effect")


def study_names() -> list[str]:
    """The studies shipped with the package."""
    folder = resources.files(__package__) / "grids"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
