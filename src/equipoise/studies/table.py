"""One table of a study on one data set: its rows, columns and cells, tests between its rows, and the notes beneath."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from equipoise.report.tables import METRIC_TITLES
from equipoise.statistics import FEWEST_PAIRS, ROUNDING, Comparison, Spread, compare_with_best
from equipoise.studies import remarks
from equipoise.studies.cost import COST_TITLES, cost_caption, cost_cells, pooled_rows, sent_entries, shared_times
from equipoise.studies.grid import METRICS, Metric, listed
from equipoise.studies.results import HIGHER_IS_BETTER, StudyResults, selection_rule
from equipoise.studies.rows import RowResult, federation_of, holders
from equipoise.studies.same_data import kinds

#: the p-value below which a difference is marked
SIGNIFICANT = 0.05
#: the most sites whose images are counted in a table
MOST_SITES = 12
#: how tables of a paper are called
PAPERS_OWN = ("Table ", "Tables ", "Fig. ", "Figs. ")


@dataclass(frozen=True)
class Column:
    """A metric, as we measured it or as the paper reports it."""

    metric: Metric
    paper: bool = False


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

    @cached_property
    def columns(self) -> list[Column]:
        """Each metric of the study, and beside it the paper's where it has any."""
        columns: list[Column] = []
        for metric in self.results.study.metrics:
            columns.append(Column(metric))
            if any(metric in row.row.paper for row in self.rows):
                columns.append(Column(metric, paper=True))
        return columns

    @property
    def heads(self) -> list[str]:
        """What stands over the columns."""
        return [heading(self.results, column) for column in self.columns]

    @property
    def caption(self) -> str:
        """What the table shows; one that is a paper's is told from the numbering around it."""
        study, name = self.results.study, self.name
        if name.startswith(PAPERS_OWN) and any(row.row.paper for row in self.rows):
            name = f"The paper's {name}"
        texts = (name, study.title or study.name, self.data, f"{self.results.part.capitalize()}, per cent.")
        return ". ".join(text for text in texts if text)

    def cell(self, row: RowResult, column: Column) -> str:
        """Our score, marked where tests tell it from the best, or the paper's."""
        if column.paper:
            known = [other.paper.get(column.metric) for other in self.results.study.rows]
            return decimals(row.row.paper.get(column.metric), known)
        mark = self.mark(row) if column.metric == self.results.study.primary else ""
        return number(row.scores.get(column.metric)) + mark

    def is_best(self, row: RowResult, column: Column) -> bool:
        """True for every row whose mean is that of the best one; pooled training, which is no choice, takes no part."""
        known = [own.scores[column.metric].mean for own in self.rows if column.metric in own.scores and not own.pooled]
        if self.incomparable or column.paper or row.pooled or column.metric not in row.scores:
            return False
        best = max(known) if HIGHER_IS_BETTER[column.metric] else min(known)
        return abs(row.scores[column.metric].mean - best) <= ROUNDING

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
            found.append(f"Means are of different sites ({lacking}): they do not compare, and no test was made.")
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
        metric, by_site = study.primary, study.pairs == "seeds and sites"
        values = {row.row.name: row.values(metric, by_site) for row in self.rows if not row.pooled}
        return compare_with_best(values, HIGHER_IS_BETTER[metric])

    def mark(self, row: RowResult) -> str:
        """A dagger where the t-test, a double dagger where also Wilcoxon's, tells the row from the best one."""
        for comparison in self.comparisons:
            if comparison.other == row.row.name:
                t_test, wilcoxon = (
                    p is not None and p < SIGNIFICANT for p in (comparison.t_test_holm, comparison.wilcoxon_holm)
                )
                return ("‡" if wilcoxon else "†") if t_test else ""
        return ""

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
        metric = METRIC_TITLES[self.results.study.primary]
        said = f"No row's {metric} differs from {comparisons[0].best}'s by the paired t-test"
        if any(self.mark(row) for row in self.rows):
            said = f"† {metric} differs from {comparisons[0].best}'s by the paired t-test, ‡ by Wilcoxon's test too"
        return (
            f"{said} (p < {SIGNIFICANT}, Holm-corrected over {count}; {self.results.study.pairs} paired, "
            f"{' or '.join(map(str, pairs))} pairs, with which Wilcoxon's p before correction is at least "
            f"{' or '.join(least)}; the choice of {comparisons[0].best} by the same scores is not corrected for)."
        )

    @property
    def _no_test(self) -> str:
        """Why rows that compare were not tested."""
        rows = [row for row in self.rows if not row.pooled]
        if len(rows) < 2 or self.comparisons or self.incomparable:
            return ""
        return f"No test was made: no two rows have {FEWEST_PAIRS} {self.results.study.pairs} in common."

    # ---- notes ----------------------------------------------------------------------------------

    @property
    def rule(self) -> str:
        """How the reported rounds of its rows were chosen."""
        return selection_rule((run for row in self.rows for run in row.runs), self.results.study.part)

    def notes(self, alone: bool = True) -> list[str]:
        """What stands beneath: selection rule, scope, how tests were made; and unless the table stands on a page that
        says so at its top, groups shared between training and test, and what differs from the paper."""
        results, study, rows = self.results, self.results.study, self.rows
        found = [self.rule, results.scope]
        if alone:
            found += [f"{text}." for text in remarks.caveats(rows)]
        found += _seeds_note(rows)
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
    return [_of(data, name) for data, name in every if (data, name) not in shown]


def _score_notes(results: StudyResults, rows: Sequence[RowResult]) -> list[str]:
    """How rounds were chosen, and what numbers are means of."""
    return [selection_rule((run for row in rows for run in row.runs), results.study.part), *_seeds_note(rows)]


