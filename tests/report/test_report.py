"""Reports: what the page and the tables say equals what the events say, on made-up runs of known content."""

import base64
import csv
import dataclasses
import io
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.core.errors import UserError
from equipoise.report import headline, read_run, selection_note, to_csv, to_latex, write_report
from equipoise.report.curves import flat, metric_curves, retrogress
from equipoise.report.evidence_tables import sub_group_sheets
from equipoise.report.run_comparison import balanced, chance, class_recall, finding, overlaid_learning, unseen_recall
from equipoise.report.run_facts import key_numbers, left_out
from equipoise.report.run_tables import run_labels
from equipoise.report.sheet import markdown, sheet
from equipoise.report.thumbnails import allowed, examples_of
from equipoise.report.wording import duration, percent, ranges, traffic
from harness import run_tiny

CLASSES = ["nevus", "melanoma", "keratosis", "vascular"]
TRAIN = {
    "Vienna": [820, 96, 210, 0],
    "Sydney": [310, 140, 55, 22],
    "Barcelona": [640, 75, 130, 9],
    "Ljubljana": [95, 60, 14, 4],
}
ROUNDS = 8
MISSING_ROUND = 5
HOSTILE = "</text></svg><script>alert('x')</script>$&\"_1"
FIGURES = ["recall", "confusion", "sites", "learning", "retrogress", "federation", "work", "traffic"]


def scores(confusion: np.ndarray, loss: float) -> dict[str, Any]:
    """Metrics of a confusion matrix over the classes present, in the shape of an evaluation event."""
    support, predicted, right = confusion.sum(1), confusion.sum(0), np.diag(confusion)
    present = support > 0
    recall = right[present] / support[present]
    f1 = 2 * right[present] / (support + predicted)[present]
    metrics = {
        "balanced_accuracy": float(recall.mean()),
        "macro_f1": float(f1.mean()),
        "accuracy": float(right.sum() / support.sum()),
        "balanced_auc": float(0.5 + recall.mean() / 2),
        "ece": float(0.2 - recall.mean() / 8),
        "loss": loss,
        "worst_class_recall": float(recall.min()),
    }
    per_class = [float(r / s) if s else None for r, s in zip(right, support)]
    return {"metrics": metrics, "recall": per_class, "confusion": confusion.tolist()}


def matrix(rng: np.random.Generator, support: list[int], skill: float) -> np.ndarray:
    """A confusion matrix of a model that knows frequent classes better than rare ones."""
    rows = []
    for true, count in enumerate(support):
        right = np.clip(skill - 0.13 * true, 0.05, 0.97)
        share = np.full(len(support), (1 - right) / (len(support) - 1))
        share[true] = right
        rows.append(rng.multinomial(count, share))
    return np.array(rows)


