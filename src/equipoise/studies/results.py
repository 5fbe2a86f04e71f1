"""A study read from its folder: rows with their finished runs, ranks, how rounds were chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.contract.config import EvaluationConfig
from equipoise.core.errors import UserError, first_line
from equipoise.report.measured import EVERY, TITLES
from equipoise.report.record import read_run
from equipoise.statistics import Ranking, ranking
from equipoise.studies.archive import unpack
from equipoise.studies.checks import REMEDY, DamagedRun, check_log, is_finished
from equipoise.studies.grid import Cell, cell_config, deviations, known_cells, listed, no_common_set, strangers
from equipoise.studies.rows import RowResult, RunResult, holders
from equipoise.studies.runner import shared_with
from equipoise.studies.same_data import kinds
from equipoise.studies.study_file import PART_TITLES, StudyConfig
from equipoise.studies.study_intervals import StudyIntervals, study_intervals

HIGHER_IS_BETTER = {metric.name: metric.higher_is_better for metric in EVERY}
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
    def rule(self) -> str:
        """How the reported rounds of all runs were chosen."""
        return selection_rule(self.runs, self.study.part)

    @cached_property
    def deviations(self) -> list[str]:
        """Settings in which runs differ from the study file, a sentence each."""
        found: dict[str, list[RunResult]] = {}
        for run in self.runs:
            planned = cell_config(self.study, run.cell)
            for key, (value, wanted) in deviations(planned, run.record.start.config).items():
                text = f"{key} = {json.dumps(value)} instead of {json.dumps(wanted)}"
                found.setdefault(text, []).append(run)
        return [f"{text} ({holders(self.rows, runs)})" for text, runs in found.items()]


def selection_rule(runs: Iterable[RunResult], part: str) -> str:
    """How the reported round was chosen, as the runs' own configs say, and that test images had no part in it."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        rows.setdefault(_rule(run.record.start.config), []).append(run.cell.row.name)
    rules = [f"{rule} ({listed(dict.fromkeys(names))})" for rule, names in rows.items()]
    text = "; ".join(rules if len(rules) > 1 else rows)
    return f"{f'Reported is {text}' if text else 'No run has finished yet'}. {PART_SENTENCES[part]}"


def _rule(config: dict[str, Any]) -> str:
    settings = EvaluationConfig.model_validate(config["evaluation"])
    title = TITLES.get(settings.score, settings.score)
    metric = title[0].lower() + title[1:]
    models = {"auto": "", "global": " of the global model", "personal": " of the personal models"}[settings.view]
    own = "for each site " if settings.select == "site" else ""
    since = f", from round {settings.first_round} on" if settings.earliest > 1 else ""
    match settings.rule:
        case "best":
            return f"{own}the round with the best validation {metric}{models}{since}"
        case "last":
            return "the last round"
    averaged = len(settings.reportable(config["train"]["rounds"]))
    if settings.every == 1:
        return f"the mean over the last {averaged} rounds"
    return f"the mean over the {averaged} that were measured of the last {settings.last} rounds"


def collect(study: StudyConfig, folder: Path) -> StudyResults:
    """Read the runs of a study; unfinished and damaged ones are only named.

    Raises:
        UserError: when the study is of a common set, and a run has none
    """
    unpack(folder)
    finished: dict[tuple[str, str], list[RunResult]] = {}
    unfinished: list[str] = []
    damaged: dict[str, Exception] = {}
    for cell in known_cells(study, folder):
        try:
            check_log(cell.folder)
            if not is_finished(cell.folder):
                unfinished.append(cell.label)
                continue
            finished.setdefault((cell.data_name, cell.row.name), []).append(_read(cell, study.part))
        except DamagedRun as problem:
            damaged[cell.label] = problem
    if study.scope == "common":
        _check_common(study, [run for runs in finished.values() for run in runs])
    rows = [
        RowResult(row, name, study.scope, finished.get((name, row.name), []))
        for name in (data.name if data else "" for data in study.data_sets)
        for row in study.rows
    ]
    return StudyResults(study, folder, rows, unfinished, damaged, strangers(study, folder))


def _read(cell: Cell, part: str) -> RunResult:
    """A finished run, if its files say all that tables need."""
    try:
        run = RunResult(cell, read_run(cell.folder), shared_with(cell.folder), part)
        _rule(run.record.start.config)
        run.scores, run.cost, run.data_seen  # noqa: B018  read now, so that what is wrong with them shows here
    except DamagedRun:
        raise
    except (UserError, ValueError, KeyError, TypeError) as problem:
        raise DamagedRun(f"{first_line(problem)}; {REMEDY}") from None
    untestable = part == "valid" or not run.record.images["test"].any(axis=None)
    if run.record.rounds.empty or not (untestable or "mean" in set(run.record.finals["scope"])):
        lacking = "test result" if len(run.record.rounds) else "round"
        raise DamagedRun(f"{cell.folder / 'events.jsonl'} tells of no {lacking}; {REMEDY}")
    return run


def _check_common(study: StudyConfig, runs: Sequence[RunResult]) -> None:
    """Refuse to call a mean over sites a score on a common set."""
    for run in (run for run in runs if not run.on_common_set):
        part, held = PART_TITLES[study.part], ", ".join(run.judges) or "nobody"
        raise no_common_set(study, run.cell.label, part, held)