def _seeds_note(rows: Sequence[RowResult]) -> list[str]:
    by_count: dict[int, list[str]] = {}
    for row in rows:
        by_count.setdefault(len(row.runs), []).append(row.row.name)
    if not by_count:
        return []
    most, *fewer = sorted(by_count, reverse=True)
    if most == 1:
        return ["One seed."]
    less = "".join(f"; {count} for {listed(by_count[count])}" for count in fewer)
    return [f"Mean ± sample standard deviation over {most} seeds{less}."]


# ---- cells ---------------------------------------------------------------------------------------


def heading(results: StudyResults, column: Column) -> str:
    """The title of a column."""
    return METRIC_TITLES[column.metric] + (f", {results.study.paper_label}" if column.paper else "")


def number(value: Spread | None) -> str:
    """Mean and deviation with two decimals; a dash when there is none."""
    if value is None:
        return "–"
    return f"{value.mean:.2f}" + ("" if value.std is None else f" ± {value.std:.2f}")


def decimals(value: float | None, column: Sequence[float | None]) -> str:
    """A paper's number with as many decimals as its whole column has, run or not; a dash when there is none."""
    if value is None:
        return "–"
    places = max(len(str(float(other)).partition(".")[2]) for other in column if other is not None)
    return f"{value:.{places}f}"


# ---- tables beside the scores -----------------------------------------------------------------------


@dataclass(frozen=True)
class SideTable:
    """A table of texts: a line for each row that has runs, or for each `first`."""

    caption: str
    heads: Sequence[str]
    lines: Sequence[tuple[str, Sequence[str]]]
    first: str = "Method"
    notes: Sequence[str] = ()
    """What stands beneath."""


def site_table(results: StudyResults, data: str) -> SideTable | None:
    """The primary metric by site, where sites are tested apart."""
    rows, primary = _finished(results, data), results.study.primary
    sites = list(dict.fromkeys(site for row in rows for site in row.places("site")))
    if results.study.scope == "common" or len(sites) < 2:
        return None
    lines = [
        (row.row.name, [number(row.scores_of(row.view, "site", site).get(primary)) for site in sites]) for row in rows
    ]
    return SideTable(_of(data, f"{METRIC_TITLES[primary]} by site."), sites, lines, notes=_score_notes(results, rows))


def cohort_tables(results: StudyResults, data: str) -> list[SideTable]:
    """A table for each unseen cohort."""
    rows = _finished(results, data)
    cohorts = dict.fromkeys(cohort for row in rows for cohort in row.places("cohort"))
    return [_cohort_table(results, rows, data, cohort) for cohort in cohorts]


def _cohort_table(results: StudyResults, rows: Sequence[RowResult], data: str, cohort: str) -> SideTable:
    """An unseen cohort: the personal model of the first site, or else the global model."""
    ours = [Column(metric) for metric in results.study.metrics]
    papers = [Column(m, paper=True) for m in METRICS if any(m in row.row.paper_cohort for row in rows)]
    lines = []
    for row in rows:
        view = row.places("cohort").get(cohort, "")
        scores = row.scores_of(view, "cohort", cohort)
        cells = [number(scores.get(column.metric)) for column in ours]
        for column in papers:
            known = [other.paper_cohort.get(column.metric) for other in results.study.rows]
            cells.append(decimals(row.row.paper_cohort.get(column.metric), known))
        lines.append((row.row.name, [view, *cells]))
    text = f"The unseen cohort {cohort}: the personal model of the first site, or else the global model. Per cent."
    if papers and results.study.cohort_table:
        text = f"The paper's {results.study.cohort_table}. {text}"
    heads = ["Model", *(heading(results, column) for column in (*ours, *papers))]
    return SideTable(_of(data, text), heads, lines, notes=_score_notes(results, rows))


def cost_table(results: StudyResults, data: str) -> SideTable | None:
    """What each row costs."""
    rows = _finished(results, data)
    if not rows:
        return None
    text = " ".join([cost_caption(rows), *shared_times(rows), *pooled_rows(rows), *sent_entries(rows)])
    return SideTable(_of(data, text), COST_TITLES, [(row.row.name, cost_cells(results, row)) for row in rows])


def counts_table(results: StudyResults, data: str) -> SideTable | None:
    """Images of each class in each part at the sites that score models, where they are few enough to read."""
    run = federation_of(results.of(data))
    sites = [site for site in run.start.sites if any(site.valid) or any(site.test)] if run else []
    if run is None or not 0 < len(sites) <= MOST_SITES:
        return None
    titles = {"train": "training", "valid": "validation", "test": "test"}
    parts = [part for part in titles if any(any(getattr(site, part)) for site in sites)]
    lines = []
    for site in sites:
        counts = [getattr(site, part) or [0] * len(site.train) for part in parts]
        lines.append((site.name, [" / ".join(f"{count:,}" for count in each) for each in zip(*counts)]))
    what = " / ".join(titles[part] for part in parts)
    text = f"Images of each class where models are scored: {what} (seed {run.start.config.get('seed')})."
    return SideTable(_of(data, text), run.start.classes, lines, "Site")


def side_tables(results: StudyResults, data: str) -> list[SideTable]:
    """All of them, in order."""
    cohorts = cohort_tables(results, data)
    every = (site_table(results, data), *cohorts, counts_table(results, data), cost_table(results, data))
    return [table for table in every if table]


def _of(data: str, caption: str) -> str:
    """A caption that names the data set, where the study has several."""
    return f"{data}: {caption}" if data else caption


def _finished(results: StudyResults, data: str) -> list[RowResult]:
    return [row for row in results.of(data) if row.runs]
