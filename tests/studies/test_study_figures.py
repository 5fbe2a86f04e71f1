"""What the figures of a study draw, told by their artists and captions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from equipoise.report.plotting import Figure, Panel
from equipoise.statistics import share_interval, spread, weighted_interval
from equipoise.studies import study_figures as figures
from equipoise.studies.remarks import finding
from equipoise.studies.results import collect
from equipoise.studies.score_tables import tables_of
from equipoise.studies.study_page import render
from test_study import SCORES, VIEWS, made_up_study, make_up, rewrite
from test_study_results import rewrite_all


def panel(figure: Figure | None, page: int = 0, place: int = 0) -> Panel:
    assert isinstance(figure, Figure)
    return list(figure.pages.values())[page][place]


def trace(panel: Panel, name: str) -> dict[str, Any]:
    return next(each for each in panel.traces if each["name"] == name)


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


# ---- intervals -------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_mean_is_students_and_of_one_value_there_is_none():
    score = spread([70.0, 72.0, 74.0])
    assert score and score.margin == pytest.approx(stats.t.ppf(0.975, 2) * 2 / 3**0.5)
    one = spread([70.0])
    assert one and one.margin is None


def test_the_interval_of_a_share_is_wilsons_and_never_empty_at_the_ends():
    low, high = share_interval([8, 0, 5], [10, 4, 0])
    assert (low[0], high[0]) == pytest.approx(stats.binomtest(8, 10).proportion_ci(method="wilson"))
    assert low[1] == pytest.approx(0) and high[1] > 0.4 and np.isnan(low[2])


def test_a_weighted_interval_of_one_share_is_its_own_and_shrinks_with_more_shares():
    low, high = share_interval([8], [10])
    assert weighted_interval([8], [10], [1.0]) == pytest.approx((low[0], 0.8, high[0]))
    ends = weighted_interval([8] * 4, [10] * 4, [0.25] * 4)
    assert ends[2] - ends[0] == pytest.approx((high[0] - low[0]) / 2)


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_rows_are_ranked_with_intervals_and_a_dot_of_one_seed_is_hollow(tmp_path):
    results = collect(make_up(made_up_study(), tmp_path), tmp_path)
    drawn = panel(figures.ranked(results))
    rows = [row for row in results.rows if row.runs]
    primary = results.study.primary
    order = sorted(rows, key=lambda row: -row.scores[primary].mean)
    assert drawn.y["ticktext"] == [row.row.name for row in order]
    several, alone = trace(drawn, "mean, 95 % interval"), trace(drawn, "one seed")
    assert len(several["x"]) + len(alone["x"]) == len(rows) and "error_x" not in alone
    assert alone["marker"]["symbol"] == "circle-open"
    own = next(row for row in rows if len(row.runs) > 1).scores[primary]
    assert several["error_x"]["array"][several["x"].index(round(own.mean, 2))] == pytest.approx(own.margin, abs=0.01)
    assert len(trace(drawn, "each seed")["x"]) == sum(len(row.runs) for row in rows if len(row.runs) > 1)
    assert trace(drawn, "the paper's number")["x"], "the paper stands beside ours"
    page = render(results)
    assert page.index('class="finding"') < page.index('id="ranked"') < page.index("<table")


def test_balanced_accuracy_has_a_line_where_guessing_is(tmp_path):
    results = collect(make_up(made_up_study(metrics=["balanced_accuracy", "ece"]), tmp_path), tmp_path)
    drawn = panel(figures.ranked(results))
    present = (results.runs[0].start.images["test"] > 0).sum(axis=1)
    guess = 100 * (1 / present[present > 0]).mean()
    assert [shape["x0"] for shape in drawn.shapes] == [pytest.approx(guess)]


def test_bold_needs_intervals_that_lie_apart(tmp_path, monkeypatch):
    rows = [{"name": name, "method": name, "seeds": [1, 2, 3]} for name in ("fedavg", "prr")]

    def best(folder: str) -> bool:
        results = collect(make_up(made_up_study(row=rows), tmp_path / folder), tmp_path / folder)
        return bool(tables_of(results, "")[0].best.any(axis=None))

    monkeypatch.setitem(SCORES, "fedavg", {1: 60.0, 2: 61.0, 3: 62.0})
    monkeypatch.setitem(SCORES, "prr", {1: 80.0, 2: 81.0, 3: 82.0})
    assert best("apart")
    monkeypatch.setitem(SCORES, "prr", {1: 62.0, 2: 63.0, 3: 64.0})
    assert not best("overlapping")


@pytest.mark.parametrize(
    ("prr", "told"),
    [
        ({1: 80.0}, "Too few seeds for a test: the order may be luck."),
        ({1: 80.0, 2: 81.1, 3: 82.0}, "The paired test tells them apart (p = "),
        ({1: 60.0, 2: 69.0, 3: 61.0}, "The paired test cannot tell them apart (p = "),
    ],
)
def test_the_finding_says_what_tests_allow(prr, told, tmp_path, monkeypatch):
    monkeypatch.setitem(SCORES, "fedavg", {1: 60.0, 2: 61.0, 3: 62.0})
    monkeypatch.setitem(SCORES, "prr", prr)
    rows = [{"name": "fedavg", "method": "fedavg", "seeds": [1, 2, 3]}]
    rows.append({"name": "prr", "method": "prr", "seeds": list(prr)})
    text = finding(collect(make_up(made_up_study(row=rows, pairs="seeds"), tmp_path), tmp_path))
    assert text.startswith("prr has the best ") and told in text


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
    drawn = figures.learning(results, results.rows)
    assert drawn and list(drawn.pages) == ["all rows", "fedavg", "prr", "local"]
    lines = {name: [shape["x0"] for shape in own[0].shapes] for name, own in drawn.pages.items()}
    assert lines == {"all rows": [], "fedavg": [], "prr": [2], "local": []}


def test_a_run_that_reports_its_last_round_has_no_dotted_line(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite_all(tmp_path, changed_config({"rule": "last", "first_round": 2}, "evaluation"))
    assert [figures.first_eligible(row) for row in collect(study, tmp_path).rows if row.runs] == [1, 1, 1]


def test_the_band_is_of_the_rounds_that_all_seeds_have_and_of_one_seed_there_is_none():
    ends = figures.band(pd.DataFrame({0: {1: 60.0, 2: 70.0, 3: 80.0}, 1: {1: 62.0, 2: 70.0}}))
    assert ends.index.tolist() == [1, 2]
    assert ends.loc[1].tolist() == pytest.approx([61 - 2**0.5, 61 + 2**0.5]) and ends.loc[2].tolist() == [70, 70]
    assert figures.band(pd.DataFrame({0: {1: 60.0}})).empty


@pytest.mark.parametrize(
    ("scope", "told"),
    [("sites", "(personal models where a method has them, else the global one)"), ("trained", "(models right after")],
)
def test_the_caption_says_whose_learning_is_drawn(scope, told, tmp_path):
    assert told in render(collect(make_up(made_up_study(scope=scope), tmp_path), tmp_path))


# ---- ranks and cost --------------------------------------------------------------------------------------------------


def test_equal_ranks_make_one_larger_dot_that_names_all(tmp_path):
    results = collect(make_up(made_up_study(), tmp_path), tmp_path)
    drawn = panel(figures.rank_plot(results))
    light = drawn.traces[0]
    sites = {name: len(own) for name, own in results.ranking.ranks.items()}
    named = sum(text.count(" and ") + text.count(", ") + 1 for text in light["text"])
    assert named == sum(sites.values()) > len(light["x"]) and max(light["marker"]["size"]) > 8


def test_times_of_runs_that_waited_for_each_other_are_drawn_in_grey(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    results = collect(study, tmp_path)
    assert panel(figures.cost(results.rows)).title == "Seconds per round"
    for path in tmp_path.glob("runs/prr*"):
        (path / "study.json").write_text('{"together": 4}')
    results = collect(study, tmp_path)
    assert panel(figures.cost(results.rows)).title == "Seconds per round on a shared device"
    assert "waited for each other: times compare no methods." in render(results)


def test_pooled_training_is_apart_in_ranks_and_sends_all_images(tmp_path, monkeypatch):
    monkeypatch.setitem(SCORES, "central", {1: 90.0})
    monkeypatch.setitem(VIEWS, "central", ("global",))
    rows = [{"name": name, "method": name, "seeds": [1]} for name in SCORES]
    results = collect(make_up(made_up_study(row=rows), tmp_path), tmp_path)
    assert "mean over seeds, pooled training apart" in render(results)
    assert "central (pooled)" in panel(figures.ranked(results)).y["ticktext"]
    assert "central" not in finding(results)
    sent = panel(figures.cost(results.rows), place=1).traces[0]["text"]
    assert sent.count("all images") == 1


def test_scores_that_are_missing_everywhere_draw_nothing(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite(tmp_path, lambda line: [line] * (line["event"] not in ("evaluation", "final")))
    results = collect(study, tmp_path)
    assert figures.ranked(results) is None and finding(results) == ""