def site_counts(train: dict[str, list[int]]) -> list[dict[str, Any]]:
    eighth = {name: [-(-count // 8) for count in counts] for name, counts in train.items()}
    return [
        {"name": name, "train": counts, "valid": eighth[name], "test": [2 * count for count in eighth[name]]}
        for name, counts in train.items()
    ]


def start_event(method: str, train: dict[str, list[int]], rounds: int) -> dict[str, Any]:
    return {
        "event": "start",
        "time": "2025-03-04T10:20:30+00:00",
        "run": f"{method}-demo",
        "method": method,
        "version": "0.1.0",
        "config": {"seed": 3, "data": {"name": "made-up"}, "train": {"rounds": rounds}},
        "classes": CLASSES,
        "sites": site_counts(train),
        "warnings": ["Vienna has no training image of vascular"],
        "disclosure": {"train": {"model": "the weights after local training", "examples": "number of images"}},
        "paper": "McMahan et al., AISTATS 2017",
        "parameters": 2_370_000,
        "model_bytes": 9_100_000,
    }


def round_event(number: int, train: dict[str, list[int]], away: str | None) -> dict[str, Any]:
    work = {
        name: {"loss": 1.6 / number**0.5, "seconds": sum(counts) / 200, "examples": sum(counts)}
        | {"sent": 9_100_400, "received": 9_100_000}
        for name, counts in train.items()
        if name != away
    }
    missing = {away: "its update contains NaN"} if away else {}
    return {"event": "round", "round": number, "seconds": 6.5, "lr": 0.01, "sites": work, "missing": missing}


def evaluation(number: int, view: str, site: str, confusion: np.ndarray) -> dict[str, Any]:
    head = {"event": "evaluation", "round": number, "part": "valid", "view": view, "site": site}
    return {**head, "n": int(confusion.sum()), **scores(confusion, 2.2 / (number + 1) ** 0.5)}


def run_events(method: str, view: str, train: dict[str, list[int]], rounds: int) -> Iterator[dict[str, Any]]:
    """The events of a finished run whose sites end each round with a model of `view`; one site misses a round."""
    rng = np.random.default_rng(len(method))
    start = start_event(method, train, rounds)
    yield start
    gain = 0.1 if view == "personal" else 0.0
    for number in range(rounds + 1):
        skill = 0.45 + gain + 0.42 * (1 - np.exp(-number / 4))
        away = "Ljubljana" if number == MISSING_ROUND else None
        if number:
            yield round_event(number, train, away)
        for site in start["sites"]:
            if number and site["name"] != away:
                trained = matrix(rng, site["valid"], skill + 0.1 - gain)
                yield evaluation(number, "trained", site["name"], trained)
            yield evaluation(number, view, site["name"], matrix(rng, site["valid"], skill))
    chosen = {"rule": "best", "round": rounds - 1, "view": view}
    yield {"event": "selection", "metric": "balanced_accuracy", "value": 0.6503, **chosen}
    yield from final_events(rng, start["sites"], chosen, 0.8 + gain)
    yield {"event": "end", "seconds": 754.0}


def final_events(
    rng: np.random.Generator, sites: list[dict[str, Any]], chosen: dict[str, Any], skill: float
) -> Iterator[dict[str, Any]]:
    head = {"event": "final", "part": "test", **chosen}
    matrices = [matrix(rng, site["test"], skill) for site in sites]
    scored = [scores(each, 0.7) for each in matrices]
    for site, each in zip(sites, scored):
        yield {**head, "scope": "site", "site": site["name"], **each}
    values = [each["metrics"]["balanced_accuracy"] for each in scored]
    metrics = {name: float(np.mean([each["metrics"][name] for each in scored])) for name in scored[0]["metrics"]}
    extra = {"worst_site": sites[int(np.argmin(values))]["name"], "spread": float(np.std(values))}
    yield {**head, "scope": "mean", "site": None, "metrics": metrics, "extra": extra}
    pooled = scores(np.sum(matrices, axis=0), 0.7)
    pooled["metrics"]["balanced_auc"] = None
    yield {**head, "scope": "pooled", "site": None, **pooled}


def write_events(folder: Path, events: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('method = "made-up"\n')
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def write_run(
    folder: Path,
    method: str = "fedavg",
    view: str = "global",
    train: dict[str, list[int]] = TRAIN,
    rounds: int = ROUNDS,
) -> Path:
    """A finished run folder."""
    return write_events(folder, list(run_events(method, view, train, rounds)))


def events_of(folder: Path, kind: str, **wanted: Any) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [e for e in events if e["event"] == kind and all(e[key] == value for key, value in wanted.items())]


def lines(frame: pd.DataFrame) -> list[Any]:
    """The lines of a frame, whose columns are attributes."""
    return list(frame.itertuples())


class Page(HTMLParser):
    """What a browser would find in a page: elements, ids, addresses, table rows, and the data of each figure."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []
        self.best: list[str] = []
        self.figures: dict[str, dict[str, Any]] = {}
        self.text = ""
        self._cell = self._figure = self._bold = self._script = False
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.add(tag)
        if "id" in attributes:
            self.ids.append(str(attributes["id"]))
        self.addresses += [str(attributes[key]) for key in ("href", "src", "xlink:href") if key in attributes]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self._cell, self._bold = True, "best" in str(attributes.get("class", ""))
            self.rows[-1].append("")
        if tag == "figure":
            self.figures[str(attributes["id"])] = {}
        self._figure = attributes.get("type") == "application/json"
        self._script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th", "small"):
            self._cell = False
        if tag in ("script", "style"):
            self._figure = self._script = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._script else data
        if self._cell and data.strip():
            self.rows[-1][-1] += data.strip()
            if self._bold:
                self.best.append(data.strip())
        if self._figure and data.strip():
            self.figures[list(self.figures)[-1]] = json.loads(data)

    def panels(self, name: str, page: int = 0) -> list[dict[str, Any]]:
        """The panels of one page of a figure."""
        return self.figures[name]["pages"][page]["panels"]

    def page_names(self, name: str) -> list[str]:
        """The pages that a reader can choose of a figure."""
        return [page["label"] for page in self.figures[name]["pages"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run with a global model and a run with personal models, of the same federation."""
    base = tmp_path_factory.mktemp("runs")
    return [write_run(base / "fedavg"), write_run(base / "fedbn", "fedbn", "personal")]


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Page:
    return Page(write_report(runs[:1]))


@pytest.fixture(scope="module")
def comparison(runs: list[Path]) -> Page:
    return Page(write_report(runs))


# ---- numbers -----------------------------------------------------------------------------------------


def test_headline_row_is_computed_from_the_confusion_matrices_of_the_events(runs: list[Path]):
    finals = events_of(runs[0], "final", scope="site")
    recalls = []
    for final in finals:
        confusion = np.array(final["confusion"])
        present = confusion.sum(1) > 0
        recalls.append((np.diag(confusion)[present] / confusion.sum(1)[present]).mean())
    row = next(row for row in lines(headline([read_run(runs[0])])) if row.scope == "mean")
    assert row.balanced_accuracy == pytest.approx(np.mean(recalls))
    assert row.worst_site == pytest.approx(min(recalls))
    assert row.worst == finals[int(np.argmin(recalls))]["site"]
    assert row.spread == pytest.approx(np.std(recalls))


def test_printed_tables_show_the_numbers_of_the_final_events(runs: list[Path], report: Page):
    keys = ["balanced_accuracy", "macro_f1", "accuracy", "balanced_auc", "worst_class_recall"]
    for final in events_of(runs[0], "final"):
        label = final["site"] or {"mean": "mean over sites", "pooled": "pooled"}[final["scope"]]
        printed = next(row for row in report.rows if row[:2] == ["global", label])
        assert printed[2:7] == [percent(final["metrics"][key]) for key in keys]
        assert printed[-1] == percent(final["metrics"]["ece"])


def test_an_undefined_metric_is_a_dash_not_a_zero(report: Page):
    pooled = next(row for row in report.rows if row[:2] == ["global", "pooled"])
    assert pooled[5] == "–"


def test_selection_rule_is_printed_under_the_table(runs: list[Path], report: Page):
    note = selection_note(read_run(runs[0]))
    assert note.startswith(
        f"Selected round {ROUNDS - 1}, the best by validation balanced accuracy (global view), 65.03 %"
    )
    assert note in report.text


def test_mean_over_one_common_test_set_is_named_after_it_and_not_repeated_as_pooled(tmp_path: Path):
    head = {"event": "final", "part": "test", "rule": "last", "round": 1, "view": "global"}
    scored = scores(np.diag([3, 4, 5, 6]), 0.1)
    finals = [
        {**head, "scope": scope, "site": "common" if scope == "site" else None, **scored}
        for scope in ("site", "mean", "pooled")
    ]
    folder = write_events(tmp_path / "run", [start_event("fedavg", TRAIN, 1), *finals])
    (row,) = lines(headline([read_run(folder)]))
    assert (row.scope, row.site, row.title) == ("mean", "common", "common")


# ---- curves ------------------------------------------------------------------------------------------


def test_retrogress_is_the_drop_from_the_trained_model_to_the_end_of_the_round(tmp_path: Path):
    def scored(number: int, view: str, site: str, value: float) -> dict[str, Any]:
        head = {"event": "evaluation", "round": number, "part": "valid", "view": view, "site": site}
        return {**head, "metrics": {"balanced_accuracy": value}}

    events = [
        scored(0, "global", "A", 0.2),
        scored(1, "trained", "A", 0.75),
        scored(1, "global", "A", 0.5),
        scored(1, "trained", "B", 0.5),
        scored(1, "global", "B", 0.75),
        scored(2, "trained", "A", 0.8),  # A is not scored at the end of round 2: no drop is known
        scored(2, "global", "B", 0.7),  # B did not train in round 2
    ]
    start = start_event("fedavg", {"A": [1, 1, 1, 1], "B": [1, 1, 1, 1]}, 2)
    run = read_run(write_events(tmp_path / "global", [start, *events]))
    assert retrogress(run).to_dict() == {"A": {1: 0.25}, "B": {1: -0.25}}
    assert retrogress(run).mean(axis=1).to_dict() == {1: 0.0}

    personal = [scored(1, "personal", "A", 0.625)]
    run = read_run(write_events(tmp_path / "personal", [start, *events, *personal]))
    assert retrogress(run).to_dict() == {"A": {1: 0.125}}


def test_where_personal_models_wait_for_the_final_test_curves_are_of_the_global_one(tmp_path: Path):
    waits = ("evaluation.view='global'", "fedbabu.finetune_epochs=1", "data.phantom.images=120")
    tuned, plain = read_run(run_tiny(tmp_path / "tuned", "fedbabu", *waits)), read_run(run_tiny(tmp_path / "plain"))
    assert (tuned.end_view, tuned.round_view) == ("personal", "global")
    trained, ended = (metric_curves(tuned, "balanced_accuracy", view) for view in ("trained", "global"))
    drops = retrogress(tuned)
    assert list(drops) == list(trained) and list(drops.index) == [1, 2] and drops.notna().all(axis=None)
    assert drops["site 1"][2] == trained["site 1"][2] - ended["site 1"][2]
    figure = overlaid_learning([tuned, plain], ["tuned", "plain"])
    assert figure is not None and [len(panel.traces) for panel in figure.pages[""]] == [2, 2, 2, 2]


def test_mean_curve_is_over_the_sites_scored_in_the_round(runs: list[Path]):
    trained = metric_curves(read_run(runs[0]), "accuracy", "trained")
    assert np.isnan(trained["Ljubljana"][MISSING_ROUND])
    others = [trained[site][MISSING_ROUND] for site in ("Vienna", "Sydney", "Barcelona")]
    assert trained.mean(axis=1)[MISSING_ROUND] == pytest.approx(np.mean(others))


# ---- the page ----------------------------------------------------------------------------------------


def test_report_of_one_run_lies_in_its_folder_and_opens_with_a_finding_and_its_figure(runs: list[Path], report: Page):
    assert (runs[0] / "report.html").is_file()
    assert list(report.figures) == ["lead-lead", *(f"run1-{name}" for name in FIGURES)]
    assert report.html.index('class="finding"') < report.html.index('id="lead-lead"') < report.html.index("<table")
    (panel,) = report.panels("lead-lead")
    assert panel["layout"]["yaxis"]["ticktext"][0] == "vascular (35)", "the rarest class is on top"


def test_finding_tells_the_score_its_interval_chance_and_the_rarest_class(runs: list[Path], report: Page):
    run = read_run(runs[0])
    low, value, high = balanced(run) or (0, 0, 0)
    assert low < value < high and value == lines(headline([run]))[0].balanced_accuracy
    assert chance(run) == pytest.approx((1 / 3 + 3 / 4) / 4), "Vienna has three of the four classes"
    rare = class_recall(run)["recall"]["vascular"]
    told = f"fedavg finds {100 * value:.0f} % of an average class (95 % interval {100 * low:.0f} to {100 * high:.0f})"
    assert told in report.text and "where guessing finds 27 %" in report.text
    assert f"It finds {100 * rare:.0f} % of the rarest class, vascular." in report.text


def test_recall_map_is_empty_where_a_site_lacks_the_class(report: Page):
    (panel,) = report.panels("run1-recall")
    lacking = [site for site, line in zip(panel["data"][0]["y"], panel["data"][0]["z"]) if None in line]
    assert lacking == ["Vienna"]


def test_bubbles_are_the_counts_and_crosses_the_absent_classes(report: Page):
    there, absent = report.panels("run1-federation")[0]["data"]
    assert {"820", "140", "640"} <= set(there["text"]) and len(there["x"]) == 15
    assert (absent["x"], absent["y"]) == ([3], [0])
    sizes = dict(zip(there["text"], there["marker"]["size"]))
    assert (sizes["820"] - 3) ** 2 / (sizes["210"] - 3) ** 2 == pytest.approx(820 / 210, rel=0.05)


def test_confusion_matrices_show_rates_and_tell_the_counts_of_every_site(runs: list[Path], report: Page):
    assert report.page_names("run1-confusion") == ["pooled", *TRAIN]
    place = report.page_names("run1-confusion").index("Sydney")
    (panel,) = report.panels("run1-confusion", place)
    counts = np.array(events_of(runs[0], "final", site="Sydney")[0]["confusion"])
    rates = 100 * counts / counts.sum(axis=1, keepdims=True)
    assert panel["data"][0]["z"] == [pytest.approx(line, abs=0.06) for line in rates.tolist()]
    first = f"nevus taken for melanoma: {counts[0, 1]} of {counts[0].sum()} ({rates[0, 1]:.1f} %)"
    assert panel["data"][0]["text"][0][1] == first


def test_every_site_has_a_page_with_its_curve_and_its_classes(report: Page):
    assert report.page_names("run1-sites") == ["Vienna", "Barcelona", "Sydney", "Ljubljana"], "the largest first"
    curves, classes = report.panels("run1-sites")
    assert [trace["name"] for trace in curves["data"]] == ["mean over sites", "Vienna"]
    assert classes["layout"]["yaxis"]["ticktext"] == ["nevus", "melanoma", "keratosis"]


def test_left_out_site_is_named_with_round_and_reason(runs: list[Path], report: Page):
    assert left_out(read_run(runs[0])) == [("Ljubljana", str(MISSING_ROUND), "its update contains NaN")]
    assert ["Ljubljana", str(MISSING_ROUND), "its update contains NaN"] in report.rows


def test_page_shows_paper_warnings_disclosure_and_config(report: Page):
    for text in ("McMahan et al., AISTATS 2017", "Vienna has no training image of vascular", 'method = "made-up"'):
        assert text in report.text
    assert ["train", "model", "the weights after local training"] in report.rows


def test_page_needs_nothing_from_outside(comparison: Page):
    assert all(address.startswith(("#", "data:")) for address in comparison.addresses)
    assert not comparison.tags & {"iframe", "img", "object"}
    assert 'src="' not in comparison.html and "@import" not in comparison.html and "url(" not in comparison.html
    assert "http" not in comparison.html, "the library is packed"


def test_ids_are_unique_and_every_link_in_the_page_has_a_target(comparison: Page):
    assert len(comparison.ids) == len(set(comparison.ids))
    targets = {address[1:] for address in comparison.addresses if address.startswith("#")}
    assert targets <= set(comparison.ids)


def test_same_run_gives_the_same_file(runs: list[Path], report: Page, tmp_path: Path):
    assert write_report(runs[:1], tmp_path / "again.html").read_text(encoding="utf-8") == report.html


def test_hostile_names_are_text_and_nothing_else(tmp_path: Path):
    folder = write_run(tmp_path / "run", train={HOSTILE: [9, 8, 7, 6], "B": [5, 4, 3, 2]}, rounds=2)
    page = Page(write_report([folder]))
    assert any(HOSTILE in row for row in page.rows)
    assert page.html.count("<script>alert") == 0
    name = page.panels("run1-federation")[0]["layout"]["yaxis"]["ticktext"][0]
    assert name.startswith("&lt;/text&gt;"), "Plotly takes tags in names for markup"


def test_many_sites_are_paged_and_their_lines_become_a_band(tmp_path: Path):
    train = {f"site {number}": [number + 5, 4, 3, 2] for number in range(45)}
    page = Page(write_report([write_run(tmp_path / "run", train=train, rounds=2)]))
    assert page.page_names("run1-federation") == ["1 to 30 of 45", "31 to 45 of 45"]
    assert page.panels("run1-federation", 1)[0]["layout"]["yaxis"]["ticktext"][-1] == "site 44"
    names = [trace["name"] for trace in page.panels("run1-learning")[0]["data"]]
    assert names == ["45 sites, 10th to 90th perc…", "mean over sites"]
    assert len(page.page_names("run1-sites")) == 45


# ---- several runs ------------------------------------------------------------------------------------


def test_comparison_lies_next_to_the_runs_and_draws_the_shared_data_once(runs: list[Path], comparison: Page):
    assert (runs[0].parent / "comparison.html").is_file()
    overlaid = ["learning", "retrogress", "federation"]
    single = [f"run{place}-{name}" for place in (1, 2) for name in FIGURES if name != "federation"]
    assert list(comparison.figures) == ["lead-lead", *(f"comparison-{name}" for name in overlaid), *single]


def test_comparison_ranks_runs_with_intervals_and_chance_and_sets_nothing_in_bold(runs: list[Path], comparison: Page):
    means = [events_of(run, "final", scope="mean")[0]["metrics"]["balanced_accuracy"] for run in runs]
    ranked, _ = comparison.panels("lead-lead")
    order = ["fedavg", "fedbn"] if means[0] > means[1] else ["fedbn", "fedavg"]
    assert [trace["name"] for trace in ranked["data"]] == order == ranked["layout"]["yaxis"]["ticktext"]
    assert [trace["x"][0] for trace in ranked["data"]] == pytest.approx([100 * each for each in sorted(means)[::-1]])
    assert all(trace["error_x"]["array"][0] > 0 for trace in ranked["data"])
    assert ranked["layout"]["annotations"][0]["text"] == "chance"
    assert [row[:3] for row in comparison.rows[2:4]] == [
        ["fedavg", "global", percent(means[0])],
        ["fedbn", "personal", percent(means[1])],
    ]
    assert comparison.best == [], "one run each tells nothing of luck"
    assert "One run each cannot tell luck from method." in comparison.text


def test_class_recall_lists_the_rarest_class_first(runs: list[Path], comparison: Page):
    labels = comparison.panels("lead-lead")[1]["layout"]["yaxis"]["ticktext"]
    assert [label.split()[0] for label in labels] == ["vascular", "melanoma", "keratosis", "nevus"]
    pooled = events_of(runs[1], "final", scope="pooled")[0]
    assert class_recall(read_run(runs[1]))["recall"].tolist() == pytest.approx(pooled["recall"])


def test_runs_of_one_method_are_told_apart_by_name_or_number(runs: list[Path]):
    first, second = map(read_run, runs)
    assert run_labels([first, second]) == ["fedavg", "fedbn"]
    assert run_labels([first, first]) == ["fedavg-demo (1)", "fedavg-demo (2)"]
    elsewhere = dataclasses.replace(first, folder=first.folder.with_name("lower-lr"))
    names = [first.folder.name, "lower-lr"]
    assert run_labels([first, elsewhere]) == names
    rows = headline([first, elsewhere])
    assert {*rows["label"]} == {*rows["run"]} == set(names)
    assert all(name in to_latex(rows) and name in to_csv(rows) for name in names)


def test_figures_that_would_be_flat_at_zero_are_left_out(tmp_path: Path):
    """Local training alone: nothing is sent, and a site ends each round with the model that it trained."""
    events = list(run_events("local", "personal", TRAIN, ROUNDS))
    ended = {(e["round"], e["site"]): e for e in events if e["event"] == "evaluation" and e["view"] == "personal"}
    for event in events:
        if event["event"] == "round":
            for work in event["sites"].values():
                work.update(sent=0, received=0)
        elif event["event"] == "evaluation" and event["view"] == "trained":
            event["metrics"] = ended[event["round"], event["site"]]["metrics"]
    folder = write_events(tmp_path / "run", events)
    page = Page(write_report([folder]))
    assert not {"run1-retrogress", "run1-traffic"} & {*page.figures} and "run1-learning" in page.figures
    assert "No retrogress: every model scored the same right after local training" in page.text
    compared = Page(write_report([folder, folder], tmp_path / "both.html"))
    assert "comparison-retrogress" not in compared.figures
    assert "comparison-learning" in compared.figures


# ---- runs that are not finished, and damage ------------------------------------------------------------


def unfinished(folder: Path, rounds: int) -> Path:
    """A run that stopped after so many of its rounds."""
    events = list(run_events("fedavg", "global", TRAIN, ROUNDS))
    return write_events(folder, [e for e in events if e["event"] == "start" or e.get("round", 99) <= rounds])


def test_unfinished_run_is_reported_as_such_with_its_latest_validation_scores(tmp_path: Path):
    folder = unfinished(tmp_path / "run", 3)
    run = read_run(folder)
    assert run.status == f"not finished: stopped, or still running, after round 3 of {ROUNDS}"
    latest = events_of(folder, "evaluation", round=3, view="global")
    row = lines(headline([run]))[0]
    assert (row.part, row.scope, row.round) == ("valid", "mean", 3)
    assert row.macro_f1 == pytest.approx(np.mean([e["metrics"]["macro_f1"] for e in latest]))
    page = Page(write_report([folder]))
    assert "not test results" in page.text
    assert "No test results yet: these are the validation scores of round 3." in page.text


def without_test_data(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of a finished run that had nothing to test on."""
    start = {**events[0], "sites": [{**site, "test": [0] * len(CLASSES)} for site in events[0]["sites"]]}
    return [start, *(e for e in events[1:] if e["event"] != "final")]


def test_finished_run_without_test_data_shows_the_validation_scores_of_the_selected_round(tmp_path: Path):
    events = without_test_data(list(run_events("fedavg", "global", TRAIN, ROUNDS)))
    folder = write_events(tmp_path / "run", events)
    page = Page(write_report([folder]))
    assert f"There is no test data: these are the validation scores of round {ROUNDS - 1}." in page.text
    assert "yet" not in page.text and "so far" not in page.text and "not finished" not in page.text
    assert "global view, mean over sites, validation" in page.text
    selected = events_of(folder, "evaluation", round=ROUNDS - 1, view="global")
    row = lines(headline([read_run(folder)]))[0]
    assert (row.part, row.rule, row.round) == ("valid", "best", ROUNDS - 1)
    assert row.macro_f1 == pytest.approx(np.mean([e["metrics"]["macro_f1"] for e in selected]))


def test_finished_run_whose_test_data_was_not_measured_says_so(tmp_path: Path):
    events = [e for e in run_events("fedavg", "global", TRAIN, ROUNDS) if e["event"] != "final"]
    run = read_run(write_events(tmp_path / "run", events))
    assert selection_note(run).startswith("The test data was not measured: these are the validation scores")


def chosen_by(**choice: Any) -> list[dict[str, Any]]:
    """Three rounds at two sites, macro F1 a tenth of the round (a hundredth more at B), and how one was chosen."""
    start = start_event("fedavg", {"A": [3, 1, 1, 1], "B": [1, 1, 1, 3]}, 3)
    start["config"]["evaluation"] = {"last": 2, "first_round": 1}
    scored = [
        {"event": "evaluation", "round": number, "part": part, "view": view, "site": site}
        | {"metrics": {"macro_f1": number / 10 + (site == "B") / 100}}
        for number in (1, 2, 3)
        for part in ("valid", "test")
        for view in ("global", "personal", "trained")
        for site in ("A", "B")
    ]
    selection = {"event": "selection", "metric": "macro_f1", "view": "personal", **choice}
    return [start, *scored, selection, {"event": "end", "seconds": 1.0}]


BY_SITE = {"rule": "best", "round": 2, "sites": {"A": {"round": 1}, "B": {"round": 3}}}


@pytest.mark.parametrize(
    ("choice", "view", "sites", "number", "words"),
    [
        ({"rule": "best", "round": 2}, "trained", {"A": 0.2, "B": 0.21}, 2, "round 2"),
        ({"rule": "mean_last", "round": 3}, "personal", {"A": 0.25, "B": 0.26}, 3, "the last rounds up to 3, averaged"),
        (BY_SITE, "personal", {"A": 0.1, "B": 0.31}, None, "the rounds that sites chose"),
        (BY_SITE, "trained", {"A": 0.1, "B": 0.31}, None, "the rounds that sites chose"),
        (BY_SITE, "global", {"A": 0.2, "B": 0.21}, 2, "the rounds that sites chose"),
    ],
)
def test_validation_scores_are_of_what_the_rule_reports(tmp_path: Path, choice, view, sites, number, words):
    run = read_run(write_events(tmp_path / "run", chosen_by(**choice)))
    found = [result for result in lines(run.validation) if result.view == view]
    values = {result.site: result.macro_f1 for result in found if result.scope == "site"}
    assert values == pytest.approx(sites)
    (over,) = [result for result in found if result.scope == "mean"]
    assert over.macro_f1 == pytest.approx(sum(sites.values()) / 2)
    assert pd.isna(over.round) if number is None else over.round == number
    assert selection_note(run).endswith(f"these are the validation scores of {words}.")


def test_pooled_validation_scores_are_of_all_sites_images_together(runs: list[Path]):
    run = read_run(runs[0])
    scored = events_of(runs[0], "evaluation", round=ROUNDS - 1, view="global")
    (pooled,) = [result for result in lines(run.validation) if (result.view, result.scope) == ("global", "pooled")]
    counts = np.sum([each["confusion"] for each in scored], axis=0)
    assert pooled.recall == pytest.approx((counts.diagonal() / counts.sum(1)).tolist())
    assert pooled.accuracy == pytest.approx(counts.trace() / counts.sum())
    assert pooled.balanced_accuracy == pytest.approx(np.mean(pooled.recall))


# ---- means over rounds ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reports the mean over its rounds 2, 4 and 5: of the last four, those that are evaluated."""
    rule = ("evaluation.rule='mean_last'", "evaluation.last=4", "evaluation.every=2", "evaluation.trained_test=true")
    learning = ("train.rounds=5", "train.epochs=2", "train.optimiser.lr=0.03")
    return run_tiny(tmp_path_factory.mktemp("averaged") / "run", "fedavg", *learning, *rule)


def test_confusion_matrices_of_a_mean_over_rounds_count_images_once_and_say_what_they_are(averaged: Path):
    page = Page(write_report([averaged]))
    (final,) = events_of(averaged, "final", scope="pooled", view="global")
    counts = np.array(final["confusion"])
    assert any(cell % 1 for cell in counts.ravel()), "the case is worth nothing if rounds agree"
    told = page.panels("run1-confusion")[0]["data"][0]["text"]
    assert f": {counts[0, 0]:,.4g} of {counts[0].sum():,.4g} (" in told[0][0] and counts.sum() == final["n"]
    assert "Each number is the mean over 3 rounds." in page.text


def test_confusion_matrices_of_one_round_say_nothing_of_rounds(report: Page):
    assert "Confusion matrices" in report.text and "Each number is the mean over" not in report.text


@pytest.mark.parametrize("view", ["global", "trained"])
def test_validation_scores_of_a_mean_over_rounds_are_of_the_rounds_that_were_tested(averaged: Path, view: str):
    run = read_run(averaged)
    tested = {event["round"] for event in events_of(averaged, "evaluation", part="test", view=view)}
    assert tested == {2, 4, 5}
    held = {site.name: site.valid for site in run.start.sites}
    results = {(result.scope, result.site): result for result in lines(run.validation) if result.view == view}
    scored = [e for e in events_of(averaged, "evaluation", part="valid", view=view) if e["round"] in tested]
    for site, images in held.items():
        own, result = [e for e in scored if e["site"] == site], results["site", site]
        assert result.macro_f1 == pytest.approx(np.mean([e["metrics"]["macro_f1"] for e in own]))
        assert np.allclose(result.confusion, np.mean([e["confusion"] for e in own], axis=0))
        assert np.sum(result.confusion, axis=1) == pytest.approx(images) and result.rounds == 3
    pooled = results["pooled", ""]
    assert np.sum(pooled.confusion, axis=1) == pytest.approx(np.sum([*held.values()], axis=0))
    rounds = [np.sum([e["confusion"] for e in scored if e["round"] == number], axis=0) for number in tested]
    assert pooled.macro_f1 == pytest.approx(np.mean([scores(each, 0)["metrics"]["macro_f1"] for each in rounds]))


def test_finished_run_without_any_scores_does_not_promise_some(tmp_path: Path):
    events = without_test_data(list(run_events("fedavg", "global", TRAIN, ROUNDS)))
    events = [e for e in events if e["event"] not in ("evaluation", "selection")]
    page = Page(write_report([write_events(tmp_path / "run", events)]))
    assert "Nothing was scored" in page.text and "yet" not in page.text


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("best", f"No validation data: the last round, {ROUNDS}."),
        ("last", f"No validation data: the last round, {ROUNDS}."),
        ("mean_last", f"No validation data: the mean over the last rounds up to {ROUNDS}."),
    ],
)
def test_a_selection_without_validation_data_is_not_called_the_best(tmp_path: Path, rule: str, words: str):
    events = [e for e in run_events("fedavg", "global", TRAIN, ROUNDS) if e["event"] != "evaluation"]
    for event in events:
        if event["event"] in ("selection", "final"):
            event.update(rule=rule, round=ROUNDS)
            event.pop("value", None)
    note = selection_note(read_run(write_events(tmp_path / "run", events)))
    assert note == f"{words} Test data took no part in the choice."


def test_run_that_has_only_started_still_gives_a_report(tmp_path: Path):
    page = Page(write_report([write_events(tmp_path / "run", [start_event("fedavg", TRAIN, 5)])]))
    assert list(page.figures) == ["run1-federation"] and 'class="finding"' not in page.html
    assert "Nothing has been scored yet." in page.text


def test_validation_scores_stand_apart_from_test_results(runs: list[Path], tmp_path: Path):
    page = Page(write_report([runs[0], unfinished(tmp_path / "run", 3)], tmp_path / "both.html"))
    assert ["Mean over sites, validation (no test results)"] in page.rows


def test_half_written_last_line_is_left_out_and_mentioned(tmp_path: Path):
    folder = unfinished(tmp_path / "run", 3)
    whole = read_run(folder)
    with (folder / "events.jsonl").open("ab") as file:
        file.write('{"event": "evaluation", "site": "Zü'.encode()[:-1])
    run = read_run(folder)
    assert run.evaluations.equals(whole.evaluations)
    assert "was cut off" in run.warnings[-1]


def test_line_cut_off_before_a_resume_is_left_out_but_damage_elsewhere_is_refused(tmp_path: Path):
    folder = unfinished(tmp_path / "run", 3)
    file = folder / "events.jsonl"
    cut = file.read_text() + '{"event": "rou\n'
    file.write_text(cut + json.dumps({"event": "resumed", "round": 3}) + "\n")
    assert read_run(folder).resumed == [3]
    assert read_run(folder).status.endswith("resumed at round 3")
    file.write_text(cut + json.dumps({"event": "warning", "text": "x"}) + "\n")
    with pytest.raises(UserError, match=r"events\.jsonl, line \d+: not JSON"):
        read_run(folder)


def test_what_a_resumed_run_wrote_again_counts_once_and_its_end_must_come_after(tmp_path: Path):
    events = list(run_events("fedavg", "global", TRAIN, ROUNDS))
    again = next(e for e in events if e["event"] == "evaluation" and e["round"] == ROUNDS and e["view"] == "global")
    changed = {**again, "metrics": {**again["metrics"], "accuracy": 0.125}}
    run = read_run(write_events(tmp_path / "run", [*events, {"event": "resumed", "round": ROUNDS - 1}, changed]))
    assert metric_curves(run, "accuracy", "global")[again["site"]][ROUNDS] == 0.125
    assert len(run.evaluations) == len(events_of(tmp_path / "run", "evaluation")) - 1
    assert not run.finished


def test_field_of_the_wrong_kind_is_named_with_its_line(tmp_path: Path):
    folder = write_events(tmp_path / "run", [start_event("fedavg", TRAIN, 2), {"event": "round", "round": "first"}])
    with pytest.raises(UserError, match=r"line 2: round event, field 'round'"):
        read_run(folder)


def test_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"no events\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="no start event"):
        read_run(write_events(tmp_path / "run", []))
    with pytest.raises(UserError, match="at least one run"):
        write_report([])


def test_report_that_cannot_be_written_leaves_nothing_behind(runs: list[Path], tmp_path: Path):
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(UserError, match=r"Cannot write .*taken\.html"):
        write_report(runs[:1], tmp_path / "taken.html")
    with pytest.raises(UserError, match=r"Cannot write .*misspelt/report\.html: No such file or directory"):
        write_report(runs[:1], tmp_path / "misspelt" / "report.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken.html"]


def test_report_reads_what_a_real_run_writes(tmp_path: Path):
    folder = run_tiny(tmp_path / "run")
    page = Page(write_report([folder]))
    drawn = [name for name in FIGURES if name != "retrogress" or not flat(retrogress(read_run(folder)))]
    assert [name for name in page.figures if name not in ("run1-predictions", "run1-examples")] == [
        "lead-lead",
        *(f"run1-{name}" for name in drawn),
    ]
    assert page.page_names("run1-predictions"), "the run kept its predictions"
    titles = [panel["title"] for panel in page.panels("run1-predictions")]
    assert titles == ["ROC", "Precision and recall", "Reliability", "Decision curve"]
    mean = events_of(folder, "final", scope="mean")[0]
    row = lines(headline([read_run(folder)]))[0]
    assert row.worst_site == pytest.approx(mean["extra"]["worst_site_value"])
    assert row.macro_f1 == mean["metrics"]["macro_f1"]


def test_examples_of_images_are_shown_of_the_phantom_and_of_nothing_else_unless_allowed(tmp_path: Path):
    run = read_run(run_tiny(tmp_path / "run"))
    found = examples_of(run)
    assert found and all(each.source.startswith("data:image/png") for each in found)
    assert len({each.source for each in found}) > len(run.start.classes), "images differ"

    def with_config(data: str, images: str) -> bool:
        config = {"data": {"name": data}, "report": {"images": images}}
        return allowed(dataclasses.replace(run, start=run.start.model_copy(update={"config": config})))

    assert with_config("phantom", "auto") and not with_config("phantom", "hidden")
    assert not with_config("ham10000", "auto") and with_config("ham10000", "shown")
    assert not allowed(dataclasses.replace(run, start=run.start.model_copy(update={"config": {}}))), "an older run"


def test_a_metric_from_outside_stands_in_the_tables(tmp_path: Path):
    events = list(run_events("fedavg", "global", TRAIN, 2))
    for event in events:
        if event["event"] == "final":
            event["metrics"]["cost_of_errors"] = 0.3125
    page = Page(write_report([write_events(tmp_path / "run", events)]))
    heads = next(row for row in page.rows if row[:2] == ["View", "Scope"])
    assert heads[-1] == "Cost of errors"
    assert next(row for row in page.rows if row[:2] == ["global", "pooled"])[-1] == "31.25"


def test_an_audit_stands_in_the_report_the_rarest_class_first(tmp_path: Path):
    folder = write_run(tmp_path / "run", rounds=2)
    groups = [
        {"scope": scope, "name": name, "members": 35, "others": 9, "auc": [0.625, 0.5, 0.75], "found": found}
        for scope, name, found in (("class", "vascular", [0.125, 0.0, 0.25]), ("site", "Vienna", [None, None, None]))
    ]
    told = {"attack": "LiRA", "shadows": 16, "false_positives": 0.01, "groups": groups}
    (folder / "audit.json").write_text(json.dumps(told))
    page = Page(write_report([folder]))
    assert ["class", "vascular", "35", "62.50 (50.00 to 75.00)", "12.50 (0.00 to 25.00)"] in page.rows
    assert ["site", "Vienna", "35", "62.50 (50.00 to 75.00)", "–"] in page.rows


def test_sub_groups_of_images_have_tables_where_their_columns_are_known(tmp_path: Path):
    folder = run_tiny(tmp_path / "run")
    assert sub_group_sheets(read_run(folder)) == []
    with np.load(folder / "predictions.npz") as file:
        columns = dict(file)
    device = np.where(np.arange(len(columns["label"])) % 2, "old", "new")
    np.savez_compressed(folder / "predictions.npz", **columns, **{"extra:device": device})
    (shown,) = sub_group_sheets(read_run(folder))
    assert {name[0] for name, _ in shown.lines} == {"old", "new"} and shown.heads[:2] == ["Device", "Images"]
    of = (columns["split"] == "test") & (columns["view"] == "global")
    assert sum(int(name[1].replace(",", "")) for name, _ in shown.lines) == of.sum()


# ---- tables as files, and words ------------------------------------------------------------------------


def test_csv_keeps_full_precision_and_leaves_unknown_values_empty(runs: list[Path], comparison: Page):
    text = (runs[0].parent / "comparison.csv").read_text()
    assert text == to_csv(headline([read_run(run) for run in runs]))
    rows = list(csv.DictReader(io.StringIO(text)))
    mean = events_of(runs[1], "final", scope="mean")[0]
    written = next(row for row in rows if row["method"] == "fedbn" and row["scope"] == "mean")
    assert float(written["macro_f1"]) == mean["metrics"]["macro_f1"]
    assert all(row["balanced_auc"] == "" for row in rows if row["scope"] == "pooled")
    links = [address for address in comparison.addresses if address.startswith("data:text/csv")]
    assert base64.b64decode(links[0].split(",")[1]).decode() == text


def test_latex_escapes_names_and_sets_nothing_in_bold(tmp_path: Path):
    runs = [
        read_run(write_run(tmp_path / "a", "fed_a&b", rounds=1)),
        read_run(write_run(tmp_path / "b", "fedbn", "personal", rounds=1)),
    ]
    latex = to_latex(headline(runs))
    assert r"fed\_a\&b (fed\_a\&b-demo) & global & mean over sites" in latex
    assert "textbf" not in latex
    columns = latex.splitlines()[2].count("&")
    assert all(line.replace(r"\&", "").count("&") == columns for line in latex.splitlines() if line.endswith(r"\\"))


@given(st.sets(st.integers(1, 60)))
def test_ranges_name_exactly_the_numbers_given(numbers: set[int]):
    named = set()
    for part in filter(None, ranges(numbers).split(", ")):
        first, _, last = part.partition("–")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


def test_quantities_are_printed_in_units_a_person_would_use():
    assert [duration(seconds) for seconds in (4.21, 59.96, 754, 7325)] == [
        "4.2 s",
        "1 min 00 s",
        "12 min 34 s",
        "2 h 02 min",
    ]
    assert [traffic(size) for size in (0, 750, 9_100_000, 2.5e9)] == ["0 bytes", "750 bytes", "9.10 MB", "2.50 GB"]


def test_the_first_numbers_say_how_many_sites_they_are_the_mean_of_where_one_was_lost(tmp_path):
    folder = run_tiny(tmp_path / "run", "fedavg", "train.rounds=1")
    whole = key_numbers(read_run(folder))
    assert whole and not any(" of " in remark for *_, remark in whole)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    kept = [line for line in lines if (line["event"], line.get("site")) != ("final", "site 2")]
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    sites = len(read_run(folder).training_images)
    assert f"global view, mean over sites ({sites - 1} of {sites})" in [
        remark for *_, remark in key_numbers(read_run(folder))
    ]


def test_a_comparison_tells_how_many_images_are_found_of_classes_that_their_site_lacks(tmp_path):
    runs = []
    for name, right in (("fedavg", 6), ("local", 0)):
        events = list(run_events(name, "global", TRAIN, ROUNDS))
        for event in events:
            if event["event"] == "final" and event["site"] == "Vienna":
                event["confusion"][CLASSES.index("vascular")] = [8 - right, *[0] * (len(CLASSES) - 2), right]
        runs.append(read_run(write_events(tmp_path / name, events)))
    assert CLASSES[-1] == "vascular" and TRAIN["Vienna"][-1] == 0
    low, recall, high, images = unseen_recall(runs[0])
    assert (recall, images) == (6 / 8, 8) and low < recall < high
    sentence = finding(runs, ["a", "b"])
    assert "Of classes that a site has never seen, its model finds: a 75 %; b 0 %." in sentence
    assert unseen_recall(read_run(write_run(tmp_path / "plain"))) is None


def test_no_name_breaks_a_table_in_markdown():
    shown = sheet("Scores.", {"Site": ["a|b\nc"]}, {"<script>x</script>": ["1.0"]})
    *_, heads, rules, row = markdown(shown).splitlines()
    assert (heads, rules, row) == ("| site | &lt;script>x&lt;/script> |", "| --- | ---: |", r"| a\|b c | 1.0 |")
