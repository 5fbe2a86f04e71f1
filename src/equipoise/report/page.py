"""The report as a page: tables and figures of one or several runs in one self-contained HTML file."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from equipoise.core.errors import UserError
from equipoise.core.storage import replacing
from equipoise.report import comparison, run_figures
from equipoise.report.curves import retrogress
from equipoise.report.plotting import style, to_svg
from equipoise.report.record import RunRecord, read_run
from equipoise.report.run_facts import costs, facts, key_numbers, left_out, selection_note, work_by_site
from equipoise.report.run_tables import (
    COLUMNS,
    SCOPE_TITLES,
    SITE_COLUMNS,
    headline,
    run_labels,
    scores_sheet,
    to_csv,
    to_latex,
    told,
    unlike,
)
from equipoise.report.sheet import Sheet, sheet

#: what tells a report of runs from other files, reports of studies among them
KICKERS = ("Comparison of runs", "Report of a run")
MARK = re.compile(rf'<p class="kicker">({"|".join(KICKERS)})</p>')


@dataclass(frozen=True)
class Picture:
    """A figure as it stands in the page."""

    name: str
    svg: Markup
    caption: str
    half: bool = False


def picture(name: str, figure: Figure | None, caption: str, *, half: bool = False) -> Picture | None:
    """A drawn figure ready for the page; None stays None."""
    if figure is None:
        return None
    # matplotlib has escaped every text that it wrote into the SVG.
    return Picture(name, Markup(to_svg(figure, salt=name)), caption, half)


def page(template: str, folder: Path, **values: Any) -> str:
    """The HTML text of a template, which may extend and include those of reports."""
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


@dataclass(frozen=True)
class Plot:
    """A figure of one run before it is drawn."""

    name: str
    draw: Callable[[RunRecord], Figure | None]
    caption: str
    half: bool = False
    remark: Callable[[RunRecord], str] = lambda run: ""

    def picture(self, run: RunRecord, prefix: str) -> Picture | None:
        """The figure of `run`, drawn, under a name that starts with `prefix`."""
        return picture(f"{prefix}-{self.name}", self.draw(run), self.caption + self.remark(run), half=self.half)


FEDERATION = Plot(
    "federation",
    lambda run: run_figures.federation_bubbles(run.training_sites, run.start.classes),
    "Training images of each class at each site; the area of a bubble is the count, 0 marks an absent class.",
    remark=run_figures.sites_shown,
)
RUN_PLOTS = (
    Plot(
        "learning",
        run_figures.learning_curves,
        "Learning curves on validation data: thin lines are sites, the thick line is the mean over the sites "
        "scored in that round. Round 0 is the initial model; a dotted line marks the selected round.",
    ),
    Plot(
        "retrogress",
        run_figures.retrogress_curves,
        "Retrogress: balanced accuracy of a site’s model right after local training minus that of the model it "
        "holds when the round ends, on the same validation data. Above zero, communication made the model worse.",
        half=True,
    ),
    Plot("loss", run_figures.training_loss, "Mean training loss of each site, per round.", half=True),
    Plot(
        "recall",
        run_figures.recall_map,
        "Recall of each class at each site. Grey: the site has no image of the class to score.",
        remark=run_figures.sites_shown,
    ),
    Plot(
        "confusion",
        run_figures.confusion_matrices,
        "Confusion matrices of the model a site is left with. Numbers are images; the shade is the share of the "
        "true class (each row adds up to 100 %).",
        remark=run_figures.matrices_shown,
    ),
    FEDERATION,
    Plot("seconds", run_figures.time_per_round, "Seconds of work per site; dashed: of the whole round.", half=True),
    Plot("traffic", run_figures.traffic_per_round, "Mean traffic of each site per round.", half=True),
)


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report of one run, or of several compared, and its headline table as CSV and LaTeX beside it.

    Default: `report.html` in the folder of a single run, `comparison.html` next to the first of several.
    """
    if not runs:
        raise UserError("A report needs at least one run folder: name a folder made by `equipoise run`.")
    records = [read_run(Path(run)) for run in runs]
    if out is None:
        first = records[0].folder.resolve()
        out = first / "report.html" if len(records) == 1 else first.parent / "comparison.html"
    elif out.is_file() and not MARK.search(out.read_text(encoding="utf-8", errors="replace")):
        raise UserError(f"{out} is there, and is no report: it would be replaced. Choose another --out")
    rows = headline(records)
    for path, text in {
        out: render(records),
        out.with_suffix(".csv"): to_csv(rows),
        out.with_suffix(".tex"): to_latex(rows),
    }.items():
        _write(path, text)
    return out


def render(runs: Sequence[RunRecord]) -> str:
    """The HTML text of a report."""
    rows, labels = headline(runs), run_labels(runs)
    several = len(runs) > 1
    shared = several and comparison.same_federation(runs)
    with style():
        compared = _compare(runs, labels, shared) if several else None
        sections = [
            _section(run, label, f"run{place}", with_federation=not shared)
            for place, (run, label) in enumerate(zip(runs, labels), start=1)
        ]
    few = ", ".join(labels[:-1]) + " and " + labels[-1] if len(runs) <= 5 else f"{len(runs)} runs"
    return page(
        "report.html",
        Path(__file__).parent,
        name="",
        title=few if several else runs[0].start.run,
        kicker=KICKERS[0 if several else 1],
        sections=sections,
        compared=compared,
        csv=_data_link(to_csv(rows), "text/csv"),
        latex=_data_link(to_latex(rows), "text/x-tex"),
        version=runs[0].start.version,
    )


