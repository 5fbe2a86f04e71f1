"""Finished runs, and the rows that they make up: scores in per cent over seeds, by view, site and class, and costs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from equipoise.engine.events import first_event
from equipoise.methods import get_method
from equipoise.report.events import Result
from equipoise.report.record import RunRecord
from equipoise.statistics import Spread, spread
from equipoise.studies.grid import METRICS, Cell, Metric, Row, listed
from equipoise.studies.net_cost import NetCost, net_cost
from equipoise.studies.same_data import DataSeen

Spreads = dict[Metric, Spread]
#: the kinds of model that a scope reports, the first one that there is
VIEWS: dict[str, tuple[str, ...]] = {
    "sites": ("personal", "global"),
    "trained": ("trained", "personal", "global"),
    "common": ("global", "personal"),
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

    @cached_property
    def judges(self) -> list[str]:
        """Who holds the images that scores are of: sites, or the one common set; unseen cohorts apart."""
        cohorts = {result.site for result in self.record.finals if result.scope == "cohort"}
        places = [site for site in self.record.start.sites if site.name not in cohorts]
        return [site.name for site in places if sum(site.test if self.part == "test" else site.valid)]

    @cached_property
    def data_seen(self) -> DataSeen:
        """What the run tells of its data."""
        return DataSeen.of(self.record.start)

    @property
    def on_common_set(self) -> bool:
        """True when one set, which no site trains on, judges all models."""
        return len(self.judges) == 1 and self.judges[0] in self.record.evaluators

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
        """{site or cohort: view} of what was measured in this scope, by the kind of model that the row reports.

        Models that sites hold right after training are not taken to cohorts: another kind that was stands there.
        """
        measured: dict[str, set[str]] = {}
        for result in (each for run in self.runs for each in run.measured if each.scope == scope):
            if result.site is not None:
                measured.setdefault(result.site, set()).add(result.view)
        order = (self.view, *VIEWS[self.scope]) if scope == "cohort" else (self.view,)
        chosen = {site: next((view for view in order if view in views), None) for site, views in measured.items()}
        return {site: view for site, view in chosen.items() if view is not None}

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

    @property
    def pooled(self) -> bool:
        """True for training on all images at one place, which hospitals cannot choose."""
        return get_method(self.row.method).pooled

    def traffic(self, direction: str) -> float | None:
        """Bytes that a site has `sent` or `received` in a round, on average; None without sites."""
        if self.pooled:
            return None
        visits = [site for run in self.runs for finished in run.record.rounds for site in finished.sites.values()]
        return sum(getattr(site, direction) for site in visits) / len(visits) if visits else None

    @cached_property
    def sent_by_entry(self) -> dict[str, float]:
        """Bytes of each entry of a site's replies in a round, on average; empty for runs that did not tell."""
        rounds = [finished.entries for run in self.runs for finished in run.record.rounds if finished.entries]
        if self.pooled or not rounds:
            return {}
        names = dict.fromkeys(name for entries in rounds for name in entries)
        return {name: sum(entries.get(name, 0.0) for entries in rounds) / len(rounds) for name in names}

    @property
    def full_name(self) -> str:
        """The row's name, after that of its data set where the study has several."""
        return f"{self.data}: {self.row.name}" if self.data else self.row.name

    @property
    def together(self) -> int:
        """How many runs shared the device, at most, while these did."""
        return max((run.together for run in self.runs), default=1)


def _percent(result: Result | None, metric: Metric) -> float | None:
    value = result.metrics.get(metric) if result else None
    return None if value is None else 100 * value


def federation_of(rows: Iterable[RowResult]) -> RunRecord | None:
    """The run that shows best who holds what: pooled training hides it."""
    runs = (run.record for row in rows for run in row.runs)
    return max(runs, key=lambda run: len(run.training_sites), default=None)


def holders(rows: Sequence[RowResult], runs: Sequence[RunResult]) -> str:
    """Runs in the fewest words: all, all of a data set, all of a row, or one by one."""
    wanted = {run.cell.folder for run in runs}

    def covered(own: Sequence[RowResult]) -> bool:
        return all(run.cell.folder in wanted for row in own for run in row.runs)

    rows = [row for row in rows if row.runs]
    if covered(rows):
        return "all runs"
    names: list[str] = []
    for data in dict.fromkeys(row.data for row in rows):
        own = [row for row in rows if row.data == data]
        if covered(own):
            names.append(data)
            continue
        for row in own:
            labels = [run.cell.label for run in row.runs if run.cell.folder in wanted]
            names += [row.full_name] if labels and covered([row]) else labels
    return listed(names)
