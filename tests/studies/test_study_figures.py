"""What the figures of a study draw, told by their artists and captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equipoise.report.plotting import style
from equipoise.studies import study_figures as figures
from equipoise.studies.results import StudyResults, collect
from equipoise.studies.study_page import render
from test_study import SCORES, VIEWS, made_up_study, make_up, rewrite
from test_study_results import rewrite_all


def drawn(figure: Any, results: StudyResults) -> Figure:
    with style():
        made = figure(results.rows) if figure is figures.cost else figure(results, results.rows)
    assert isinstance(made, Figure)
    return made


def title(ax: Axes) -> str:
    return ax.get_title(loc="left")


def faces(ax: Axes) -> list[str]:
    """The filling of each dot, in the order of the rows."""
    return [str(line.get_markerfacecolor()) for line in ax.lines if line.get_marker() == "o"]


def changed_config(value: Any, *keys: str) -> Any:
    """A change of the start event's config at these keys."""

    def change(path: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["event"] == "start":
            table = line["config"]
            for key in keys[:-1]:
                table = table[key]
            table[keys[-1]] = value
        return [line]

    return change


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_a_dot_of_one_seed_is_hollow_and_the_legend_says_so(tmp_path):
    results = collect(make_up(made_up_study(), tmp_path), tmp_path)
    figure = drawn(figures.scores, results)
    assert [face == "white" for face in faces(figure.axes[0])] == [
        len(SCORES[row.row.name]) == 1 for row in results.rows[:3]
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "ours: mean and deviation over seeds",
        "ours, one seed",
        "paper",
    ]
    page = render(results)
    assert "each seed as a dash; hollow: one seed" in page and "their training images; hollow: one seed" in page


@pytest.mark.parametrize(("seeds", "told"), [([1], "one seed"), ([1, 2, 3], "mean and deviation over seeds")])
def test_legend_and_caption_speak_of_what_is_drawn_alone(seeds, told, tmp_path):
    rows = [{"name": name, "method": name, "seeds": seeds} for name in ("fedavg", "prr")]
    results = collect(make_up(made_up_study(row=rows), tmp_path), tmp_path)
    (text,) = drawn(figures.scores, results).legends[0].get_texts()
    assert told in text.get_text()
    page = render(results)
    assert ("each seed as a dash" in page) == (len(seeds) > 1) and ("hollow" in page) == (len(seeds) == 1)


# ---- learning curves -------------------------------------------------------------------------------------------------


def test_a_dotted_line_stands_where_the_row_may_first_choose_a_round(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite_all(
        tmp_path,
        lambda path, line: (
            changed_config(2, "evaluation", "first_round")(path, line) if "prr" in path.parent.name else [line]
        ),
    )
    results = collect(study, tmp_path)
    lines = {
        title(ax): [float(line.get_xdata()[0]) for line in ax.lines if line.get_linestyle() == ":"]  # type: ignore[index]
        for ax in drawn(figures.learning, results).axes
    }
    assert lines == {"fedavg": [], "prr": [2.0], "local": []}
    assert "From the dotted line on a round could be chosen." in render(results)


def test_a_run_that_reports_its_last_round_has_no_dotted_line(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite_all(tmp_path, changed_config({"rule": "last", "first_round": 2}, "evaluation"))
    assert [figures.first_eligible(row) for row in collect(study, tmp_path).rows if row.runs] == [1, 1, 1]


def test_the_axis_leaves_out_steep_first_rounds_but_no_curve_and_no_band():
    steep = {number: 0.7 if number > 1 else 0.1 for number in range(1, 31)}
    short = {1: 0.1, 2: 0.3, 3: 0.3}

    def floor(*rows: list[dict[int, float]]) -> float | None:
        return figures._floor([100 * pd.DataFrame(dict(enumerate(curves))) for curves in rows])

    assert floor([steep], [short]) == pytest.approx(7.0), "a tenth of three rounds is none"
    assert floor([steep]) == pytest.approx(67.0)
    lower = {number: value - 0.2 for number, value in steep.items()}
    assert floor([steep, lower]) == pytest.approx(60 - 20 / 2**0.5 - 3)
    assert floor([{1: float("nan"), 2: float("nan")}]) is None


@pytest.mark.parametrize(
    ("scope", "told"),
    [("sites", "(personal models where a method has them, else the global one)"), ("trained", "(models right after")],
)
def test_the_caption_says_whose_learning_is_drawn(scope, told, tmp_path):
    assert told in render(collect(make_up(made_up_study(scope=scope), tmp_path), tmp_path))


# ---- ranks and cost --------------------------------------------------------------------------------------------------


def test_equal_ranks_are_drawn_one_above_the_other():
    heights = figures._stacked([2.0, 1.0, 2.0, 2.0], 5)
    assert heights[1] == 5 and len({heights[0], *heights[2:]}) == 3
    crowded = figures._stacked([1.0] * 30, 5)
    assert max(abs(height - 5) for height in crowded) < 0.5, "within their own row"


def test_times_of_runs_that_waited_for_each_other_are_drawn_in_grey(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    results = collect(study, tmp_path)
    assert [title(ax) for ax in drawn(figures.cost, results).axes] == ["Time", "Traffic"]
    for path in tmp_path.glob("runs/prr*"):
        (path / "study.json").write_text('{"together": 4}')
    results = collect(study, tmp_path)
    assert [title(ax) for ax in drawn(figures.cost, results).axes] == ["Time on a shared device", "Traffic"]
    assert "waited for each other: times compare no methods." in render(results)


def test_little_traffic_is_told_in_words(tmp_path):
    study = make_up(made_up_study(), tmp_path)

    def little(path: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["event"] == "round" and "local" in path.parent.name:
            line["sites"] = {site: own | {"sent": 7, "received": 3} for site, own in line["sites"].items()}
        return [line]

    rewrite_all(tmp_path, little)
    wire = drawn(figures.cost, collect(study, tmp_path)).axes[-1]
    assert [text.get_text() for text in wire.texts] == ["7 bytes sent, 3 bytes received"]


def test_pooled_training_is_apart_in_ranks_and_sends_all_images(tmp_path, monkeypatch):
    monkeypatch.setitem(SCORES, "central", {1: 90.0})
    monkeypatch.setitem(VIEWS, "central", ("global",))
    rows = [{"name": name, "method": name, "seeds": [1]} for name in SCORES]
    results = collect(make_up(made_up_study(row=rows), tmp_path), tmp_path)
    assert "mean over seeds, pooled training apart" in render(results)
    assert [text.get_text() for text in drawn(figures.cost, results).axes[-1].texts] == ["all images"]


def test_scores_that_are_missing_everywhere_draw_nothing(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite(tmp_path, lambda line: [line] * (line["event"] not in ("evaluation", "final")))
    results = collect(study, tmp_path)
    assert figures.scores(results, results.rows) is None
