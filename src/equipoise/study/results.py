"""From finished runs to the rows of a study's tables: scores in per cent over seeds, costs, tests, ranks."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from equipoise.config import EvaluationConfig
from equipoise.engine.events import first_event
from equipoise.report.events import Result
from equipoise.report.record import RunRecord, read_run
from equipoise.report.tables import COLUMNS, METRIC_TITLES
from equipoise.study.config import (
    METRICS,
    Cell,
    Metric,
    Row,
    StudyConfig,
    cell_config,
    deviations,
    known_cells,
)
from equipoise.study.cost import NetCost, net_cost
from equipoise.study.runner import NOTE, is_finished
from equipoise.study.statistics import Comparison, Spread, compare_with_best, ranks, spread

Spreads = dict[Metric, Spread]
HIGHER_IS_BETTER = {column.key: column.higher_is_better for column in COLUMNS}
#: the kinds of model that a scope reports, the first one that there is
VIEWS: dict[str, tuple[str, ...]] = {
    "sites": ("personal", "global"),
    "trained": ("trained", "personal", "global"),
    "common": ("global", "personal"),
}
SCOPE_SENTENCES = {
    "sites": "Mean over sites; personal models where the method has them, else the global model.",
    "trained": "Mean over sites; models as sites hold them right after local training, where a method has such.",
    "common": "The global model on the one common {part} set; where a method has none, the mean of the sites' models.",
}
PART_TITLES = {"test": "test", "valid": "validation"}
PART_SENTENCES = {
    "test": "Test data took no part in the choice.",
    "valid": "Scores are of validation images; test images have no part in them.",
}


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    cell: Cell
    record: RunRecord
    together: int
    part: str

    @property
    def measured(self) -> Sequence[Result]:
        """All that the study may show of the run: its test results, or validation scores of what it reports."""
        return self.record.finals if self.part == "test" else self.record.validation

    @cached_property
    def views(self) -> list[str]:
        """The kinds of model that were measured."""
        return list(dict.fromkeys(result.view for result in self.measured))

    def results(self, view: str, scope: str) -> dict[str | None, Result]:
        """Results of a view by site; under None where the scope has no sites."""
        return {r.site: r for r in self.measured if r.view == view and r.scope == scope}

    @cached_property
    def cost(self) -> NetCost | None:
        """What the net costs."""
        return net_cost(first_event(self.cell.folder / "events.jsonl"))


@dataclass(frozen=True)
class RowResult:
    """One line of a table: a row on one data set, with its finished runs (perhaps none)."""

    row: Row
    data: str
    scope: str
    runs: Sequence[RunResult]

    @property
    def view(self) -> str:
        """The kind of model that the row reports: the one it names, else by the study's scope."""
        if self.row.view is not None:
            return self.row.view
        views = {view for run in self.runs for view in run.views}
        order = VIEWS[self.scope]
        return next((view for view in order if view in views), order[-1])

    @cached_property
    def scores(self) -> Spreads:
        """The reported scores."""
        return self.scores_of(self.view)

    def scores_of(self, view: str, scope: str = "mean", site: str | None = None) -> Spreads:
        """Scores in per cent of one view, over seeds."""
        found = [run.results(view, scope).get(site) for run in self.runs]
        spreads = {metric: spread(_percent(result, metric) for result in found) for metric in METRICS}
        return {metric: each for metric, each in spreads.items() if each is not None}

    def places(self, scope: str) -> dict[str, str]:
        """{site or cohort: view} of what was measured in this scope, by the kind of model that the row reports."""
        return {
            site: result.view
            for run in self.runs
            for result in run.measured
            if result.scope == scope and result.view == self.view
            if (site := result.site) is not None
        }

    @cached_property
    def validation(self) -> Spread | None:
        """The score that selected the round, in per cent, over seeds."""
        chosen = [selection.score for run in self.runs if (selection := run.record.selection)]
        return spread(None if value is None else 100 * value for value in chosen)

    @cached_property
    def recall(self) -> dict[str, Spread]:
        """Recall of each class over all sites' images, in per cent, over seeds."""
        found: dict[str, list[float]] = {}
        for run in self.runs:
            pooled = run.results(self.view, "pooled").get(None)
            for name, value in zip(run.record.start.classes, pooled.recall if pooled else ()):
                if value is not None:
                    found.setdefault(name, []).append(100 * value)
        spreads = {name: spread(values) for name, values in found.items()}
        return {name: each for name, each in spreads.items() if each is not None}

    def values(self, metric: Metric, by_site: bool) -> dict[Hashable, float]:
        """One score in per cent by seed, or by seed and site."""
        scope = "site" if by_site else "mean"
        return {
            (run.cell.seed, site) if by_site else run.cell.seed: value
            for run in self.runs
            for site, result in run.results(self.view, scope).items()
            if (value := _percent(result, metric)) is not None
        }

    @cached_property
    def seconds(self) -> Spread | None:
        """Clock time of a round without evaluation, over seeds."""
        return spread(sum(r.seconds for r in run.record.rounds) / len(run.record.rounds) for run in self.runs)

    @cached_property
    def duration(self) -> Spread | None:
        """Clock time of a whole run, over seeds."""
        return spread(run.record.seconds for run in self.runs)

    def traffic(self, direction: str) -> float | None:
        """Bytes that a site has `sent` or `received` in a round, on average."""
        visits = [site for run in self.runs for finished in run.record.rounds for site in finished.sites.values()]
        return sum(getattr(site, direction) for site in visits) / len(visits) if visits else None

    @property
    def together(self) -> int:
        """How many runs shared the device, at most, while these did."""
        return max((run.together for run in self.runs), default=1)


