"""One table of a study on one data set: its rows, columns and cells, tests between its rows, and the notes beneath."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from equipoise.report.measured import TITLES
from equipoise.report.sheet import Sheet
from equipoise.report.wording import UNKNOWN
from equipoise.statistics import FEWEST_PAIRS, SIGNIFICANT, Comparison, Spread, compare_with_best
from equipoise.studies import remarks
from equipoise.studies.grid import listed
from equipoise.studies.results import StudyResults, once, selection_rule
from equipoise.studies.rows import RowResult, holders
from equipoise.studies.same_data import kinds
from equipoise.studies.study_intervals import HIGHER_IS_BETTER

#: how tables of a paper are called
PAPERS_OWN = ("Table ", "Tables ", "Fig. ", "Figs. ")
#: kinds of models, as documentation names them
VIEW_TITLES = {"trained": "after local training", "global": "global", "personal": "personal"}


@dataclass(frozen=True)
class StudyTable:
    """A table by the name that rows give it; the empty name is the one table of rows without any."""

    results: StudyResults
    data: str
    name: str

    @cached_property
    def rows(self) -> list[RowResult]:
        """Its rows that have runs."""
        return [row for row in self.results.of(self.data, self.name) if row.runs]

    @property
    def lacking(self) -> list[str]:
        """The names of its rows without any finished run."""
        return [row.row.name for row in self.results.of(self.data, self.name) if not row.runs]

    @property
    def caption(self) -> str:
        """The table's caption; "The paper's" marks the number of a paper's table."""
        study, name = self.results.study, self.name
        if name.startswith(PAPERS_OWN) and any(row.row.paper for row in self.rows):
            name = f"The paper's {name}"
        texts = (name, study.title or study.name, self.data, f"{self.results.part.capitalize()}, per cent.")
        return ". ".join(text for text in texts if text)

    # ---- cells ----------------------------------------------------------------------------------

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Each metric of the study, marked where tests tell a row from the best, and beside it the paper's number."""
        study, columns = self.results.study, {}
        for metric in study.metrics:
            marks = self.marks if metric == study.primary else [""] * len(self.rows)
            columns[TITLES[metric]] = [number(row.scores.get(metric)) + mark for row, mark in zip(self.rows, marks)]
            if any(metric in row.row.paper for row in self.rows):
                known = [row.paper.get(metric) for row in study.rows]
                columns[paper_title(self.results, metric)] = [
                    decimals(row.row.paper.get(metric), known) for row in self.rows
                ]
        return pd.DataFrame(columns, [row.row.name for row in self.rows], dtype=object).rename_axis("Method")

    @cached_property
    def best(self) -> pd.DataFrame:
        """True where a row's interval over seeds lies beyond those of all others; pooled training, which is no choice,
        takes no part. One seed has no interval, so with a row of one seed nothing is best."""
        found = pd.DataFrame(False, self.cells.index, self.cells.columns)
        for metric in () if self.incomparable else self.results.study.metrics:
            sign = 1 if HIGHER_IS_BETTER[metric] else -1
            own = {row.row.name: row.scores[metric] for row in self.rows if metric in row.scores and not row.pooled}
            if len(own) < 2 or any(score.margin is None for score in own.values()):
                continue
            first = max(own, key=lambda name: sign * own[name].mean)
            ends = {name: sign * score.mean + (score.margin or 0.0) for name, score in own.items() if name != first}
            found.loc[first, TITLES[metric]] = sign * own[first].mean - (own[first].margin or 0.0) > max(ends.values())
        return found

    def sheet(self) -> Sheet:
        """The table on a separate page."""
        return Sheet(self.caption, self.cells, self.best, self.notes())

    def sheet_by_view(self) -> Sheet:
        """The same with the main score of each kind of model that rows have; after local training only where the study
        reports such models."""
        study = self.results.study
        views = [view for view in VIEW_TITLES if view != "trained" or study.scope == "trained"]
        views = [view for view in views if any(row.scores_of(view) for row in self.rows)] or views
        main = {
            f"{TITLES[study.primary]}, {VIEW_TITLES[view]}": [
                number(row.scores_of(view).get(study.primary)) + (mark if view == row.view else "")
                for row, mark in zip(self.rows, self.marks)
            ]
            for view in views
        }
        cells = pd.concat([pd.DataFrame(main, self.cells.index), self.cells.iloc[:, 1:]], axis=1)
        return Sheet(self.caption, cells, notes=self.notes())

    def sheet_on_page(self) -> Sheet:
        """The same on a page that says at its top what holds for all tables: with models, seeds and validation."""
        index = pd.MultiIndex.from_arrays(
            [self.cells.index, [row.view for row in self.rows]], names=[self.cells.index.name, "Model"]
        )
        more = {"Seeds": [str(len(row.seeds)) for row in self.rows]}
        if self.results.study.part == "test":
            more[self._validation_title] = [number(row.validation) for row in self.rows]
        told = pd.DataFrame(more, self.cells.index, dtype=object)
        unmarked = pd.DataFrame(False, told.index, told.columns)
        cells, best = pd.concat([told, self.cells], axis=1), pd.concat([unmarked, self.best], axis=1)
        return Sheet(self.caption, cells.set_axis(index), best, self.notes(alone=False))

    @property
    def _validation_title(self) -> str:
        """The column of the scores that chose rounds, by the metric that did."""
        chosen = [run.told["chosen"][-1] for row in self.rows for run in row.runs if run.told["chosen"]]
        metrics = dict.fromkeys(TITLES.get(metric, metric) for _, metric in chosen)
        return f"{' or '.join(metrics)}, validation" if metrics else "Validation"

    # ---- tests ----------------------------------------------------------------------------------

    @cached_property
    def uneven(self) -> dict[str, list[str]]:
        """Sites that a row's mean lacks and another's has: where there are any, means do not compare."""
        if self.results.study.scope == "common":
            return {}
        sites = {row.row.name: set(row.places("site")) for row in self.rows}
        everywhere = set[str]().union(*sites.values())
        return {name: sorted(everywhere - own) for name, own in sites.items() if own and everywhere - own}

    @cached_property
    def incomparable(self) -> list[str]:
        """Why its rows do not compare, a sentence each: nothing is best or tested then."""
        found = []
        if self.uneven:
            lacking = "; ".join(f"{name} lacks {', '.join(sites)}" for name, sites in self.uneven.items())
            found.append(f"Means are from different sites ({lacking}): they do not compare, and no test was made.")
        groups = kinds((run, run.data_seen) for row in self.rows for run in row.runs)
        if len(groups) > 1:
            whose = "; ".join(holders(self.rows, runs) for runs in groups)
            found.append(f"Runs saw different images ({whose}): they do not compare, and no test was made.")
        return found

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Paired tests between the best row of this table and its others, pooled training apart."""
        study = self.results.study
        if self.incomparable:
            return []
        by_site = study.pairs == "seeds and sites"
        values = {row.row.name: row.values(study.primary, by_site) for row in self.rows if not row.pooled}
        return compare_with_best(values, HIGHER_IS_BETTER[study.primary])

    @cached_property
    def marks(self) -> list[str]:
        """By row: a dagger where the t-test, a double dagger where also Wilcoxon's, tells it from the best one."""
        marks: dict[str, str] = {}
        for test in self.comparisons:
            t_test, wilcoxon = ((1.0 if p is None else p) < SIGNIFICANT for p in (test.t_test_holm, test.wilcoxon_holm))
            marks[test.other] = ("‡" if wilcoxon else "†") if t_test else ""
        return [marks.get(row.row.name, "") for row in self.rows]

    @property
    def tests_note(self) -> str:
        """How tests were made and what marks mean, or why there are none."""
        comparisons = [comparison for comparison in self.comparisons if comparison.t_test is not None]
        if not comparisons:
            return self._no_test
        count = "1 comparison" if len(comparisons) == 1 else f"{len(comparisons)} comparisons"
        pairs = sorted({comparison.pairs for comparison in comparisons})
        # The signed-rank test cannot give less, however clear the case: all n differences of one sign.
        least = [f"{2.0 ** (1 - number):.2g}" for number in pairs]
        metric, best = TITLES[self.results.study.primary], comparisons[0].best
        said = f"No row's {metric} differs from {best}'s by the paired t-test"
        if any(self.marks):
            said = f"† {metric} differs from {best}'s by the paired t-test, ‡ by Wilcoxon's test too"
        return (
            f"{said} (p < {SIGNIFICANT}, Holm-corrected over {count}; {self.results.study.pairs} paired, "
            f"{' or '.join(map(str, pairs))} pairs, with which Wilcoxon's p before correction is at least "
            f"{' or '.join(least)}; the choice of {best} by the same scores is not corrected for)."
        )

    @property
    def _no_test(self) -> str:
        """Why rows that compare were not tested."""
        rows = [row for row in self.rows if not row.pooled]
        if len(rows) < 2 or self.comparisons or self.incomparable:
            return ""
        return f"No test was made: no two rows have {FEWEST_PAIRS} {self.results.study.pairs} in common."

    def tests_sheet(self) -> Sheet:
        """The tests of this table with their p-values."""
        tests = pd.DataFrame(self.comparisons)
        caption = (
            f"Paired tests of {TITLES[self.results.study.primary]} between {tests['best'][0]}, the best of the "
            "rows above with results enough, and the others."
        )
        columns = {"Pairs": tests["pairs"].map(str), "Difference": tests["difference"].map("{:.2f}".format)}
        p_values = tests[["t_test", "t_test_holm", "wilcoxon", "wilcoxon_holm"]].astype(float)
        shown = p_values.map(lambda p: UNKNOWN if pd.isna(p) else f"{p:.3g}")
        cells = pd.concat([pd.DataFrame(columns), shown], axis=1)
        cells = cells.set_axis([*columns, "t-test", "Holm", "Wilcoxon", "Holm"], axis=1)
        return Sheet(caption, cells.set_axis(tests["other"]).rename_axis("Against"))

    # ---- notes ----------------------------------------------------------------------------------

    @property
    def rule(self) -> str:
        """How the reported rounds of its rows were chosen."""
        return selection_rule((run for row in self.rows for run in row.runs), self.results.study.part)

    def notes(self, alone: bool = True) -> list[str]:
        """The notes under the table: selection rule, scope, method of the tests. Warnings about shared groups and
        differences from the paper follow, unless the page states them at its top."""
        results, study, rows = self.results, self.results.study, self.rows
        found = [self.rule, results.scope]
        if alone:
            found += [f"{text}." for text in remarks.caveats(rows)]
        found += seeds_note(rows)
        found += self.incomparable
        pooled = [row.row.name for row in rows if row.pooled]
        if pooled:
            found.append(f"{listed(pooled)}: pooled images, which hospitals cannot choose; neither best nor tested.")
        found += [self.tests_note] if self.tests_note else []
        if any(row.row.paper for row in rows) and study.paper:
            found.append(f"Paper: {study.paper}." + ("" if alone else " What differs from it stands at the top."))
        if alone:
            found += [f"{'Differs from the paper' if results.has_paper else 'Note'}: {text}" for text in study.differs]
            found += [f"Differs from the study file: {text}." for text in results.deviations]
        found += [f"{row.row.name}: {row.row.note}" for row in rows if row.row.note]
        found += [f"No finished run: {'; '.join(self.lacking)}."] if self.lacking else []
        return found


