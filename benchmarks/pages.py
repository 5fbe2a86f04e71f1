"""Writes the figures of README and docs from the files in `results/`.

    python benchmarks/pages.py

In a page, `<!-- generated: NAME -->` and `<!-- end -->` enclose the filled-in template `docs/blocks/NAME.md`. There,
figures are looked up with the functions and filters below: nobody types a figure of ours.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from scipy.stats import kendalltau
from scipy.stats import t as student

from equipoise.metrics import METRICS, from_confusion
from equipoise.report import RunRecord, read_run
from equipoise.studies.archive import ARCHIVE, unpack

sys.path.insert(0, str(Path(__file__).parent))
import coverage
import frozen_pages

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "nothing: tests/test_docs.py compares its pages"

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
BLOCKS = ROOT / "docs" / "blocks"
MARKED = re.compile(r"(?<=<!-- generated: )([\w-]+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)
TITLES = {metric.name: metric.title for metric in METRICS}


class Study:
    """A study's `summary.json`, all in per cent, and the logs of its runs where these are kept."""

    def __init__(self, name: str):
        self.folder = RESULTS / name
        self.summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        self.rows: dict[str, Any] = {row["method"]: row for row in self.summary["rows"]}

    def mean(self, row: str, metric: str = "macro_f1", site: str = "") -> float:
        """A row's mean over seeds, over all sites or at one."""
        own = self.rows[row]["sites"][site] if site else self.rows[row]
        return own[metric]["mean"]

    def lead(self, row: str, other: str, metric: str = "macro_f1", site: str = "") -> float:
        """How far a row's mean is ahead of another's."""
        return self.mean(row, metric, site) - self.mean(other, metric, site)

    def lead_on_paper(self, row: str, metric: str = "macro_f1") -> float:
        """How far a row's mean is ahead of the paper's."""
        return self.mean(row, metric) - self.rows[row]["paper"][metric]

    def farthest(self, rows: Iterable[str], metric: str = "macro_f1") -> float:
        """The largest distance of a row's mean from the paper's."""
        return max(abs(self.mean(row, metric) - self.rows[row]["paper"][metric]) for row in rows)

    def test(self, row: str, table: str = "") -> dict[str, Any]:
        """The paired test between a row and the best of its table."""
        (found,) = [
            test
            for own in self.summary["tests"].values()
            for test in own
            if test["other"] == row and table in ("", test["table"])
        ]
        return found

    def best(self) -> str:
        """The best row of the first table, by which the others were tested."""
        return next(iter(self.summary["tests"].values()))[0]["best"]

    def apart(self, level: float = 0.05) -> list[str]:
        """The rows that the corrected t-test tells from the best."""
        tests = next(iter(self.summary["tests"].values()))
        return [test["other"] for test in tests if (test["t_test_holm"] or 1.0) < level]

    def claim(self, row: str, other: str, metric: str = "macro_f1") -> tuple[str, str, str]:
        """What a row gains over another: by seed, the mean with its interval over seeds, and a verdict.

        Without logs there are no pairs, and the interval is Welch's with equal numbers of seeds.
        """
        if (self.folder / ARCHIVE).is_file():
            own, rival = (dict(zip(self.rows[name]["seeds"], self.by_seed(name, metric))) for name in (row, other))
            gains = [own[seed] - rival[seed] for seed in own if seed in rival]
            n, gain, freedom = len(gains), float(np.mean(gains)), len(gains) - 1
            deviation = float(np.std(gains, ddof=1)) if n > 1 else 0.0
        else:
            both = [self.rows[name][metric] for name in (row, other)]
            n, gain, gains = both[0]["n"], both[0]["mean"] - both[1]["mean"], []
            freedom, deviation = 2 * n - 2, float(np.hypot(both[0]["std"], both[1]["std"]))
        by_seed = ", ".join(f"{value:+.1f}" for value in gains)
        if n == 1:
            return by_seed, f"{gain:+.1f}", "one seed: open"
        margin = float(student.ppf(0.975, freedom) * deviation / n**0.5)
        told = f"{gain:+.1f} ({gain - margin:+.1f} to {gain + margin:+.1f})"
        if abs(gain) > margin:
            return by_seed, f"**{told}**", "holds" if gain > 0 else "does not hold: the reverse"
        signs = "; one sign" if gains and (min(gains) > 0 or max(gains) < 0) else ""
        return by_seed, told, f"not shown{signs}"

    def order(self, metric: str = "macro_f1") -> float:
        """Kendall's tau of our order of rows with the paper's: 1 where both agree."""
        rows = [row for row in self.rows.values() if row["paper"] and metric in row["paper"]]
        return float(kendalltau([row[metric]["mean"] for row in rows], [row["paper"][metric] for row in rows])[0])

    def spread(self, row: str, metric: str, view: str = "") -> str:
        """Mean and standard deviation, of what the row reports or of one kind of its models."""
        own = (self.rows[row]["views"].get(view, {}) if view else self.rows[row]).get(metric)
        return "–" if own is None else f"{own['mean']:.1f} ± {own['std']:.1f}"

    # ---- from the logs -------------------------------------------------------------------------

    @cached_property
    def runs(self) -> dict[str, dict[int, RunRecord]]:
        """The runs by row and seed."""
        found: dict[str, dict[int, RunRecord]] = {}
        for folder in sorted(unpack(self.folder).iterdir()):
            row, _, seed = folder.name.rpartition("-seed")
            found.setdefault(row, {})[int(seed)] = read_run(folder)
        return found

    def scores(self, row: str, scope: str = "mean") -> pd.DataFrame:
        """The test results of a row by seed, of the models that it reports."""
        view = self.rows[row]["view"]
        own = {seed: run.finals for seed, run in self.runs[row].items()}
        lines = pd.concat(own, names=["seed"]).reset_index("seed")
        return lines[(lines["view"] == view) & (lines["scope"] == scope)].set_index("seed").sort_index()

    def by_seed(self, row: str, metric: str = "macro_f1") -> list[float]:
        """A row's score with each seed."""
        return (100 * self.scores(row)[metric]).tolist()

    def all_seeds(self, rows: Iterable[str], metric: str = "macro_f1") -> list[float]:
        """The scores of all runs of some rows."""
        return [score for row in rows for score in self.by_seed(row, metric)]

    def matrices(self, row: str) -> np.ndarray:
        """Confusion matrices (seeds, C, C) of all sites' test images together."""
        return np.array(self.scores(row, "pooled")["confusion"].tolist())

    def found(self, row: str, label: str) -> list[int]:
        """How many test images of a class are found, by seed."""
        place = self._place(row, label)
        return self.matrices(row)[:, place, place].astype(int).tolist()

    def called(self, row: str, label: str) -> list[int]:
        """How many test images are called so, by seed."""
        return self.matrices(row)[:, :, self._place(row, label)].sum(1).astype(int).tolist()

    def images(self, row: str, label: str) -> int:
        """How many test images a class has."""
        return int(self.matrices(row)[0, self._place(row, label)].sum())

    def one_matrix(self, row: str, metric: str) -> list[float]:
        """A score over the one confusion matrix of all sites' test images, by seed."""
        return [100 * from_confusion(matrix)[metric] for matrix in self.matrices(row)]

    def _place(self, row: str, label: str) -> int:
        return next(iter(self.runs[row].values())).start.classes.index(label)

    # ---- tables --------------------------------------------------------------------------------

    def table(self, titles: Mapping[str, str], columns: Sequence[str], bold: Sequence[str] = ()) -> str:
        """Rows by their titles. Columns are metrics, `seeds`, and after a metric its `sd` and `paper`; `cohort` has F1
        and AUC on the unseen cohort, `cohort, paper` the paper's. The best of `bold` rows is bold."""
        heads, cells, metric = ["row"], {row: [title] for row, title in titles.items()}, ""
        for column in columns:
            metric = column if column in TITLES else metric
            heads.append({"cohort": "unseen cohort, F1 / AUC"}.get(column, TITLES.get(column, column.split(", ")[-1])))
            means = {row: self.mean(row, metric) for row in bold} if column in TITLES and column != "ece" else {}
            for row in titles:
                text = self._cell(self.rows[row], column, metric)
                best = row in means and means[row] == max(means.values())
                cells[row].append(f"**{text}**" if best else text)
        return table(heads, cells.values(), texts=1)

    def _cell(self, row: Mapping[str, Any], column: str, metric: str) -> str:
        match column:
            case "seeds":
                return str(len(row["seeds"]))
            case "sd":
                return "" if row[metric]["std"] is None else f"{row[metric]['std']:.2f}"
            case "paper":
                return str(row["paper"].get(metric, ""))
            case "cohort":
                (cohort,) = row["cohorts"].values()
                return f"{cohort['macro_f1']['mean']:.2f} / {cohort['balanced_auc']['mean']:.2f}"
            case "cohort, paper":
                (cohort,) = row["cohorts"].values()
                return " / ".join(f"{value:.2f}" for value in cohort["paper"].values())
        return f"{row[metric]['mean']:.2f}"


