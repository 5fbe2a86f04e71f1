"""What a study says besides scores: warnings, what is lacking, ranks, ties, and what could not be measured."""

from __future__ import annotations

import csv
import io
import json
import warnings as python_warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from equipoise.api.grid_progress import GridProgress
from equipoise.core.errors import UserError
from equipoise.engine.runs import make_config
from equipoise.report.latex import latex_text
from equipoise.report.record import read_run
from equipoise.report.run_figures import federation_bubbles
from equipoise.report.sheet import Sheet
from equipoise.statistics import compare_with_best
from equipoise.studies import load_study
from equipoise.studies.grid import grid
from equipoise.studies.remarks import warnings
from equipoise.studies.results import StudyResults, collect
from equipoise.studies.row_cost import base_line, cost_caption
from equipoise.studies.score_tables import decimals, tables_of, tables_to_come
from equipoise.studies.side_tables import side_tables
from equipoise.studies.study_files import summary, to_csv, to_latex, to_markdown
from equipoise.studies.study_page import render
from test_study import PAPER, SCORES, SITES, VIEWS, common_set, made_up_study, make_up, rewrite

ROOT = Path(__file__).resolve().parents[2]
LEAK = "the authors split of ham10000 is not clean: 641 of 1868 test groups are also in train"
DATA = [{"name": "first"}, {"name": "second"}]
ROWS = [{"name": name, "method": name, "seeds": [1]} for name in SCORES]


def rewrite_all(folder: Path, change: Any) -> None:
    for path in folder.glob("runs/**/events.jsonl"):
        kept = [new for line in map(json.loads, path.read_text().splitlines()) for new in change(path, line)]
        path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))


def without(folder: Path, *labels: str) -> None:
    """Take the events of runs away, as if these had never begun."""
    for label in labels:
        (folder / "runs" / label / "events.jsonl").unlink()


# ---- warnings --------------------------------------------------------------------------------------------------------