@once
def tables_of(results: StudyResults, data: str) -> list[StudyTable]:
    """The tables of one data set that have something to show: not those whose only finished row, such as the base line,
    waits for others to compare with and stands in another table already."""
    tables = [StudyTable(results, data, name) for name in results.study.tables]
    elsewhere = {row.row.name for table in tables if len(table.rows) > 1 for row in table.rows}
    alone = [table for table in tables if len(table.rows) == 1 and table.lacking]
    repeats = {table.name for table in alone if table.rows[0].row.name in elsewhere}
    return [table for table in tables if table.rows and table.name not in repeats]


def tables_to_come(results: StudyResults) -> list[str]:
    """The tables that are not shown yet, after their data set where there are several."""
    shown = {(data, table.name) for data in results.data_names for table in tables_of(results, data)}
    every = [(data, name) for data in results.data_names for name in results.study.tables if name]
    return [f"{data}: {name}" if data else name for data, name in every if (data, name) not in shown]


def seeds_note(rows: Sequence[RowResult]) -> list[str]:
    """What numbers are means of."""
    by_count: dict[int, list[str]] = {}
    for row in rows:
        by_count.setdefault(len(row.seeds), []).append(row.row.name)
    if not by_count:
        return []
    most, *fewer = sorted(by_count, reverse=True)
    if most == 1:
        return ["One seed."]
    less = "".join(f"; {count} for {listed(by_count[count])}" for count in fewer)
    return [f"Mean ± sample standard deviation over {most} seeds{less}."]


def paper_title(results: StudyResults, metric: str) -> str:
    """What stands over the paper's numbers of a metric."""
    return f"{TITLES[metric]}, {results.study.paper_label}"


def number(value: Spread | None) -> str:
    """Mean and deviation with two decimals; a dash when there is none."""
    if value is None:
        return UNKNOWN
    return f"{value.mean:.2f}" + ("" if value.std is None else f" ± {value.std:.2f}")


def decimals(value: float | None, column: Sequence[float | None]) -> str:
    """A paper's number with as many decimals as its whole column has, run or not; a dash when there is none."""
    if value is None:
        return UNKNOWN
    places = max(len(str(float(other)).partition(".")[2]) for other in column if other is not None)
    return f"{value:.{places}f}"
