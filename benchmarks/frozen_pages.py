"""Tables and sentences of the page of results that come from `results/frozen/`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "results" / "frozen"
METRICS = ("balanced_accuracy", "macro_f1", "worst_class_recall")
HEADS = ("balanced accuracy", "macro F1", "worst class")
OURS, RIVALS = "equipoise", ("fednpr-per", "fediic", "fedbm", "prr", "local+balanced")
LOCAL, POOLED = "closed, local", "central"
#: points that the goal asks for, in balanced accuracy and worst-class recall, and on how many federations
POINTS, FEDERATIONS = 3.0, 3
#: seeds that a whole row has
SEEDS = 5
AUTHORS_TITLE = "PRR's sites, the authors' splits"
FEDERATION = {"dermoscopy": "PRR's sites", "isic": "Fed-ISIC2019", "ham10000": "HAM10000", "pbc": "PBC"}


class View(NamedTuple):
    """The scores of a study on one data set: of each site's own patients, or of all."""

    study: str
    data: str
    patients: str

    @property
    def title(self) -> str:
        """The name on the page."""
        if self.study not in FEDERATION:
            return AUTHORS_TITLE
        return f"{FEDERATION[self.study]}, {self.data or f'{self.patients} patients'.replace('any', 'all')}"

    @property
    def rows(self) -> dict[str, Any]:
        """The rows that have such scores."""
        return {name: row for name, row in rows_of(self.study, self.data).items() if self.patients in row}

    def mean(self, row: str, metric: str = METRICS[0]) -> float:
        """A row's mean over seeds."""
        return float(self.rows[row][self.patients][metric]["mean"])

    def gap(self, first: str, second: str, metric: str = METRICS[0]) -> list[float] | None:
        """A difference with its interval; None where the two have no seed of one machine in common."""
        own = rows_of(self.study, self.data).get(first, {}).get("gaps", {}).get(self.patients, {}).get(second, {})
        found: list[float] | None = own.get(metric)
        return found

    def best_rival(self, metric: str) -> str:
        """The rival with the highest score; none before one has run."""
        return max((name for name in RIVALS if name in self.rows), key=lambda name: self.mean(name, metric), default="")


DRAWN = [View(study, f"Dirichlet {alpha}", "any") for study in ("ham10000", "pbc") for alpha in (0.05, 0.1)]
OWN = [View("dermoscopy", "", "own"), View("isic", "", "own")]
STRANGERS = [View("dermoscopy", "", "any"), View("isic", "", "any")]
VIEWS = [view for pair in zip(OWN, STRANGERS, strict=True) for view in pair] + DRAWN
AUTHORS = View("authors", "", "own")
#: as the papers test: own patients where sites have their own, one test set for all where sites are drawn
AS_PAPERS = [*OWN, *DRAWN]
#: a paper's claim: the row that claims, the row that it claims to beat
CLAIMS = (
    ("PRR", "PRR over FML", "prr", "fml"),
    ("PRR", "PFA", "prr", "prr without PFA"),
    ("PRR", "DET", "prr", "prr without DET"),
    ("PRR", "CPA", "prr", "prr without CPA"),
    ("FedNPR", "FedNPR-Per over FedAvg", "fednpr-per", "fedavg"),
    ("FedNPR", "NPR", "fednpr-per", "fednpr-per without NPR"),
    ("FedNPR", "Sinkhorn over random", "fednpr-per", "fednpr-per, random clusters"),
    ("FedIIC", "FedIIC over FedAvg", "fediic", "fedavg"),
    ("FedIIC", "margins", "fediic", "fediic without margins"),
    ("FedIIC", "intra-client contrast", "fediic", "fediic without intra-contrast"),
    ("FedIIC", "inter-client contrast", "fediic", "fediic without inter-contrast"),
    ("FedBM", "FedBM over FedETF", "fedbm", "fedetf"),
    ("FedBM", "its generator", "fedbm", "fedbm without generator"),
    ("FedBM", "its classifier of text", "fedbm", "fedbm, learned classifier"),
)
#: hospitals, the views that are like them, and whether they may exchange anything
HOSPITALS = (
    ("lack some classes", DRAWN, True),
    ("meet patients of other hospitals", STRANGERS, True),
    ("have all classes, and meet their own patients alone", OWN[:1], True),
    ("differ in classes and scanners, and meet their own patients alone", OWN[1:], True),
    ("may send nothing", OWN, False),
)
NAMES = {
    "closed, common": "`closed`, the common model",
    "closed, local": "`closed-local`",
    "closed": "`closed`, each site's own model",
}