def _percent(result: Result | None, metric: Metric) -> float | None:
    value = result.metrics.get(metric) if result else None
    return None if value is None else 100 * value


@dataclass(frozen=True)
class StudyResults:
    """Everything that a study's tables and report say."""

    study: StudyConfig
    folder: Path
    rows: Sequence[RowResult]
    unfinished: Sequence[str]

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

    def best(self, rows: Sequence[RowResult], metric: Metric) -> RowResult | None:
        """The row with the best mean."""
        known = [row for row in rows if metric in row.scores]
        sign = 1 if HIGHER_IS_BETTER[metric] else -1
        return max(known, key=lambda row: sign * row.scores[metric].mean, default=None)

    @cached_property
    def comparisons(self) -> dict[str, list[Comparison]]:
        """Paired tests between the best row and the others, by data set."""
        metric, by_site = self.study.primary, self.study.pairs == "seeds and sites"
        return {
            data: compare_with_best(
                {row.row.name: row.values(metric, by_site) for row in self.of(data)}, HIGHER_IS_BETTER[metric]
            )
            for data in self.data_names
        }

    @cached_property
    def ranks(self) -> dict[str, dict[Hashable, float]]:
        """Rank of each row on every data set, at every site where sites are tested apart; means over seeds."""
        metric, by_site = self.study.primary, self.study.scope != "common"
        values: dict[str, dict[Hashable, float]] = {}
        for row in self.rows:
            places = row.places("site").items() if by_site else [("", row.view)]
            for site, view in places:
                scores = row.scores_of(view, "site", site) if by_site else row.scores
                if metric in scores:
                    values.setdefault(row.row.name, {})[row.data, site] = scores[metric].mean
        return ranks(values, HIGHER_IS_BETTER[metric])

    @cached_property
    def rule(self) -> str:
        """How the reported round was chosen, as the runs' own configs say, and that test images had no part in it."""
        rows: dict[str, list[str]] = {}
        for run in self.runs:
            rows.setdefault(_rule(run.record.start.config["evaluation"]), []).append(run.cell.row.name)
        rules = [f"{rule} ({', '.join(dict.fromkeys(names))})" for rule, names in rows.items()]
        text = "; ".join(rules) if len(rules) > 1 else next(iter(rows), "No run has finished yet")
        return f"{text}. {PART_SENTENCES[self.study.part]}"

    @cached_property
    def deviations(self) -> list[str]:
        """Settings in which runs differ from the study file, a sentence each."""
        found: dict[str, list[str]] = {}
        for run in self.runs:
            planned = cell_config(self.study, run.cell)
            for key, (value, wanted) in deviations(planned, run.record.start.config).items():
                text = f"{key} = {json.dumps(value)} instead of {json.dumps(wanted)}"
                found.setdefault(text, []).append(run.cell.label)
        everything = len(self.runs)
        return [
            f"{text} ({'all runs' if len(labels) == everything else ', '.join(labels)})"
            for text, labels in found.items()
        ]


def _rule(evaluation: dict[str, Any]) -> str:
    settings = EvaluationConfig.model_validate(evaluation)
    title = METRIC_TITLES[settings.metric]
    metric = title[0].lower() + title[1:]
    models = {"auto": "", "global": " of the global model", "personal": " of the personal models"}[settings.view]
    own = "for each site " if settings.select == "site" else ""
    since = f", from round {settings.first_round} on" if settings.first_round > 1 else ""
    match settings.rule:
        case "best":
            return f"Reported is {own}the round with the best validation {metric}{models}{since}"
        case "last":
            return "Reported is the last round"
    return f"Reported is the mean over the last {settings.last} rounds"


def collect(study: StudyConfig, folder: Path) -> StudyResults:
    """Read the runs of a study; unfinished ones are only named."""
    finished: dict[tuple[str, str], list[RunResult]] = {}
    unfinished = []
    for cell in known_cells(study, folder):
        if is_finished(cell.folder):
            note = cell.folder / NOTE
            together = json.loads(note.read_text())["together"] if note.is_file() else 1
            key = (cell.data.name if cell.data else "", cell.row.name)
            finished.setdefault(key, []).append(RunResult(cell, read_run(cell.folder), together, study.part))
        else:
            unfinished.append(cell.label)
    rows = [
        RowResult(row, name, study.scope, finished.get((name, row.name), []))
        for name in (data.name if data else "" for data in study.data_sets)
        for row in study.rows
    ]
    return StudyResults(study, folder, rows, unfinished)