def table(heads: Sequence[Any], lines: Iterable[Sequence[Any]], texts: int = 0) -> str:
    """A Markdown table whose first `texts` columns, or all, are not numbers."""
    rules = ["---" if place < (texts or len(heads)) else "---:" for place in range(len(heads))]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (heads, rules, *lines))


@cache
def study(name: str) -> Study:
    """A study by its name."""
    return Study(name)


@cache
def measured(name: str) -> Any:
    """A file that a benchmark wrote, such as `benchmarks/gpu.json`."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def listed(texts: Iterable[Any]) -> str:
    """a, b and c."""
    *first, last = map(str, texts)
    return f"{', '.join(first)} and {last}" if first else last


def signed(value: float, places: int = 1) -> str:
    """A difference with its sign."""
    return f"{'+' if value >= 0 else '-'} {abs(value):,.{places}f}"


def fixed(value: float | Iterable[float], places: int = 1) -> str:
    """A number, or a list of them, with so many decimals."""
    return f"{value:,.{places}f}" if isinstance(value, int | float) else listed(f"{v:,.{places}f}" for v in value)


def percent(value: float, places: int = 0) -> str:
    """A fraction in per cent."""
    return f"{100 * value:.{places}f} %"


def interval(values: Sequence[float]) -> list[float]:
    """Where another value of this kind is expected, with a probability of 95 %."""
    n = len(values)
    margin = student.ppf(0.975, n - 1) * np.std(values, ddof=1) * (1 + 1 / n) ** 0.5
    return [float(np.mean(values) - margin), float(np.mean(values) + margin)]


def gain(settings: Iterable[Mapping[str, float]]) -> list[float]:
    """How many times as fast as the usual loop each setting of `gpu.json` runs."""
    return [setting["engine_img_s"] / setting["eager_img_s"] for setting in settings]


def of_replay(settings: Iterable[Mapping[str, float]]) -> list[float]:
    """What share of bare replay's speed each setting of `gpu.json` reaches."""
    return [setting["engine_img_s"] / setting["reference_img_s"] for setting in settings]