def warned(path: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
    if line["event"] != "start":
        return [line]
    own = ["label_smoothing = 0.1 has no effect"] if path.parent.name.startswith("prr") else []
    own += ["site Sydney has one melanoma"] if path.parent.name == "fedavg-seed2" else []
    return [line | {"warnings": [LEAK, *own]}]


def test_warnings_of_runs_stand_once_with_the_runs_they_hold_for(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite_all(tmp_path, warned)
    results = collect(study, tmp_path)
    assert summary(results)["warnings"] == [
        f"All runs: {LEAK}",
        "fedavg-seed2: site Sydney has one melanoma",
        "prr: label_smoothing = 0.1 has no effect",
    ]
    page = render(results)
    assert (
        page.index('<h2 id="warnings">Warnings</h2>')
        < page.index("label_smoothing = 0.1 has no effect")
        < page.index("<section")
    )


def test_groups_shared_with_training_are_told_under_every_table_and_once_in_the_report(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite_all(tmp_path, warned)
    results = collect(study, tmp_path)
    for text in (to_markdown(results), to_latex(results)):
        assert f"All runs: {LEAK}." in text and "label_smoothing" not in text.replace(r"\_", "_")
    assert render(results).count(LEAK) == 1


def test_a_warning_of_one_data_set_names_it(tmp_path):
    study = make_up(made_up_study(data=DATA, row=ROWS), tmp_path)
    rewrite_all(tmp_path, lambda path, line: warned(path, line) if path.parent.parent.name == "first" else [line])
    results = collect(study, tmp_path)
    assert warnings(results.rows) == [f"first: {LEAK}", "first: prr: label_smoothing = 0.1 has no effect"]
    assert not [note for table in tables_of(results, "second") for note in table.notes() if "groups" in note]


# ---- a common test set -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["test", "valid"])
def test_a_mean_over_sites_is_not_called_a_score_on_a_common_set(tmp_path, part):
    study = make_up(made_up_study(scope="common", part=part, row=ROWS), tmp_path)
    with pytest.raises(
        UserError, match=f"made-up has scope = .common.*fedavg-seed1 has no common .*{', '.join(SITES)}"
    ):
        collect(study, tmp_path)
    rewrite(tmp_path, common_set)
    assert summary(collect(study, tmp_path))["mean_ranks"] == {"fedavg": 2.0, "prr": 1.0, "local": 3.0}


@pytest.mark.parametrize("name", ["fedbm-ham10000-0.05", "fediic-ham10000", "fedbm-tuning-ham10000"])
def test_recorded_runs_of_common_sets_are_known_as_such(name):
    results = collect(load_study(name), ROOT / "results" / name)
    assert results.study.scope == "common" and all(run.told["judges"] == ["common"] for run in results.runs)


# ---- what is lacking -------------------------------------------------------------------------------------------------


def test_seeds_and_rows_of_the_first_wave_that_are_not_there_are_told(tmp_path):
    rows = [*made_up_study().rows, {"name": "kept", "method": "fedprox", "seeds": [], "later": [1, 2]}]
    study = make_up(made_up_study(row=rows), tmp_path)
    without(tmp_path, "fedavg-seed2", "fedavg-seed3", "prr-seed1")
    results = collect(study, tmp_path)
    found = summary(results)
    assert found["not_run"] == ["fedavg (seeds 2, 3)", "prr (seed 1)", "central"]
    assert found["later"] == ["kept"] and found["unfinished"] == []
    page = render(results)
    assert "Not run yet: fedavg (seeds 2, 3); prr (seed 1); central." in page and "4 finished, 4 not" in page


def test_a_run_that_was_begun_is_not_called_unrun(tmp_path):
    study = make_up(made_up_study(row=[{"name": "fedavg", "method": "fedavg", "seeds": [1, 2, 3]}]), tmp_path)
    without(tmp_path, "fedavg-seed3")
    rewrite_all(tmp_path, lambda path, line: [line] * (path.parent.name != "fedavg-seed2" or line["event"] != "end"))
    found = summary(collect(study, tmp_path))
    assert found["unfinished"] == ["fedavg-seed2"] and found["not_run"] == ["fedavg (seed 3)"]


def test_runs_of_no_row_are_named(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    (tmp_path / "runs" / "prr-seed1").rename(tmp_path / "runs" / "prr, old-seed1")
    results = collect(study, tmp_path)
    assert summary(results)["strangers"] == ["prr, old-seed1"]
    assert "runs of no row: &#39;prr, old-seed1&#39;" in render(results)


def test_a_run_without_its_mean_over_sites_is_damaged(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite_all(tmp_path, lambda path, line: [line] * (line.get("scope") != "mean" or path.parent.name != "prr-seed2"))
    assert "tells of no test result" in str(collect(study, tmp_path).damaged["prr-seed2"])


def test_a_study_whose_first_wave_is_done_is_complete(tmp_path):
    rows = [*ROWS, {"name": "kept", "method": "fedprox", "seeds": [], "later": [1]}]
    results = collect(make_up(made_up_study(row=rows), tmp_path), tmp_path)
    assert summary(results)["not_run"] == [] and summary(results)["later"] == ["kept"]
    page = render(results)
    assert "not complete" not in page and "3 finished, 0 not" in page and "<dt>With --full</dt><dd>kept</dd>" in page


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_ranks_are_over_data_sets_where_there_are_several(tmp_path):
    def better(path, line):
        raised = path.parent.parent.name == "second" and path.parent.name.startswith("fedavg")
        if raised and line["event"] == "final":
            return [line | {"metrics": line["metrics"] | {"macro_f1": 0.99}}]
        return [line]

    study = make_up(made_up_study(data=DATA, row=ROWS), tmp_path)
    rewrite_all(tmp_path, better)
    results = collect(study, tmp_path)
    assert results.ranking.ranks["fedavg"] == {"first": 2.0, "second": 1.0}
    assert summary(results)["mean_ranks"] == {"fedavg": 1.5, "prr": 1.5, "local": 3.0}
    without(tmp_path, "second/prr-seed1")
    results = collect(study, tmp_path)
    assert summary(results)["mean_ranks"] == {"fedavg": 1.0, "local": 2.0}
    assert "a light dot for each data set" in render(results) and "without prr, which lacks second" in render(results)


def test_rows_common_set_are_ranked_even_where_the_study_asks_for_sites(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite(tmp_path, common_set)
    results = collect(study, tmp_path)
    assert summary(results)["mean_ranks"] == {"fedavg": 2.0, "prr": 1.0, "local": 3.0}
    assert '<figure id="ranks"' in render(results) and "No run has finished" not in render(results)


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_a_metric_that_was_not_measured_is_null_everywhere(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    rewrite(tmp_path, lambda line: [line | {"metrics": {"macro_f1": 0.5}} if line["event"] == "final" else line])
    for row in summary(collect(study, tmp_path))["rows"]:
        for scores in (row, *row["views"].values(), *row["sites"].values(), *row["cohorts"].values()):
            assert scores["macro_f1"]["mean"] == pytest.approx(50.0)
            assert all(scores[key] is None for key in ("balanced_accuracy", "balanced_auc", "accuracy", "ece"))


def test_rows_that_differ_by_a_constant_are_not_tested():
    values = {
        "best": {1: 70.1, 2: 72.3, 3: 71.7},
        "shifted": {1: 60.1, 2: 62.3, 3: 61.7},
        "other": {1: 50.0, 2: 55.0, 3: 49.0},
        "same": {1: 70.1, 2: 72.3, 3: 71.7},
    }
    with python_warnings.catch_warnings():
        python_warnings.simplefilter("error")
        found = {comparison.other: comparison for comparison in compare_with_best(values)}
    shifted = found["shifted"]
    assert (shifted.t_test, shifted.wilcoxon, shifted.t_test_holm, shifted.wilcoxon_holm) == (None,) * 4
    assert shifted.difference == pytest.approx(10.0) and found["same"].t_test == 1.0
    assert found["other"].t_test_holm == pytest.approx(2 * found["other"].t_test), "two tests were made, not three"


def test_an_untested_pair_has_a_dash_and_no_mark(tmp_path, monkeypatch):
    monkeypatch.setitem(SCORES, "prr", {seed: value + 20 for seed, value in SCORES["fedavg"].items()})
    results = collect(make_up(made_up_study(), tmp_path), tmp_path)
    assert summary(results)["tests"][""][0]["t_test"] is None
    page = render(results)
    assert '<td class="number">20.00</td>' in page and "†" not in page
    assert not [note for table in tables_of(results, "") for note in table.notes() if "Holm" in note]


def test_a_row_of_one_seed_leaves_nothing_bold(tmp_path, monkeypatch):
    monkeypatch.setitem(SCORES, "local", {1: 72.0})
    assert "textbf" not in to_latex(collect(make_up(made_up_study(), tmp_path), tmp_path))


def test_cohorts_show_the_models_that_were_measured_there(tmp_path, monkeypatch):
    monkeypatch.setitem(VIEWS, "fedavg", ("global", "trained"))
    study = make_up(made_up_study(scope="trained"), tmp_path)
    at_cohort = {"view": "global"}
    rewrite(
        tmp_path,
        lambda line: [line | at_cohort if (line.get("scope"), line.get("view")) == ("cohort", "trained") else line],
    )
    rows = {row["method"]: row for row in summary(collect(study, tmp_path))["rows"]}
    assert rows["fedavg"]["view"] == "trained"
    assert rows["fedavg"]["cohorts"]["Graz"]["macro_f1"]["mean"] == pytest.approx(30.0)


# ---- words -----------------------------------------------------------------------------------------------------------


def test_the_column_of_validation_names_the_metric_that_chose(tmp_path):
    assert "Balanced accuracy, validation</th>" in render(collect(make_up(made_up_study(), tmp_path), tmp_path))


def test_only_a_study_of_a_paper_differs_from_it(tmp_path):
    study = make_up(made_up_study(paper="", row=ROWS), tmp_path)
    results = collect(study, tmp_path)
    assert "Note: 64 px." in to_markdown(results) and "Differs from the paper" not in to_markdown(results)
    assert "<dt>Notes</dt>" in render(results)
    study = study.model_copy(update={"paper": "Table II"})
    assert "Differs from the paper: 64 px." in to_markdown(collect(study, tmp_path))


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("p < 0.05 | x > 1", "p $<$ 0.05 $|$ x $>$ 1"),
        ('"quoted" ("too")', "``quoted'' (``too'')"),
        ("≤ ≥ → α ± ×", r"$\leq$ $\geq$ $\rightarrow$ $\alpha$ $\pm$ $\times$"),
        ("Zürich, Ångström, Łódź", r"Z\"{u}rich, \r{A}ngstr\"{o}m, \L{}\'{o}d\'{z}"),
        ("--full – a—b", "-{}-full -- a---b"),
        ("50 % of $5 & {x}_1^2~", r"50 \% of \$5 \& \{x\}\_1\textasciicircum{}2\textasciitilde{}"),
        ("½ ﬁve 皮膚 ą", "1/2 five ?? a"),
    ],
)
def test_any_text_comes_out_right_in_latex(text, printed):
    assert latex_text(text) == printed and latex_text(text).isascii()


def test_counts_stand_inside_bubbles_only_where_they_fit(tmp_path):
    site = {"name": "A", "train": [4000, 400, 60, 1]}
    start = {"event": "start", "run": "a", "method": "fedavg", "classes": ["a", "b", "c", "d"], "sites": [site]}
    (tmp_path / "events.jsonl").write_text(json.dumps(start))
    figure = federation_bubbles(read_run(tmp_path))
    assert figure is not None
    bubbles = figure.pages[""][0].traces[0]
    beside = {text: place.endswith("right") for text, place in zip(bubbles["text"], bubbles["textposition"])}
    assert beside == {"4,000": False, "400": True, "60": True, "1": True}


# ---- which rows are compared, and what else tables say --------------------------------------------------------------


@pytest.fixture
def with_central(tmp_path, monkeypatch):
    """A study in two tables whose pooled row is better than every federated one."""
    monkeypatch.setitem(SCORES, "central", {1: 90.0, 2: 91.0, 3: 93.0})
    monkeypatch.setitem(VIEWS, "central", ("global",))
    tables = {"fedavg": ["Table II", "Table IV"], "prr": ["Table II"], "local": ["Table IV"], "central": ["Table II"]}
    rows = [
        {"name": name, "method": name, "seeds": list(SCORES[name]), "tables": own, "paper": PAPER.get(name, {})}
        for name, own in tables.items()
    ]
    return collect(make_up(made_up_study(row=rows, metrics=["macro_f1"]), tmp_path), tmp_path)


def test_pooled_training_is_shown_but_is_never_the_best_nor_tested_nor_ranked(with_central):
    latex = to_latex(with_central)
    assert r"\textbf{72.00 $\pm$ 1.73}" in latex and r"central & 91.33 $\pm$ 1.53 & -- \\" in latex
    (test,) = summary(with_central)["tests"][""]
    assert (test["best"], test["other"]) == ("prr", "fedavg")
    assert "central" not in summary(with_central)["mean_ranks"]


def test_tests_are_made_within_each_table(with_central):
    second, fourth = tables_of(with_central, "")
    assert [test.other for test in second.comparisons] == ["fedavg"] and fourth.comparisons == []
    assert [dict(zip(table.cells.index, table.marks))["fedavg"] for table in (second, fourth)] == ["†", ""]
    assert "†" in second.tests_note
    assert fourth.tests_note == "No test was made: no two rows have 3 seeds in common."


def test_pooled_training_sends_no_model(with_central):
    costs = {row["method"]: row["cost"] for row in summary(with_central)["rows"]}
    assert costs["central"]["sent_per_round"] is None and costs["central"]["relative_traffic"] is None
    assert costs["fedavg"]["sent_per_round"] == 1000
    assert "central: no model travels, but all images would." in render(with_central)


def test_the_table_says_why_pooled_training_is_not_bold(with_central):
    told = "central: pooled images, which hospitals cannot choose; neither best nor tested."
    assert all(told in text for text in (to_markdown(with_central), to_latex(with_central), render(with_central)))


def test_means_over_different_sites_are_not_compared(tmp_path):
    study = make_up(made_up_study(), tmp_path)

    def without_sydney(path: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
        return [line] * (not ("prr" in path.parent.name and line.get("site") == "Sydney"))

    rewrite_all(tmp_path, without_sydney)
    (table,) = tables_of(collect(study, tmp_path), "")
    assert table.uneven == {"prr": ["Sydney"]} and table.comparisons == []
    assert not table.best.any(axis=None)
    told = "Means are from different sites (prr lacks Sydney): they do not compare, and no test was made."
    assert told in table.notes()


@pytest.mark.parametrize("what", ["numbers", "pixels"])
def test_runs_on_different_images_are_not_compared(tmp_path, what):
    study = make_up(made_up_study(), tmp_path)

    def with_another_image(path: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["event"] == "start" and what == "pixels":
            line["judging_data"] = "other" if "prr" in path.parent.name else "same"
        elif line["event"] == "start" and "prr" in path.parent.name:
            line["sites"][0]["test"][0] += 1
        return [line]

    rewrite_all(tmp_path, with_another_image)
    (table,) = tables_of(collect(study, tmp_path), "")
    (told,) = table.incomparable
    assert told.startswith("Runs saw different images (") and "; prr)" in told and told in table.notes()
    assert table.comparisons == [] and not table.best.any(axis=None)
    told_too = summary(collect(study, tmp_path))
    assert told_too["incomparable"] == {"": [told]} and told_too["mean_ranks"] == {}


def test_rows_with_fewer_seeds_are_named(tmp_path):
    (table,) = tables_of(collect(make_up(made_up_study(), tmp_path), tmp_path), "")
    assert "Mean ± sample standard deviation over 3 seeds; 1 for local." in table.notes()


def test_side_tables_name_their_data_set(tmp_path):
    results = collect(make_up(made_up_study(data=DATA, row=ROWS), tmp_path), tmp_path)
    captions = [side.caption for data in results.data_names for side in side_tables(results, data)]
    assert len(captions) == len(set(captions)) and captions[0] == "first: Macro F1 by site."


def test_a_paper_s_table_is_told_from_the_numbering_around_it(with_central):
    captions = [table.caption for table in tables_of(with_central, "")]
    assert captions[0].startswith("The paper's Table II. Made-up scores.")


def test_every_file_has_marks_costs_and_the_unseen_cohort(tmp_path):
    results = collect(make_up(made_up_study(), tmp_path), tmp_path)
    for text in (to_latex(results), to_markdown(results), render(results)):
        assert "The unseen cohort Graz" in text and "50.24" in text
        assert "FLOPs per image" in text and "Model" in text
    assert "| fedavg | 52.00 ± 2.00† |" in to_markdown(results)
    lines = list(csv.DictReader(io.StringIO(to_csv(results))))
    (cohort,) = [line for line in lines if line["cohort"] and line["method"] == "prr"]
    assert cohort["cohort"] == "Graz" and cohort["macro_f1_paper"] == "50.24" and cohort["model_bytes"] == ""


def test_the_rule_stands_under_tables_of_sites_and_cohorts_too(tmp_path):
    results = collect(make_up(made_up_study(cohort_table="Table X"), tmp_path), tmp_path)
    by_site, cohort, *_ = side_tables(results, "")
    assert by_site.notes[0].startswith("Reported is the round") and cohort.notes == by_site.notes
    assert "over 3 seeds" in cohort.notes[1]
    for text in (to_latex(results), to_markdown(results), render(results)):
        assert text.count("Test data took no part in the choice") >= 3
        assert "Table X. The unseen cohort Graz" in text


def test_what_is_sent_is_told_by_entry_where_runs_do(tmp_path):
    study = make_up(made_up_study(), tmp_path)
    sizes = {"model": 992.0, "examples": 8.0, "prototypes": 768.0}

    def told(path: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
        known = line["event"] == "round" and "prr" in path.parent.name
        return [line | {"entries": sizes} if known else line]

    rewrite_all(tmp_path, told)
    results = collect(study, tmp_path)
    row = next(row for row in summary(results)["rows"] if row["method"] == "prr")
    assert row["cost"]["sent_by_entry"] == sizes
    sentence = "Sent by prr: model 992 bytes, prototypes 768 bytes. Parts not recorded: fedavg, local."
    assert all(sentence in text for text in (to_markdown(results), to_latex(results), render(results)))


def image_counts(results: StudyResults) -> Sheet:
    """The table of images."""
    (counts,) = [side for side in side_tables(results, "") if side.heads[0] == "Site"]
    return counts


def test_images_are_counted_by_site_class_and_part(tmp_path):
    results = collect(make_up(made_up_study(), tmp_path), tmp_path)
    counts = image_counts(results)
    assert list(counts.cells) == ["nevus", "melanoma", "vascular"]
    assert counts.cells.to_numpy().tolist() == [["80 / 8 / 16", "15 / 2 / 3", "5 / 0 / 1"] for _ in SITES]
    assert "| site | " in to_markdown(results) and "Site & " in to_latex(results)


def test_of_a_common_set_the_images_that_score_are_counted(tmp_path):
    study = make_up(made_up_study(scope="common"), tmp_path)
    rewrite(tmp_path, common_set)
    counted = {"name": "common", "train": [0, 0, 0], "valid": [8, 2, 0], "test": [16, 3, 1]}
    nothing = {"valid": [0, 0, 0], "test": [0, 0, 0]}

    def moved(path: Path, line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["event"] == "start":
            line["sites"] = [*(site | nothing for site in line["sites"] if site["name"] != "common"), counted]
        return [line]

    rewrite_all(tmp_path, moved)
    counts = image_counts(collect(study, tmp_path))
    assert counts.heads[0] == "Site" and [names for names, _ in counts.lines] == [("common",)]
    assert counts.cells.to_numpy().tolist() == [["8 / 16", "2 / 3", "0 / 1"]] and "validation / test" in counts.caption


def test_costs_are_relative_to_the_row_of_fedavg_whatever_its_name(tmp_path):
    rows = [{"name": "fedavg", "method": "fedprox"}, {"name": "local", "method": "fedavg"}]
    results = collect(make_up(made_up_study(row=rows), tmp_path), tmp_path)
    base = base_line(results.rows)
    assert base and base.row.name == "local" and "relative to local in the last columns" in cost_caption(results.rows)
    assert base_line([row for row in results.rows if row is not base]) is None


def test_a_small_share_of_traffic_keeps_a_digit(tmp_path):
    study = make_up(made_up_study(), tmp_path)

    def little(line: dict[str, Any]) -> list[dict[str, Any]]:
        own = line["event"] == "round" and {"Vienna": {"sent": 0, "received": 1}, "Sydney": {"sent": 1, "received": 0}}
        return [line | {"sites": own} if own else line]

    rewrite_all(tmp_path, lambda path, line: little(line) if "local" in path.parent.name else [line])
    line = next(line for line in to_markdown(collect(study, tmp_path)).splitlines()[::-1] if line.startswith("| local"))
    assert line.endswith("| 0.0007 |")


@pytest.mark.parametrize(("given", "shown"), [((69.5, 70.0), "69.5"), ((69.5, 70.25), "69.50"), ((70.0, 69.0), "70.0")])
def test_a_paper_s_numbers_have_the_decimals_of_their_column(given, shown):
    assert decimals(given[0], [*given, None]) == shown and decimals(None, given) == "–"


@pytest.mark.parametrize(
    ("asked", "images", "why"),
    [
        (False, True, " (evaluation.trained = false)"),
        (True, False, ", for the sites have no separate validation images"),
        (True, True, ""),
    ],
)
def test_the_report_says_why_there_are_no_curves_of_retrogress(tmp_path, asked, images, why):
    study = make_up(made_up_study(), tmp_path)
    assert "No curves of retrogress" not in render(collect(study, tmp_path))

    def untrained(line: dict[str, Any]) -> list[dict[str, Any]]:
        if line["event"] == "start":
            line["config"]["evaluation"]["trained"] = asked
            for site in line["sites"]:
                site["valid"] = site["train"] if images else [0] * len(site["train"])
        return [line] * (line.get("view") != "trained")

    rewrite_all(tmp_path, lambda path, line: untrained(line))
    page = render(collect(study, tmp_path))
    assert f"No curves of retrogress: models were not scored right after local training{why}." in page


def test_a_table_says_how_rounds_were_chosen_for_its_own_rows_alone(tmp_path):
    rows = [
        {"name": "fedavg", "method": "fedavg", "tables": ["A", "B"]},
        {"name": "prr", "method": "prr", "tables": ["B"], "settings": {"evaluation": {"rule": "last"}}},
        {"name": "local", "method": "local", "tables": ["A"]},
    ]
    study = made_up_study(row=rows)
    results = collect(make_up(study, tmp_path), tmp_path)
    first, second = (table.rule for table in tables_of(results, ""))
    best, ending = "the round with the best validation balanced accuracy", " Test data took no part in the choice."
    assert first == f"Reported is {best}.{ending}"
    assert second == f"Reported is {best} (fedavg); the last round (prr).{ending}"
    assert results.rule == f"Reported is {best} (fedavg, local); the last round (prr).{ending}"


def test_several_data_sets_are_drawn_side_by_side(tmp_path):
    several = collect(make_up(made_up_study(data=DATA, row=ROWS), tmp_path / "two"), tmp_path / "two")
    assert 'id="over-data"' in render(several)
    assert 'id="over-data"' not in render(collect(make_up(made_up_study(), tmp_path / "one"), tmp_path / "one"))


def test_tables_have_the_rows_that_were_run_and_name_the_others(tmp_path):
    results = collect(make_up(made_up_study(), tmp_path), tmp_path)
    for text in (to_markdown(results), to_latex(results), render(results)):
        assert "central: for later" not in text and "No finished run: central." in text


def test_a_table_that_would_repeat_one_row_of_another_waits_for_its_own(tmp_path):
    own = ["prr", "apfl"]
    names = {"fedavg": ["Table II"], "prr": ["Table II"], "local": ["Table II"], "apfl": []}
    rows = [
        {"name": name, "method": name, "seeds": list(SCORES.get(name, {1: 0})), "tables": [*first, "Table XII"]}
        if name in own
        else {"name": name, "method": name, "seeds": list(SCORES[name]), "tables": first}
        for name, first in names.items()
    ]
    results = collect(make_up(made_up_study(row=rows), tmp_path), tmp_path)
    assert [table.name for table in tables_of(results, "")] == ["Table II"]
    assert summary(results)["tables_to_come"] == ["Table XII"]
    page = render(results)
    assert "<dt>To come</dt><dd>Table XII</dd>" in page and "The paper's Table XII" not in page


def test_a_data_set_without_finished_runs_says_so(tmp_path):
    rows = [row | {"tables": ["Table II"]} for row in ROWS]
    study = make_up(made_up_study(data=DATA, row=rows), tmp_path)
    for path in (tmp_path / "runs" / "second").glob("*/events.jsonl"):
        path.unlink()
    results = collect(study, tmp_path)
    assert "No run has finished yet." in render(results) and tables_to_come(results) == ["second: Table II"]


@pytest.mark.parametrize("more", [[], ["apfl"]])
def test_a_table_that_compares_rows_is_shown_though_another_has_them(more, tmp_path):
    names = {"fedavg": ["Table II", "Ablation"], "prr": ["Table II", "Ablation"], "local": ["Table II"]}
    names |= {name: ["Ablation"] for name in more}
    rows = [
        {"name": name, "method": name, "seeds": list(SCORES.get(name, {1: 0})), "tables": tables}
        for name, tables in names.items()
    ]
    results = collect(make_up(made_up_study(row=rows), tmp_path), tmp_path)
    assert [table.name for table in tables_of(results, "")] == ["Table II", "Ablation"]
    assert tables_to_come(results) == []


def test_a_study_names_the_columns_of_a_paper_on_other_data(tmp_path):
    results = collect(make_up(made_up_study(paper_label="paper, ISIC 2019"), tmp_path), tmp_path)
    assert all(
        "Macro F1, paper, ISIC 2019" in text for text in (to_markdown(results), to_latex(results), render(results))
    )


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"last": 5}, "the mean over the last 5 rounds"),
        ({"last": 50}, "the mean over the last 20 rounds"),
        ({"last": 9, "first_round": 18}, "the mean over the last 3 rounds"),
        ({"last": 6, "every": 5}, "the mean over the 2 that were measured of the last 6 rounds"),
    ],
)
def test_the_rule_tells_the_rounds_that_were_averaged(tmp_path, settings, rule):
    study = make_up(made_up_study(), tmp_path)

    def averaged(line):
        if line["event"] != "start":
            return [line]
        config = line["config"] | {"evaluation": {"rule": "mean_last", **settings}, "train": {"rounds": 20}}
        return [line | {"config": config}]

    rewrite(tmp_path, averaged)
    assert collect(study, tmp_path).rule.startswith(f"Reported is {rule}.")


# ---- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "shown"), [("finished", (20, 20)), ("is left to another process, which is at it", (3, 3))]
)
def test_the_bar_of_a_grid_comes_to_its_end_whoever_does_the_rounds(tmp_path, how, shown):
    study = made_up_study(row=[{"name": "fedavg", "method": "fedavg", "seeds": [1]}])
    (cell,) = grid(study, tmp_path)
    config = make_config(None, ["train.rounds=20"])
    display = GridProgress(Console(quiet=True), [(cell, config)])
    line = display.started(cell, config)
    line.event("resumed", round=2)
    line.event("round", round=3)
    display.ended(cell, how)
    (whole,) = display.progress.tasks
    assert (whole.completed, whole.total) == shown