def _compare(runs: Sequence[RunRecord], labels: Sequence[str], shared: bool) -> dict[str, Any]:
    """What stands in front of the single runs when there are several."""
    rows = headline(runs).sort_values("scope", key=lambda scope: scope.map([*SCOPE_TITLES].index), kind="stable")
    rows = pd.concat([own for _, own in rows.groupby(["scope", "part", "group_site"], sort=False)] or [rows])
    pictures = [
        picture(
            "comparison-learning",
            comparison.overlaid_learning(runs, labels),
            "Learning curves on validation data, the runs overlaid: the model a site is left with when a round ends "
            "(personal where rounds measured it, else global).",
        ),
        picture(
            "comparison-recall",
            comparison.rare_class_recall(runs, labels),
            "Recall of each class over the federation, the rarest class on top.",
        ),
        picture(
            "comparison-retrogress",
            comparison.overlaid_retrogress(runs, labels),
            "Retrogress, mean over sites: the drop in validation balanced accuracy after each communication.",
        ),
        FEDERATION.picture(runs[0], "comparison") if shared else None,
    ]
    spent = pd.DataFrame([costs(run) for run in runs])
    return {
        "scores": _with_worst_site(
            scores_sheet(
                "Results of all runs, per cent; the best of each group in bold.", rows, {"Run": "label", "View": "view"}
            ),
            rows,
        ),
        "groups": _group_titles(rows),
        "unlike": unlike(rows),
        "notes": [(label, selection_note(run)) for run, label in zip(runs, labels)],
        "costs": sheet(
            "Cost of the runs. Traffic per round is the mean over sites.",
            {"Run": labels},
            {name: spent[name].to_numpy() for name in spent},
        ),
        "pictures": [picture for picture in pictures if picture],
    }


def _group_titles(rows: pd.DataFrame) -> dict[int, str]:
    """Over which lines of a comparison a group begins, and its title."""
    titles = [
        f"{SCOPE_TITLES[scope].capitalize()}{f' {site}' if site else ''}, "
        f"{'test' if part == 'test' else 'validation (no test results)'}"
        for part, scope, site in zip(rows["part"], rows["scope"], rows["group_site"])
    ]
    return {place: title for place, title in enumerate(titles) if not place or titles[place - 1] != title}


def _with_worst_site(shown: Sheet, rows: pd.DataFrame) -> Sheet:
    """The sheet with the name of the worst site under its score."""
    worst = next(column.title for column in COLUMNS if column.name == "worst_site")
    named = [
        Markup("{}<small>{}</small>").format(text, name) if pd.notna(name) else text
        for text, name in zip(shown.cells[worst], rows["worst"])
    ]
    return Sheet(shown.caption, shown.cells.assign(**{worst: named}), shown.best, shown.notes)


def _section(run: RunRecord, label: str, id: str, *, with_federation: bool) -> dict[str, Any]:
    """Everything the template shows of one run."""
    drawn = {
        plot.name: plot.picture(run, id) if with_federation or plot is not FEDERATION else None for plot in RUN_PLOTS
    }
    return {
        "id": id,
        "label": label,
        "run": run,
        "tested": len(run.finals) > 0,
        "facts": facts(run),
        "key_numbers": key_numbers(run),
        "sheets": _sheets(run),
        "note": selection_note(run),
        "retrogress_known": not retrogress(run).empty,
        "pictures": drawn,
        "config": run.config_text or json.dumps(run.start.config, indent=2, ensure_ascii=False),
    }


def _sheets(run: RunRecord) -> dict[str, Sheet | None]:
    """The tables of one run; None where there is nothing to tell."""
    kind = "Test results" if len(run.finals) else f"Validation scores{'' if run.finished else ' so far'}"
    rows, every = headline([run]), told(run)
    of_site = every[every["scope"].isin(["site", "cohort"])]
    columns = {"View": "view", "Scope": "title"}
    scores = _with_worst_site(scores_sheet(f"{kind}, per cent.", rows, columns, bold=False), rows)
    sites = scores_sheet(
        "The same by site, per cent.", of_site, {"View": "view", "Site": "site"}, SITE_COLUMNS, bold=False
    )
    absent = left_out(run)
    return {
        "scores": scores if len(rows) else None,
        "sites": sites if len(of_site) > 1 else None,
        "work": work_by_site(run) if len(run.work) else None,
        "left_out": sheet(
            "Sites left out of a round, and why.", dict(zip(("Site", "Rounds", "Why"), map(list, zip(*absent)))), {}
        )
        if absent
        else None,
        "disclosure": _disclosure(run),
    }


def _disclosure(run: RunRecord) -> Sheet:
    """What leaves a site, by action and entry."""
    method, actions = run.start.method, run.start.disclosure
    caption = f"What a site replies in a run of {method}; counts of images and of predictions leave it as well."
    if actions.keys() & {"evaluate", "pool"}:
        caption = f"What leaves a site in a run of {method}. Nothing else does."
    lines = [
        (action if first else "", Markup("<code>{}</code>").format(key), text)
        for action, sent in actions.items()
        for first, (key, text) in zip([True, *[False] * len(sent)], sent.items())
    ]
    heads = ("Action", "Sent", "What it is")
    return sheet(caption, {head: [line[place] for line in lines] for place, head in enumerate(heads)}, {})


def _data_link(text: str, kind: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _write(path: Path, text: str) -> None:
    """Write a file of the report where the user wants it; a folder that is not there is likely misspelt."""
    try:
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Choose another place with --out.") from error
