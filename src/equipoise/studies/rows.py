"""Finished runs, and the rows that they make up: scores in per cent over seeds, by view, site and class, and costs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from equipoise.contract.tables import EvaluationConfig
from equipoise.methods import get_method
from equipoise.report.log_lines import Start
from equipoise.report.measured import TITLES
from equipoise.statistics import Spread, spread
from equipoise.studies.grid import Cell, listed
from equipoise.studies.row_cost import net_cost
from equipoise.studies.same_data import DataSeen
from equipoise.studies.study_file import Row

Spreads = dict[str, Spread]
#: the kinds of model that a scope reports, the first one that there is
VIEWS: dict[str, tuple[str, ...]] = {
    "sites": ("personal", "global"),
    "trained": ("trained", "personal", "global"),
    "common": ("global", "personal"),
}
#: what a number is of, besides its run
PLACE = ["part", "view", "scope", "site", "class", "metric"]


@dataclass(frozen=True)
class RunResult:
    """A finished run: the event that started it, and what else the study's database tells of it."""

    cell: Cell
    opening: Mapping[str, Any]
    told: Mapping[str, Any]

    def check(self) -> None:
        """Raise what is wrong with a log that lacks something."""
        self.data_seen, net_cost(self.opening)

    @cached_property
    def start(self) -> Start:
        """What was known before the first round."""
        return Start.model_validate(self.opening)

    @cached_property
    def data_seen(self) -> DataSeen:
        """What the run tells of its data."""
        return DataSeen.of(self.start)

    @property
    def on_common_set(self) -> bool:
        """True when one set, which no site trains on, judges all models; unseen cohorts apart."""
        judges = self.told["judges"]
        return len(judges) == 1 and judges[0] in self.start.evaluators


@dataclass(frozen=True)
class RowResult:
    """One line of a table: a row on one data set, with its finished runs (perhaps none).

    Args:
        lines: the scores in per cent, a line per number
        spreads: the same over seeds, by view, scope, site and class
    """

    row: Row
    data: str
    scope: str
    runs: Sequence[RunResult]
    lines: pd.DataFrame
    spreads: Mapping[tuple[str, ...], Spreads]

    @property
    def full_name(self) -> str:
        """The row's name, after that of its data set where the study has several."""
        return f"{self.data}: {self.row.name}" if self.data else self.row.name

    @property
    def pooled(self) -> bool:
        """True for training on all images at one place, which hospitals cannot choose."""
        return get_method(self.row.method).pooled

    @property
    def together(self) -> int:
        """How many runs shared the device, at most, while these did."""
        return max((run.told["together"] for run in self.runs), default=1)

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return sorted({run.cell.seed for run in self.runs})

    @cached_property
    def view(self) -> str:
        """The kind of model that the row reports: the one it names, else by the study's scope."""
        views, order = {*self.lines["view"]}, VIEWS[self.scope]
        return self.row.view or next((view for view in order if view in views), order[-1])

    @property
    def scores(self) -> Spreads:
        """The reported scores."""
        return self.scores_of(self.view)

    def scores_of(self, view: str, scope: str = "mean", site: str = "") -> Spreads:
        """Scores of one view, over seeds."""
        return self.spreads.get((view, scope, site, ""), {})

    @property
    def recall(self) -> dict[str, Spread]:
        """Recall of each class over all sites' images, over seeds."""
        classes = self.runs[0].start.classes if self.runs else ()
        known = {name: self.spreads.get((self.view, "pooled", "", name)) for name in classes}
        return {name: own["recall"] for name, own in known.items() if own}

    def values(self, metric: str, by_site: bool) -> dict[Hashable, float]:
        """One score by seed, or by seed and site."""
        scope = "site" if by_site else "mean"
        lines = self.reported[(self.reported["metric"] == metric) & (self.reported["scope"] == scope)]
        return lines.set_index(["seed", "site"] if by_site else "seed")["value"].to_dict()

    def places(self, scope: str) -> dict[str, str]:
        """{site or cohort: view} of what was measured in this scope, by the kind of model that the row reports.

        Models that sites hold right after training are not taken to cohorts: another kind that was stands there.
        """
        order = (self.view, *VIEWS[self.scope]) if scope == "cohort" else (self.view,)
        measured = self.measured.get(scope, {}).items()
        chosen = {site: next((view for view in order if view in views), None) for site, views in measured}
        return {site: view for site, view in chosen.items() if view is not None}

    @cached_property
    def reported(self) -> pd.DataFrame:
        """The known scores of the models that the row reports, a line per number."""
        return self.lines[self.lines["view"] == self.view].dropna()

    @cached_property
    def measured(self) -> dict[str, dict[str, list[str]]]:
        """The views that were measured, by scope and site."""
        found: dict[str, dict[str, list[str]]] = {}
        for scope, site, view in self.lines[["scope", "site", "view"]].drop_duplicates().itertuples(index=False):
            found.setdefault(scope, {}).setdefault(site, []).append(view)
        return found

    @cached_property
    def validation(self) -> Spread | None:
        """The score that selected the round, in per cent, over seeds."""
        chosen = [run.told["validation"] for run in self.runs if run.told["chosen"]]
        return spread(None if value is None else 100 * value for value in chosen)

    @cached_property
    def cost(self) -> dict[str, Any]:
        """Size and operations of its net, traffic of a site and clock time of a round, means over seeds; None: unknown.

        Parts of the traffic are not known of all runs. A round's time is without its evaluation.
        """
        told, net = pd.DataFrame([run.told for run in self.runs]), net_cost(self.runs[0].opening)
        visits = 0 if self.pooled else told["visits"].sum()
        entries, rounds = pd.DataFrame([*told["entries"]]), 0 if self.pooled else told["rounds_with_entries"].sum()
        return {
            "parameters": net.parameters if net else self.runs[0].start.parameters,
            "model_bytes": net.model_bytes if net else None,
            "flops_per_image": net.flops if net else None,
            "sent_per_round": float(told["sent"].sum() / visits) if visits else None,
            "sent_by_entry": (entries.sum() / rounds).to_dict() if rounds else {},
            "received_per_round": float(told["received"].sum() / visits) if visits else None,
            "seconds_per_round": float(np.mean(told["seconds_per_round"])),
            "seconds": float(np.mean(told["seconds"])),
            "together": self.together,
        }


def over_seeds(lines: pd.DataFrame) -> dict[tuple[str, str], dict[tuple[str, ...], Spreads]]:
    """Mean, deviation and number over seeds of all scores, by data set and row, then as `RowResult.spreads`."""
    by_seed = lines.pivot(index=["data", "row", *PLACE[1:]], columns="seed", values="value")
    over = pd.DataFrame({"mean": by_seed.mean(axis=1), "std": by_seed.std(axis=1), "n": by_seed.count(axis=1)})
    found: dict[tuple[str, str], dict[tuple[str, ...], Spreads]] = {}
    for (data, row, *place, metric), mean, std, n in over[over["n"] > 0].itertuples():
        own = found.setdefault((data, row), {}).setdefault(tuple(place), {})
        own[metric] = Spread(mean, std if n > 1 else None, n)
    return found


def federation_of(rows: Iterable[RowResult]) -> Start | None:
    """The start of the run that shows best who holds what: pooled training hides it."""
    starts = (run.start for row in rows for run in row.runs)
    return max(starts, key=lambda start: len(start.training_images), default=None)


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


def reported_rule(config: Mapping[str, Any]) -> str:
    """How a run chose the round that is reported."""
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