def tuning(name: str) -> str:
    """The table of a study that chose FedBM's settings."""
    own = study(name)
    best = max(row["validation"]["mean"] for row in own.rows.values())
    lines = []
    for row, known in own.rows.items():
        score = f"{known['validation']['mean']:.2f}"
        lines.append((row, f"**{score}**" if known["validation"]["mean"] == best else score))
    return table(("row of the study", "macro F1, validation"), lines, texts=1)


def blocks() -> dict[str, str]:
    """Every block by its name, filled in."""
    environment = Environment(
        loader=FileSystemLoader(BLOCKS), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"study": study, "measured": measured, "table": table, "zip": zip}
    environment.globals |= {"max": max, "mean": np.mean, "sd": lambda values: np.std(values, ddof=1)}
    environment.globals |= {"interval": interval, "tuning": tuning, "gain": gain, "of_replay": of_replay}
    environment.globals |= {"frozen": frozen_pages, "coverage": coverage.coverage}
    environment.filters |= {"fixed": fixed, "signed": signed, "percent": percent, "listed": listed}
    return {path.stem: environment.get_template(path.name).render().strip() for path in sorted(BLOCKS.glob("*.md"))}


def pages() -> list[Path]:
    """The pages that may hold blocks."""
    return [*sorted(ROOT.glob("*.md")), *(path for path in sorted(ROOT.glob("docs/**/*.md")) if path.parent != BLOCKS)]


def filled(page: str, texts: Mapping[str, str]) -> str:
    """A page with its blocks as they are to be."""
    return MARKED.sub(lambda match: f"{match[1]}{match[2]}{texts[match[1]]}\n", page)


def main() -> None:
    """Write all pages."""
    texts = blocks()
    for path in pages():
        path.write_text(filled(path.read_text(encoding="utf-8"), texts), encoding="utf-8")


if __name__ == "__main__":
    main()
