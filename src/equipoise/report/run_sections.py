"""The sections of one run in its report: for each a heading, and the tables, figures and sentences under it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from equipoise.report import run_figures
from equipoise.report.curves import retrogress
from equipoise.report.evidence_tables import action_sheet, audit_sheet, interval_sheet, sub_group_sheets
from equipoise.report.plotting import Figure
from equipoise.report.prediction_figures import prediction_curves
from equipoise.report.record import RunRecord
from equipoise.report.run_facts import facts, key_numbers, left_out, selection_note, work_by_site
from equipoise.report.run_tables import SITE_COLUMNS, headline, scores_sheet, told, with_worst_site
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.thumbnails import examples_sheet
from equipoise.report.volume_figures import dice_boxes, worst_cases


@dataclass(frozen=True)
class Section:
    """What stands under a heading: tables, figures, notes, and (kind, value) of other kinds that the template knows."""

    id: str
    title: str
    blocks: Sequence[Any]

    @property
    def shown(self) -> Iterator[tuple[str, Any]]:
        """The blocks with their kinds."""
        kinds: dict[type, str] = {Sheet: "sheet", Figure: "figure", str: "note"}
        for block in self.blocks:
            yield block if isinstance(block, tuple) else (kinds[type(block)], block)


def section(id: str, title: str, *blocks: Any) -> Section:
    """A section of the blocks that there are."""
    return Section(id, title, [block for block in blocks if block])


def sections_of(run: RunRecord, shared: bool = False, overlays: Sheet | None = None) -> list[Section]:
    """The sections of a run that have something to show; `shared`: the data is drawn elsewhere."""
    note = selection_note(run)
    where = "" if len(run.finals) else f"On validation data: {note}"
    classes = [run_figures.recall_map(run), run_figures.confusion_matrices(run), prediction_curves(run)]
    data = None if shared else run_figures.federation_bubbles(run)
    costs = [run_figures.work_figure(run), run_figures.traffic_per_round(run), work_by_site(run)]
    config = run.config_text or json.dumps(run.start.config, indent=2, ensure_ascii=False)
    found = [
        section("", "", ("banner", run) if not run.finished else None, ("numbers", key_numbers(run))),
        section("results", "Results", *_results(run, note)),
        section("classes", "Classes", any(classes) and where, *classes, examples_sheet(run)),
        section("patients", "Patients", dice_boxes(run), overlays, worst_cases(run)),
        section("each", "Sites", run_figures.site_pages(run)),
        section("learning-section", "Learning", *_learning(run)),
        section("data", "Data", data),
        section("time", "Time and traffic", *costs if len(run.work) else ()),
        section("actions", "How the method acted", action_sheet(run)),
        section("audit", "Who was trained on", audit_sheet(run)),
        section("incidents", "Left-out sites and warnings", *_incidents(run)),
        section("disclosure", "Disclosure sheet", _disclosure(run)),
        section("config", "Configuration", ("facts", facts(run)), ("config", config)),
    ]
    return [own for own in found if own.blocks]


def _results(run: RunRecord, note: str) -> Iterator[Any]:
    """The scores, by view and place, with intervals where there are any."""
    rows, every = headline([run]), told(run)
    if not len(rows):
        nothing = "Nothing was scored: neither test nor validation data was measured."
        yield "text", nothing if run.finished else "Nothing has been scored yet."
        return
    kind = "Test results" if len(run.finals) else f"Validation scores{'' if run.finished else ' so far'}"
    scores = scores_sheet(f"{kind}, per cent.", rows, {"View": "view", "Scope": "title"})
    yield with_worst_site(scores, rows)
    yield f"{note} Metrics are over the classes present."
    of_site = every[every["scope"].isin(["site", "cohort"])]
    if len(of_site) > 1:
        yield scores_sheet("The same by site, per cent.", of_site, {"View": "view", "Site": "site"}, SITE_COLUMNS)
    yield interval_sheet(run)
    yield from sub_group_sheets(run)


def _learning(run: RunRecord) -> Iterator[Any]:
    if run.rounds.empty and run.evaluations.empty:
        yield "text", "No round has been completed yet."
        return
    yield run_figures.learning_curves(run)
    drawn = run_figures.retrogress_curves(run)
    why = "no model was measured right after local training and again at the end of the round."
    if not retrogress(run).empty:
        why = "every model scored the same right after local training and at the end of the round."
    yield drawn or f"No retrogress: {why}"


def _incidents(run: RunRecord) -> Iterator[Any]:
    absences = left_out(run)
    names = dict(zip(("Site", "Rounds", "Why"), zip(*absences)))
    text = "No site was left out of a round."
    yield sheet("Sites left out of a round, and why.", names, {}) if absences else ("text", text)
    yield ("warnings", run.warnings) if run.warnings else ("text", "No warnings.")


def _disclosure(run: RunRecord) -> Sheet:
    """What leaves a site."""
    method, told = run.start.method, run.start.disclosure
    text = f"What a site replies in a run of {method}; counts of images and of predictions leave it as well."
    if "evaluate" in told or "pool" in told:
        text = f"What leaves a site in a run of {method}. Nothing else does."
    lines = [(action, key, what) for action, sent in told.items() for key, what in sent.items()]
    columns = zip(*lines) if lines else ((), (), ())
    return sheet(text, dict(zip(("Action", "Sent", "What it is"), columns)), {})
