"""A study read from its folder: rows with their finished runs, ranks, how rounds were chosen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from equipoise.report.measured import EVERY
from equipoise.statistics import Ranking, ranking
from equipoise.studies.archive import unpack
from equipoise.studies.database import DamagedDatabase, opened, read_curves, read_runs, read_scores
from equipoise.studies.grid import cell_config, deviations, known_cells, listed, no_common_set, strangers
from equipoise.studies.rows import RowResult, RunResult, holders, over_seeds, reported_rule
from equipoise.studies.same_data import kinds
from equipoise.studies.study_file import PART_TITLES, StudyConfig
from equipoise.studies.study_intervals import HIGHER_IS_BETTER, StudyIntervals, study_intervals

Made = TypeVar("Made")
SCOPE_SENTENCES = {
    "sites": "Mean over sites; personal models where the method has them, else the global model.",
    "trained": "Mean over sites; models as sites hold them right after local training, where a method has such.",
    "common": "The global model on the one common {part} set; where a method has none, the mean of the sites' models.",
}
PART_SENTENCES = {
    "test": "Test data took no part in the choice.",
    "valid": "Scores are of validation images; test images have no part in them.",
}


@dataclass(frozen=True)
class StudyResults:
    """Everything that a study's tables and report say."""

    study: StudyConfig
    folder: Path
    rows: Sequence[RowResult]
    curves: pd.DataFrame
    """Mean validation scores over sites by round, a column per run and view; the view `drop` is retrogress."""
    unfinished: Sequence[str]
    damaged: Mapping[str, Exception] = field(default_factory=dict)
    """Finished runs whose files cannot be used, by label."""
    strangers: Sequence[str] = ()
    """Runs that are there and belong to no row."""

    @property
    def runs(self) -> list[RunResult]:
        """All finished runs."""
        return [run for row in self.rows for run in row.runs]

    @property
    def part(self) -> str:
        """The images whose scores are shown, in a word."""
        return PART_TITLES[self.study.part]

    @property
    def scope(self) -> str:
        """What is scored on which images, in a sentence."""
        return SCOPE_SENTENCES[self.study.scope].format(part=self.part)

    @property
    def data_names(self) -> list[str]:
        """The data sets; one empty name where the study has no list of them."""
        return [data.name if data else "" for data in self.study.data_sets]

    def of(self, data: str, table: str | None = None) -> list[RowResult]:
        """The rows of one data set, and of one table."""
        return [r for r in self.rows if r.data == data and (table is None or table in (r.row.tables or ("",)))]

    @property
    def has_paper(self) -> bool:
        """True when the study names a paper, or has numbers of one."""
        return bool(self.study.paper) or any(row.paper or row.paper_cohort for row in self.study.rows)

    @property
    def ranked_over(self) -> str:
        """What rows are ranked on: every data set; of a single one, every site where sites are tested apart."""
        if len(self.data_names) > 1:
            return "data set"
        apart = self.study.scope != "common" and not any(run.on_common_set for run in self.runs)
        return "site" if apart else "common set"

    @cached_property
    def ranking(self) -> Ranking:
        """Ranks of the rows by the primary metric, means over seeds; pooled training, which is no choice, has none."""
        metric, by_site = self.study.primary, self.ranked_over == "site"
        values: dict[str, dict[str, float]] = {}
        for row in (row for row in self.rows if not row.pooled and row.data not in self.mixed):
            scores = {row.data: row.scores}
            if by_site:
                scores = {site: row.scores_of(view, "site", site) for site, view in row.places("site").items()}
            known = {block: own[metric].mean for block, own in scores.items() if metric in own}
            if known:
                values.setdefault(row.row.name, {}).update(known)
        return ranking(values, HIGHER_IS_BETTER[metric])

    @cached_property
    def mixed(self) -> list[str]:
        """The data sets whose runs saw different images: nothing of them can be ranked."""
        seen = {data: [(run, run.data_seen) for row in self.of(data) for run in row.runs] for data in self.data_names}
        return [data for data, runs in seen.items() if len(kinds(runs)) > 1]

    @cached_property
    def intervals(self) -> Mapping[str, StudyIntervals | None]:
        """Intervals over images and seeds, by data set; none where runs saw different images."""
        return {
            data: None
            if data in self.mixed
            else study_intervals([row for row in self.of(data) if row.runs], self.study.metrics, self.study.part)
            for data in self.data_names
        }

    @cached_property
    def made(self) -> dict[tuple[str, str], Any]:
        """Tables of a data set that several files show, by what makes them: they are made once."""
        return {}

    @cached_property
    def rule(self) -> str:
        """How the reported rounds of all runs were chosen."""
        return selection_rule(self.runs, self.study.part)

    @cached_property
    def deviations(self) -> list[str]:
        """Settings in which runs differ from the study file, a sentence each."""
        found: dict[str, list[RunResult]] = {}
        for run in self.runs:
            planned = cell_config(self.study, run.cell)
            for key, (value, wanted) in deviations(planned, run.start.config).items():
                text = f"{key} = {json.dumps(value)} instead of {json.dumps(wanted)}"
                found.setdefault(text, []).append(run)
        return [f"{text} ({holders(self.rows, runs)})" for text, runs in found.items()]


