"""Finished runs, and the rows that they make up: scores in per cent over seeds, by view, site and class, and costs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from equipoise.engine.events import first_event
from equipoise.methods import get_method
from equipoise.report.record import TOLD, RunRecord
from equipoise.statistics import Spread, spread
from equipoise.studies.grid import Cell, listed
from equipoise.studies.row_cost import NetCost, net_cost
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
    """A finished run."""

    cell: Cell
    record: RunRecord
    together: int
    part: str

    @cached_property
    def scores(self) -> pd.DataFrame:
        """All that the study may show of the run: test results, or validation scores of what it reports.

        Tidy: a line per number, which is a fraction; class or site are empty where it is of all.
        """
        told = self.record.finals if self.part == "test" else self.record.validation
        told = told.set_index(PLACE[:4])
        metrics = told[[column for column in told if column not in TOLD]].melt(ignore_index=False, var_name="metric")
        recall = told["recall"][told["recall"].str.len() > 0]
        by_class = pd.DataFrame(recall.tolist(), recall.index).reindex(columns=range(len(self.record.start.classes)))
        classes = by_class.set_axis(self.record.start.classes, axis=1).melt(ignore_index=False, var_name="class")
        lines = pd.concat([metrics.assign(**{"class": ""}), classes.assign(metric="recall")]).reset_index()
        return lines[[*PLACE, "value"]].astype({"value": float})

    @cached_property
    def judges(self) -> list[str]:
        """Who holds the images that scores are of: sites, or the one common set; unseen cohorts apart."""
        finals, images = self.record.finals, self.record.images[self.part]
        cohorts = {*finals["site"][finals["scope"] == "cohort"]}
        return [name for name in images.index[images.sum(axis=1) > 0] if name not in cohorts]

    @cached_property
    def data_seen(self) -> DataSeen:
        """What the run tells of its data."""
        return DataSeen.of(self.record.start)

    @property
    def on_common_set(self) -> bool:
        """True when one set, which no site trains on, judges all models."""
        return len(self.judges) == 1 and self.judges[0] in self.record.evaluators

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
        return max((run.together for run in self.runs), default=1)

    # ---- scores --------------------------------------------------------------------------------

    @cached_property
    def lines(self) -> pd.DataFrame:
        """The scores of all runs; of the folds of a seed, their mean."""
        own = [run.scores.assign(seed=run.cell.seed) for run in self.runs]
        every = pd.concat(own, ignore_index=True) if own else pd.DataFrame(columns=[*PLACE, "value", "seed"])
        if all(run.cell.fold is None for run in self.runs):
            return every
        return every.groupby([*PLACE, "seed"], sort=False)["value"].mean().reset_index()

    @property
    def seeds(self) -> list[int]:
        """The seeds of its runs."""
        return sorted({run.cell.seed for run in self.runs})

    @cached_property
    def spreads(self) -> dict[tuple[str, ...], Spreads]:
        """Scores in per cent over seeds, by view, scope, site and class."""
        by_seed = 100 * self.lines.pivot(index=PLACE[1:], columns="seed", values="value")
        over = pd.DataFrame({"mean": by_seed.mean(axis=1), "std": by_seed.std(axis=1), "n": by_seed.count(axis=1)})
        found: dict[tuple[str, ...], Spreads] = {}
        for (*place, metric), mean, std, n in over[over["n"] > 0].itertuples():
            found.setdefault(tuple(place), {})[metric] = Spread(mean, std if n > 1 else None, n)
        return found

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
        """Scores in per cent of one view, over seeds."""
        return self.spreads.get((view, scope, site, ""), {})

    @property
    def recall(self) -> dict[str, Spread]:
        """Recall of each class over all sites' images, in per cent, over seeds."""
        classes = self.runs[0].record.start.classes if self.runs else ()
        known = {name: self.spreads.get((self.view, "pooled", "", name)) for name in classes}
        return {name: own["recall"] for name, own in known.items() if own}

    def values(self, metric: str, by_site: bool) -> dict[Hashable, float]:
        """One score in per cent by seed, or by seed and site."""
        lines = self.lines.dropna()
        lines = lines[(lines["metric"] == metric) & (lines["view"] == self.view)]
        lines = lines[lines["scope"] == ("site" if by_site else "mean")]
        return (100 * lines.set_index(["seed", "site"] if by_site else "seed")["value"]).to_dict()

    def places(self, scope: str) -> dict[str, str]:
        """{site or cohort: view} of what was measured in this scope, by the kind of model that the row reports.

        Models that sites hold right after training are not taken to cohorts: another kind that was stands there.
        """
        order = (self.view, *VIEWS[self.scope]) if scope == "cohort" else (self.view,)
        measured = self.lines[self.lines["scope"] == scope].groupby("site", sort=False)["view"].unique()
        chosen = {site: next((view for view in order if view in views), None) for site, views in measured.items()}
        return {str(site): view for site, view in chosen.items() if view is not None}

    @cached_property
    def validation(self) -> Spread | None:
        """The score that selected the round, in per cent, over seeds."""
        chosen = [selection.score for run in self.runs if (selection := run.record.selection)]
        return spread(None if value is None else 100 * value for value in chosen)

    @cached_property
    def cost(self) -> dict[str, Any]:
        """Size and operations of its net, traffic of a site and clock time of a round, means over seeds; None: unknown.

        Parts of the traffic are not known of all runs. A round's time is without its evaluation.
        """
        records = [run.record for run in self.runs]
        net, moved = self.runs[0].cost, pd.concat([record.work[["sent", "received"]] for record in records])
        moved = {} if self.pooled or moved.empty else moved.mean().to_dict()
        entries = pd.concat([record.entries for record in records if not self.pooled] or [pd.DataFrame()])
        seconds = [record.rounds["seconds"].mean() for record in records]
        return {
            "parameters": net.parameters if net else records[0].start.parameters,
            "model_bytes": net.model_bytes if net else None,
            "flops_per_image": net.flops if net else None,
            "sent_per_round": moved.get("sent"),
            "sent_by_entry": entries.fillna(0.0).mean().to_dict(),
            "received_per_round": moved.get("received"),
            "seconds_per_round": float(np.mean(seconds)),
            "seconds": float(np.mean([record.seconds for record in records])),
            "together": self.together,
        }


def federation_of(rows: Iterable[RowResult]) -> RunRecord | None:
    """The run that shows best who holds what: pooled training hides it."""
    runs = (run.record for row in rows for run in row.runs)
    return max(runs, key=lambda run: len(run.training_images), default=None)


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