@cache
def rows_of(study: str, data: str) -> dict[str, Any]:
    """The rows of a study on one data set; none where it has not run."""
    if not (RESULTS / f"{study}.json").exists():
        return {}
    found: dict[str, Any] = json.loads((RESULTS / f"{study}.json").read_text(encoding="utf-8"))["data"][data]
    return found


@cache
def recipe() -> dict[str, Any]:
    """The search of the recipe."""
    found: dict[str, Any] = json.loads((RESULTS.parent / "recipe.json").read_text(encoding="utf-8"))
    return found


def named(row: str) -> str:
    """A row in words: how to run it."""
    method, _, loss = row.partition("+")
    loss = f"{loss} softmax" if loss == "balanced" else loss
    return NAMES.get(row, f"`{method}`" + (f" with {loss}" if loss else ""))


# ---- tables ---------------------------------------------------------------------------------------------------------


def core(view: View) -> Iterator[tuple[str, ...]]:
    """The core rows, the highest balanced accuracy first, each score with its interval."""
    rows = {name: row for name, row in view.rows.items() if row["table"] == "Core"}
    best = {metric: max(view.mean(name, metric) for name in rows) for metric in METRICS}
    for name, row in sorted(rows.items(), key=lambda pair: -view.mean(pair[0])):
        told = []
        for metric in METRICS:
            own = row[view.patients][metric]
            mean = f"{own['mean']:.1f}"
            mean = f"**{mean}**" if own["mean"] == best[metric] else mean
            told.append(f"{mean} ({own['low']:.0f} to {own['high']:.0f})")
        yield (starred(name, row), str(len(row["seeds"])), *told)


def starred(name: str, row: Mapping[str, Any]) -> str:
    """A row's name, with a star where another machine ran it."""
    return name if row.get("machine") == "this" else f"{name} \\*"


def beyond() -> Iterator[tuple[str, ...]]:
    """Balanced accuracy of all other rows, on every data set."""
    every = [view.rows for view in VIEWS]
    names = dict.fromkeys(name for rows in every for name, row in rows.items() if row["table"] != "Core")
    for name in names:
        cells = [
            f"{view.mean(name):.1f} ({len(rows[name]['seeds'])})" if name in rows else "" for view, rows in pairs()
        ]
        yield (name, *cells)


def pairs() -> list[tuple[View, dict[str, Any]]]:
    """All views with their rows."""
    return [(view, view.rows) for view in VIEWS]


def told_gap(found: Sequence[float] | None) -> str:
    """A difference and its interval; bold where the interval excludes zero."""
    if found is None:
        return "open"
    text = f"{found[0]:+.1f} ({found[1]:+.0f} to {found[2]:+.0f})"
    return f"**{text}**" if decided(found) else text


def with_chance(found: Sequence[float] | None, rival: str) -> str:
    """A difference from a rival, with the share of resamples in which ours is higher."""
    return f"{told_gap(found)} over {rival}, P {found[3]:.2f}" if found else "open"


def decided(found: Sequence[float] | None) -> int:
    """1 where a whole interval is above zero, -1 where it is below, else 0."""
    return 0 if found is None else int(found[1] > 0) - int(found[2] < 0)


def exchange() -> Iterator[tuple[str, ...]]:
    """What each row that exchanges something gains over the local closed form in balanced accuracy."""
    names = dict.fromkeys(name for view in VIEWS for name, row in view.rows.items() if row["table"] != "Components")
    for name in names:
        if name.partition("+")[0] not in ("local", LOCAL, POOLED):
            yield (name, *(told_gap(view.gap(name, LOCAL)) for view in VIEWS))


def losses() -> Iterator[tuple[str, ...]]:
    """What each loss gains over cross-entropy in local learning."""
    names = dict.fromkeys(name for view in VIEWS for name in view.rows if name.startswith("local+"))
    for name in sorted(names):
        yield (name.partition("+")[2], *(told_gap(view.gap(name, "local")) for view in VIEWS))


def goal() -> Iterator[tuple[str, ...]]:
    """Our recipe against the best rival of each score, on every data set."""
    for view in VIEWS:
        best = {metric: view.best_rival(metric) for metric in METRICS}
        told = [with_chance(view.gap(OURS, rival, metric), rival) for metric, rival in best.items()]
        yield (view.title, *told, "open" if "open" in told else "yes" if reached(view) else "no")


def claims(papers: Sequence[str] = ("PRR", "FedNPR", "FedIIC", "FedBM")) -> Iterator[tuple[str, ...]]:
    """Each claim's gain in balanced accuracy as the papers test, and the verdict."""
    for paper, what, first, second in CLAIMS:
        if paper in papers:
            gaps = [view.gap(first, second) for view in AS_PAPERS]
            yield (paper, what, *map(told_gap, gaps), verdict(gaps))


