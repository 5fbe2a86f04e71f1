"""Scores of the frozen studies on images kept apart: own patients and patients of all classes, with intervals.

    python benchmarks/frozen_scores.py RUNS     # results/frozen/STUDY.*, from RUNS/frozen-STUDY/runs

STUDY.json has scores and differences, STUDY.confusion.xz the confusion matrices behind them. It also takes over the
settings that RUNS tuned, and writes study files and pages anew.

A run keeps the predicted class of every image (`predictions.npz`). The index of the prepared images tells its lesion
and its site. A published row stays until a new one has as many seeds: all seeds of a row come from one machine.
`docs/protocol.md` says what is compared.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import frozen
import pages
from equipoise.contract.config import Config
from equipoise.data.assembly import assemble
from equipoise.data.federation import Federation
from equipoise.data.store import Store
from equipoise.engine.image_scores import FILE, Predictions
from equipoise.engine.runs import make_config
from equipoise.evidence.paired import RowEvidence, SharedResamples, compared
from equipoise.metrics import from_confusion
from equipoise.studies.checks import is_finished
from equipoise.studies.grid import as_settings

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "runs of the frozen studies; tests/test_frozen.py reads its files"
RESULTS = frozen.ROOT / "results" / "frozen"
METRICS = ("balanced_accuracy", "macro_f1", "worst_class_recall")
OURS, LOCAL, SEEDS = frozen.OURS, "closed, local", 5
RIVALS = ("fednpr-per", "fediic", "fedbm", "prr", "local+balanced")
#: which machine a row's runs come from; rows without a word of it come from another one
THIS, OTHER = "this", "another"
SCOPES = {"own", "any"}


def federation_of(study: str, patients: str) -> Federation:
    """A study's federation. With images kept apart, sites test on their own of these or on all of them."""
    settings = frozen.settings_of(study)
    if "data.kept_apart" in settings:
        settings["data.kept_apart"] = patients
    config: Config = make_config(None, [*as_settings(frozen.nested(settings))], study, method="fedavg")
    size = settings.get("data.size", 64)
    return assemble(Store(config.data.store_root() / f"{config.data.name}-{size}px"), config.data, 1)


class Apart:
    """The test images of each site's model, in the order in which it met them."""

    def __init__(self, study: str):
        self.federation = federation_of(study, "any")
        common = self.federation.common
        self.common = common is not None
        places = [common] if common is not None else [site for site in self.federation.sites if "test" in site.splits]
        self.tests = {place.name: place.splits["test"] for place in places}
        own = {} if self.common else {site.name: site.splits for site in federation_of(study, "own").sites}
        #: which of these images are of the site's own patients
        self.homes = {
            name: np.isin(split.rows, own[name]["test"].rows)
            if "test" in own.get(name, {})
            else np.zeros(len(split), bool)
            for name, split in self.tests.items()
        }

    def images(self) -> list[int]:
        """The number of test images of each class."""
        whose = self.homes if not self.common else {name: slice(None) for name in self.tests}
        labels = np.concatenate([split.labels[whose[name]] for name, split in self.tests.items()])
        return np.bincount(labels, minlength=len(self.federation.classes)).tolist()

    def predictions(self, run: Path, view: str, patients: str) -> Predictions | None:
        """What a run's models of one kind predict; None where it has none of this kind."""
        columns, found = _kept(run), []
        sites = columns["sites"][columns["site"]]
        chosen = columns["views"][columns["view"]] == view
        for site in dict.fromkeys(sites[chosen].tolist()):
            at = np.flatnonzero(chosen & (sites == site))
            if not self.common and site not in self.tests:
                continue  # a cohort
            name = next(iter(self.tests)) if self.common else site
            split = self.tests[name]
            if len(at) != len(split) or (columns["label"][at] != split.labels).any():
                raise ValueError(f"{run}: its images are others")
            at_home = self.homes[name] if patients == "own" and not self.common else np.ones(len(split), dtype=bool)
            if at_home.any():
                found.append((site, at[at_home], split.groups()[at_home].astype(str), split.labels[at_home]))
        if not found:
            return None
        places = [site if patients == "own" and not self.common else "all" for site, *_ in found]
        sizes = [len(rows) for _, rows, *_ in found]
        predicted = np.concatenate([columns["prediction"][rows] for _, rows, *_ in found]).astype(np.int64)
        number = len(self.federation.classes)
        return Predictions(
            self.federation.classes,
            {
                "split": np.full(len(predicted), "test"),
                "view": np.full(len(predicted), view),
                "site": np.repeat([site for site, *_ in found], sizes),
                "place": np.repeat(places, sizes),
                "round": np.zeros(len(predicted), dtype=np.int64),
                "group": np.concatenate([groups for *_, groups, _ in found]),
                "label": np.concatenate([labels for *_, labels in found]),
                "prediction": predicted,
                "probabilities": np.eye(number, dtype=np.float32)[predicted],
            },
        )