def once(make: Callable[[StudyResults, str], Made]) -> Callable[[StudyResults, str], Made]:
    """Make something of a data set once, for all files that show it."""

    @wraps(make)
    def made(results: StudyResults, data: str) -> Made:
        key = make.__name__, data
        if key not in results.made:
            results.made[key] = make(results, data)
        return results.made[key]

    return made


def selection_rule(runs: Iterable[RunResult], part: str) -> str:
    """How the reported round was chosen, as the runs' own configs say, and that test images had no part in it."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        rows.setdefault(reported_rule(run.start.config), []).append(run.cell.row.name)
    rules = [f"{rule} ({listed(dict.fromkeys(names))})" for rule, names in rows.items()]
    text = "; ".join(rules if len(rules) > 1 else rows)
    return f"{f'Reported is {text}' if text else 'No run has finished yet'}. {PART_SENTENCES[part]}"


def collect(study: StudyConfig, folder: Path) -> StudyResults:
    """Read the runs of a study; unfinished and damaged ones are only named.

    Raises:
        UserError: when the study is of a common set, and a run has none
    """
    unpack(folder)
    try:
        runs, unfinished, damaged, scores, curves = _read(study, folder)
    except DamagedDatabase:
        runs, unfinished, damaged, scores, curves = _read(study, folder)
    scores["value"] *= 100
    if study.scope == "common":
        _check_common(study, [*runs.values()])
    spreads, lines = over_seeds(scores), dict(iter(scores.groupby(["data", "row"])))
    own: dict[tuple[str, str], list[RunResult]] = {}
    for run in runs.values():
        own.setdefault((run.cell.data_name, run.cell.row.name), []).append(run)
    rows = [
        RowResult(row, *key[:1], study.scope, own.get(key, []), lines.get(key, scores[:0]), spreads.get(key, {}))
        for data in study.data_sets
        for row in study.rows
        for key in [(data.name if data else "", row.name)]
    ]
    return StudyResults(study, folder, rows, curves, unfinished, damaged, strangers(study, folder))


def _read(study: StudyConfig, folder: Path) -> tuple[Any, ...]:
    """The runs of a study, the labels of the unfinished and the damaged ones, and the frames of scores and curves."""
    with opened(study, folder) as base:
        runs, unfinished, damaged = read_runs(base, study, known_cells(study, folder))
        curves = read_curves(base, runs, study.primary, retrogress_metric(study.primary))
        return runs, unfinished, damaged, read_scores(base, runs), curves


def retrogress_metric(primary: str) -> str:
    """The score whose drop is drawn: the primary one, unless it has none."""
    with_retrogress = [metric.name for metric in EVERY if metric.has_retrogress]
    return primary if primary in with_retrogress else with_retrogress[0]


def _check_common(study: StudyConfig, runs: Sequence[RunResult]) -> None:
    """Refuse to call a mean over sites a score on a common set."""
    for run in (run for run in runs if not run.on_common_set):
        part, held = PART_TITLES[study.part], ", ".join(run.told["judges"]) or "nobody"
        raise no_common_set(study, run.cell.label, part, held)