def claims_table(table: Callable[..., str], *papers: str) -> str:
    """The claims of some papers, or of all."""
    heads = ("paper", "claim", *(view.title for view in AS_PAPERS), "verdict")
    return table(heads, claims(papers) if papers else claims())


def verdict(gaps: Sequence[Sequence[float] | None]) -> str:
    """What intervals say of a claim.

    >>> verdict([[2, 1, 3], [1, -1, 3], None]), verdict([[-2, -3, -1], [0, -1, 1]]), verdict([None])
    ('holds on 1 of 2', 'does not hold: the reverse on 1 of 2', 'open')
    """
    known = [decided(gap) for gap in gaps if gap is not None]
    holds, reverse = known.count(1), known.count(-1)
    if not known:
        return "open"
    if holds and reverse:
        return f"holds on {holds} of {len(known)}, the reverse on {reverse}"
    if reverse:
        return f"does not hold: the reverse on {reverse} of {len(known)}"
    return f"holds on {holds} of {len(known)}" if holds else "not shown"


# ---- sentences ------------------------------------------------------------------------------------------------------


def reached(view: View) -> bool:
    """Whether the recipe reaches the goal: points in two scores beyond chance, and no less macro F1."""
    gaps = {metric: view.gap(OURS, view.best_rival(metric), metric) for metric in METRICS}
    if None in gaps.values():
        return False
    enough = [gaps[metric] for metric in METRICS if metric != "macro_f1"]
    return all(gap[0] >= POINTS and gap[1] > 0 for gap in enough) and gaps["macro_f1"][0] >= 0  # type: ignore[index]


def federations_reached() -> list[str]:
    """The federations on which the recipe reaches the goal in every view."""
    return [title for study, title in FEDERATION.items() if all(reached(view) for view in VIEWS if view.study == study)]


def ahead(sign: int) -> list[str]:
    """The views in which the recipe's balanced accuracy is above the best rival's, or below it, beyond chance."""
    return [view.title for view in VIEWS if decided(view.gap(OURS, view.best_rival(METRICS[0]))) == sign]


def best_rows(views: Sequence[View], exchanging: bool) -> list[str]:
    """The rows by their mean balanced accuracy over some views, the best first."""
    every = [view.rows for view in views]
    shown = ("Core", "All methods", "Losses at each site alone")
    names = [name for name in every[0] if all(name in rows and rows[name]["table"] in shown for rows in every)]
    names = [name for name in names if name != POOLED]
    names = [name for name in names if exchanging or name.partition("+")[0] in ("local", LOCAL)]
    return sorted(names, key=lambda name: -sum(view.mean(name) for view in views))


def which() -> Iterator[tuple[str, str, str]]:
    """For each kind of hospitals: what to take, and the balanced accuracy behind it."""
    for hospitals, views, exchanging in HOSPITALS:
        best, *rest = best_rows(views, exchanging)
        others = [name for name in rest if name in (rest[0], "fedavg+balanced", "local+balanced", "prr")]
        told = "; ".join(
            f"{view.title}: " + ", ".join(f"{named(row)} {view.mean(row):.1f}" for row in [best, *others])
            for view in {view.study: view for view in reversed(views)}.values()
        )
        yield (hospitals, named(best), told)


def trained(study: Any) -> Iterator[str]:
    """Rows of full training with several seeds, in words and with their scores, the highest first."""
    rows = {row: f"`{row}`" for row in ("prr", "fml", "local", "fedbn", "fedavg")}
    rows |= {"prr-cpa": "`prr` without CPA", "prr-exact": "`prr` as released"}
    for row in sorted(rows, key=lambda row: -study.mean(row)):
        yield f"{rows[row]} {study.mean(row):.1f}"


def complete() -> Iterator[tuple[str, ...]]:
    """For each data set: core rows with all seeds, the fewest seeds of one, other rows, and rows of another machine."""
    for study, data in dict.fromkeys((view.study, view.data) for view in VIEWS):
        rows = rows_of(study, data).values()
        core = [len(row["seeds"]) for row in rows if row["table"] == "Core"]
        whole = sum(count >= SEEDS for count in core)
        elsewhere = sum(row.get("machine") != "this" for row in rows)
        title = ", ".join(filter(None, (FEDERATION[study], data)))
        yield (title, f"{whole} of {len(core)}", str(min(core)), str(len(rows) - len(core)), str(elsewhere))