def _kept(run: Path) -> dict[str, np.ndarray]:
    """Views, sites, labels and predictions of a run's test images."""
    with np.load(run / FILE) as file:
        test = file["split"] == "test"
        views, view = np.unique(file["view"][test], return_inverse=True)
        sites, site = np.unique(file["site"][test], return_inverse=True)
        plain = {name: file[name][test] for name in ("label", "prediction")}
    return {"views": views, "sites": sites, "view": view, "site": site, **plain}


def confusions(predictions: Predictions) -> dict[str, list[list[int]]]:
    """The confusion matrix of each site's model."""
    number, columns, found = len(predictions.classes), predictions.columns, {}
    for site in dict.fromkeys(columns["site"].tolist()):
        own = columns["site"] == site
        flat = columns["label"][own] * number + columns["prediction"][own]
        found[site] = np.bincount(flat, minlength=number**2).reshape(number, number).tolist()
    return found


def view_of(apart: Apart, runs: Mapping[int, Path], wanted: str | None) -> str:
    """The kind of model that the study reports for a row."""
    views = _kept(next(iter(runs.values())))["views"].tolist()
    order = [wanted] if wanted else ["global", "personal"] if apart.common else ["personal", "global"]
    return next(view for view in order if view in views)


def scores(study: str, folder: Path, apart: Apart, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Every row's scores and intervals on one data set, and its differences from the rows that it is held against."""
    rows = {row["name"]: row for row in frozen.rows_of(study, chosen)}
    found: dict[str, Any] = {}
    runs: dict[str, dict[int, Path]] = {}
    for path in sorted(folder.glob("*-seed*")):
        name, _, seed = path.name.rpartition("-seed")
        if name in rows and is_finished(path):
            runs.setdefault(name, {})[int(seed)] = path
    if "closed" in runs and frozen.in_one_run({name: frozen.nested(row["settings"]) for name, row in rows.items()}):
        runs[frozen.COMMON] = runs["closed"]
    for name in runs.keys() & frozen.seedless(study):
        runs[name] = dict.fromkeys(range(1, SEEDS + 1), runs[name][1])
    for patients in frozen.patients_of(study):
        kept: dict[str, dict[int, list[Predictions]]] = {}
        for name, own in runs.items():
            view = view_of(apart, own, rows[name].get("view"))
            told = {seed: apart.predictions(path, view, patients) for seed, path in own.items()}
            kept[name] = {seed: [one] for seed, one in told.items() if one is not None}
            about = {"view": view, "seeds": sorted(own), "table": rows[name]["tables"][0], "machine": THIS}
            entry = found.setdefault(name, about)
            entry.setdefault("confusion", {})[patients] = {
                str(seed): confusions(one) for seed, (one,) in kept[name].items()
            }
        shared = SharedResamples(kept, "test")
        every = {name: shared.row(name, found[name]["view"], METRICS) for name in kept}
        known = {name: row for name, row in every.items() if row is not None}
        for name, row in known.items():
            found[name][patients] = {metric: _told(row, metric) for metric in METRICS}
        _add_gaps(found, known, patients)
    return found


def _told(row: RowEvidence, metric: str) -> dict[str, Any]:
    bounds = row.interval(metric)
    values = [round(100 * float(value), 3) for value in row.values[metric]]
    mean = round(100 * float(np.mean(row.values[metric])), 3)
    return {"mean": mean, "low": round(100 * bounds.low, 2), "high": round(100 * bounds.high, 2), "by_seed": values}


def _add_gaps(found: dict[str, Any], known: Mapping[str, RowEvidence], patients: str) -> None:
    """Differences: of each row from the local closed form, of our recipe from each row, of systems from their parts."""
    pairs = [(name, LOCAL) for name in known if name != LOCAL]
    pairs += [(OURS, name) for name in known if name != OURS]
    pairs += [(like, part) for part, (like, _, _) in frozen.PARTS.items()]
    pairs += [("prr", "fedavg"), ("fednpr-per", "fedavg"), ("fediic", "fedavg"), ("fedbm", "fedavg")]
    pairs += [("prr", "fml"), ("fedbm", "fedetf"), ("fedavg+balanced", "fedavg")]
    pairs += [(name, "local") for name in known if name.startswith("local+")]
    for first, second in pairs:
        if first in known and second in known:
            gaps = {}
            for metric in METRICS:
                gap = compared(known[first], known[second], metric)
                if gap is not None:
                    bounds = gap.difference
                    gaps[metric] = [round(100 * v, 2) for v in (bounds.value, bounds.low, bounds.high)]
                    gaps[metric] += [
                        round(gap.probability, 3),
                        round(gap.effect, 2) if gap.effect == gap.effect else None,
                    ]
            found[first].setdefault("gaps", {}).setdefault(patients, {})[second] = gaps


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """New rows in place of published ones that have no more seeds, or lack the own patients; gaps are between rows of
    one machine."""
    taken = {
        name
        for name, row in new.items()
        if len(row["seeds"]) >= len(old.get(name, {}).get("seeds", ()))
        or row.keys() & SCOPES > old[name].keys() & SCOPES
    }
    rows: dict[str, Any] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        known = new[name] if name in taken else {"machine": OTHER, **old[name]}
        gaps: dict[str, dict[str, Any]] = {}
        for source, fresh in ((old, False), (new, True)):
            for patients, others in source.get(name, {}).get("gaps", {}).items():
                kept = {other: gap for other, gap in others.items() if ({name, other} <= taken) == fresh}
                gaps.setdefault(patients, {}).update(kept)
        rows[name] = {**known, "gaps": gaps}
    return rows


def published(study: str) -> dict[str, Any]:
    """A study's file of results, with the confusion matrices of each row."""
    if not (RESULTS / f"{study}.json").exists():
        return {"data": {}}
    known: dict[str, Any] = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))
    every = json.loads(lzma.decompress((RESULTS / f"{study}.confusion.xz").read_bytes()))
    for data, rows in known["data"].items():
        for name, row in rows.items():
            row["confusion"] = every[data][name]
    return known


