"""The report as a page: tables and figures of one or several runs in one self-contained HTML file."""

import base64
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from equipoise.core.errors import UserError
from equipoise.core.storage import replacing
from equipoise.report import comparison, figures
from equipoise.report.curves import retrogress
from equipoise.report.plotting import style, to_svg
from equipoise.report.record import RunRecord, read_run
from equipoise.report.summary import cost_rows, duration, facts, key_numbers, left_out, model_bytes, traffic
from equipoise.report.tables import (
    COLUMNS,
    SCOPE_TITLES,
    SITE_COLUMNS,
    GroupKey,
    HeadlineRow,
    best_values,
    headline,
    percent,
    run_labels,
    selection_note,
    site_rows,
    to_csv,
    to_latex,
    unlike,
)

#: what tells a report of runs from other files, reports of studies among them
MARK = re.compile(r'<p class="kicker">(Comparison of runs|Report of a run)</p>')


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
        caption = self.caption + self.remark(run)
        return picture(f"{prefix}-{self.name}", self.draw(run), caption, half=self.half)


LEARNING = Plot(
    "learning",
    figures.learning_curves,
    "Learning curves on validation data: thin lines are sites, the thick line is the mean over the sites "
    "scored in that round. Round 0 is the initial model; a dotted line marks the selected round.",
)
RETROGRESS = Plot(
    "retrogress",
    figures.retrogress_curves,
    "Retrogress: balanced accuracy of a site’s model right after local training minus that of the model it "
    "holds when the round ends, on the same validation data. Above zero, communication made the model worse.",
    half=True,
)
LOSS = Plot("loss", figures.training_loss, "Mean training loss of each site, per round.", half=True)
RECALL = Plot(
    "recall",
    figures.recall_map,
    "Recall of each class at each site. Grey: the site has no image of the class to score.",
    remark=figures.sites_shown,
)
CONFUSION = Plot(
    "confusion",
    figures.confusion_matrices,
    "Confusion matrices of the model a site is left with. Numbers are images; the shade is the share of the "
    "true class (each row adds up to 100 %).",
    remark=figures.matrices_shown,
)
SECONDS = Plot("seconds", figures.time_per_round, "Seconds of work per site; dashed: of the whole round.", half=True)
TRAFFIC = Plot("traffic", figures.traffic_per_round, "Mean traffic of each site per round.", half=True)
FEDERATION = Plot(
    "federation",
    lambda run: figures.federation_bubbles(run.training_sites, run.start.classes),
    "Training images of each class at each site; the area of a bubble is the count, 0 marks an absent class.",
    remark=figures.sites_shown,
)
RUN_PLOTS = (LEARNING, RETROGRESS, LOSS, RECALL, CONFUSION, FEDERATION, SECONDS, TRAFFIC)


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
    page = render(records)
    _write(out, page)
    _write(out.with_suffix(".csv"), to_csv(rows))
    _write(out.with_suffix(".tex"), to_latex(rows))
    return out


def render(runs: Sequence[RunRecord]) -> str:
    """The HTML text of a report."""
    rows = headline(runs)
    labels = run_labels(runs)
    shared = len(runs) > 1 and comparison.same_federation(runs)
    with style():
        compared = _compare(runs, labels, shared) if len(runs) > 1 else None
        sections = [
            _section(run, label, place, with_federation=not shared)
            for place, (run, label) in enumerate(zip(runs, labels), start=1)
        ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    return environment.get_template("report.html").render(
        title=_title(runs, labels),
        sections=sections,
        compared=compared,
        columns=COLUMNS,
        site_columns=SITE_COLUMNS,
        scope_titles=SCOPE_TITLES,
        csv=_data_link(to_csv(rows), "text/csv"),
        latex=_data_link(to_latex(rows), "text/x-tex"),
        version=runs[0].start.version,
    )


def _title(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    if len(runs) == 1:
        return runs[0].start.run
    return ", ".join(labels[:-1]) + " and " + labels[-1] if len(runs) <= 5 else f"{len(runs)} runs"


def _compare(runs: Sequence[RunRecord], labels: Sequence[str], shared: bool) -> dict[str, Any]:
    """What stands in front of the single runs when there are several."""
    groups: dict[GroupKey, list[tuple[str, HeadlineRow]]] = {}
    for run, label in zip(runs, labels):
        for row in headline([run]):
            groups.setdefault(row.group, []).append((label, row))
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
    return {
        "groups": dict(sorted(groups.items(), key=lambda group: list(SCOPE_TITLES).index(group[0][1]))),
        "best": best_values(headline(runs)),
        "unlike": unlike(headline(runs)),
        "notes": [(label, selection_note(run)) for run, label in zip(runs, labels)],
        "cost": [(label, _cost_summary(run)) for run, label in zip(runs, labels)],
        "pictures": [picture for picture in pictures if picture],
    }


def _cost_summary(run: RunRecord) -> dict[str, str]:
    work = [site for finished in run.rounds for site in finished.sites.values()]
    visits = max(len(work), 1)
    return {
        "parameters": f"{run.start.parameters:,}" if run.start.parameters else "–",
        "model": model_bytes(run),
        "rounds": str(run.last_round),
        "seconds": duration(sum(finished.seconds for finished in run.rounds)),
        "per_round": duration(sum(finished.seconds for finished in run.rounds) / max(len(run.rounds), 1)),
        "sent": traffic(sum(site.sent for site in work) / visits),
        "received": traffic(sum(site.received for site in work) / visits),
        "total": traffic(sum(site.sent + site.received for site in work)),
    }


def _section(run: RunRecord, label: str, place: int, *, with_federation: bool) -> dict[str, Any]:
    """Everything the template shows of one run."""
    plots = [plot for plot in RUN_PLOTS if with_federation or plot is not FEDERATION]
    pictures = dict.fromkeys(plot.name for plot in RUN_PLOTS) | {
        plot.name: plot.picture(run, f"run{place}") for plot in plots
    }
    return {
        "id": f"run{place}",
        "label": label,
        "run": run,
        "facts": facts(run),
        "key_numbers": key_numbers(run),
        "rows": headline([run]),
        "site_rows": site_rows(run),
        "note": selection_note(run),
        "retrogress_known": bool(retrogress(run)),
        "pictures": pictures,
        "cost": cost_rows(run),
        "left_out": left_out(run),
        "config": run.config_text or json.dumps(run.start.config, indent=2, ensure_ascii=False),
    }


def _data_link(text: str, kind: str) -> str:
    return f"data:{kind};charset=utf-8;base64,{base64.b64encode(text.encode()).decode()}"


def _write(path: Path, text: str) -> None:
    """Write a file of the report where the user wants it; a folder that is not there is likely misspelt."""
    try:
        with replacing(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Choose another place with --out.") from error