def publish(study: str, about: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a study's results."""
    every = {data: {name: row["confusion"] for name, row in rows.items()} for data, rows in found.items()}
    plain = {
        data: {name: {key: value for key, value in row.items() if key != "confusion"} for name, row in rows.items()}
        for data, rows in found.items()
    }
    text = json.dumps({**about, "data": plain}, separators=(",", ":"))
    (RESULTS / f"{study}.json").write_text(text + "\n", encoding="utf-8")
    packed = lzma.compress(json.dumps(every, separators=(",", ":")).encode(), preset=9)
    (RESULTS / f"{study}.confusion.xz").write_bytes(packed)


def rescored(matrix: Any) -> dict[str, float]:
    """The metrics of a confusion matrix, in per cent: what a test holds the tables against."""
    return {metric: 100 * from_confusion(np.array(matrix))[metric] for metric in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--only", nargs="*", default=list(frozen.FEDERATIONS))
    asked = parser.parse_args()
    tuned = frozen.tuned(asked.runs)
    frozen.CHOSEN.write_text(json.dumps(tuned, indent=1) + "\n", encoding="utf-8")
    frozen.write_grids()
    for study in asked.only:
        apart = Apart(study)
        chosen = frozen.chosen_for(study, tuned)
        sets = [f"Dirichlet {alpha}" for alpha in frozen.ALPHAS] if study in frozen.DRAWN else [""]
        found = {name: scores(study, asked.runs / f"frozen-{study}" / "runs" / name, apart, chosen) for name in sets}
        old = published(study)["data"]
        found = {name: merged(old.get(name, {}), own) for name, own in found.items()}
        about = {"study": study, "classes": apart.federation.classes, "images": apart.images()}
        if any(found.values()):
            publish(study, about, found)
        print(study, {name: sum(row["machine"] == THIS for row in rows.values()) for name, rows in found.items()})
    pages.main()


if __name__ == "__main__":
    main()
