"""What ARCHITECTURE.md says under "Where to add" holds: a source that lacks something is refused by name, a net is
one file, a metric is one entry of one list, and the places that know tasks are those which are listed."""

from __future__ import annotations

import ast
import csv
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch

import equipoise
from equipoise.contract.config_files import override
from equipoise.core.errors import UserError
from equipoise.data import sources
from equipoise.metrics import METRICS
from equipoise.nets import NetConfig, architectures, build_net
from equipoise.tasks.classification import Classification
from harness import TINY, events

SOURCE = Path(equipoise.__file__).parent
DOCUMENT = SOURCE.parents[1] / "ARCHITECTURE.md"


def advice(what: str) -> str:
    """The paragraph about adding something."""
    return DOCUMENT.read_text(encoding="utf-8").partition(f"- **A {what}**")[2].partition("\n- **")[0]


def named_files(text: str) -> set[str]:
    """The modules of the package that a text names, such as `data/store.py`."""
    return set(re.findall(r"`([\w/]+\.py)`", text))


def files_where(holds) -> set[str]:
    """The modules outside methods and components one of whose syntax nodes fits."""
    paths = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    trees = {path.as_posix(): ast.parse((SOURCE / path).read_text(encoding="utf-8")) for path in paths}
    return {
        name
        for name, tree in trees.items()
        if any(map(holds, ast.walk(tree))) and not name.startswith(("methods/", "components/"))
    }


# ---- data sets -----------------------------------------------------------------------------------------------

COMPLETE = {
    "TITLE": "TITLE = 'a title'",
    "SIZE": "SIZE = 32",
    "PARTITION": "PARTITION = 'source'",
    "listing": "def listing(config, root): ...",
}


@pytest.fixture
def add_source(tmp_path, monkeypatch):
    """Writes a source named "new" beside the built-in ones."""
    monkeypatch.setattr(sources, "__path__", [*sources.__path__, str(tmp_path)])
    yield lambda lines: (tmp_path / "new.py").write_text("\n".join(lines))
    sys.modules.pop("equipoise.data.sources.new", None)


def test_a_complete_source_is_known(add_source):
    add_source(COMPLETE.values())
    assert sources.known()["new"] == "a title"
    assert sources.load("new").SIZE == 32


@pytest.mark.parametrize("lacking", COMPLETE)
def test_a_source_that_lacks_something_is_refused_by_name_and_the_document_asks_for_it(add_source, lacking):
    add_source(line for name, line in COMPLETE.items() if name != lacking)
    for look in (sources.known, lambda: sources.load("new")):
        with pytest.raises(TypeError, match=rf"equipoise\.data\.sources\.new .*it needs {lacking}"):
            look()
    assert re.search(rf"`{lacking}\b", advice("data set"))


def test_a_partition_that_nobody_can_draw_is_refused(add_source):
    add_source([*COMPLETE.values(), "PARTITION = 'dirichlet'"])
    with pytest.raises(TypeError, match=r"it needs PARTITION \(source, dirichlet_equal"):
        sources.load("new")


def test_every_source_lists_its_images_but_drawn_and_packed_ones():
    listed = {name for name in sources.known() if hasattr(sources.load_kind(name), "listing")}
    assert sources.known().keys() - listed == {"phantom", "arrays"}
    assert [name for name in sources.known() if sources.is_drawn(name)] == ["phantom"]


# ---- nets ------------------------------------------------------------------------------------------------------

LINEAR = """
from torch import nn

from equipoise.nets.architectures import Architecture
from equipoise.nets.net import Net, pooled


def linear(num_classes, channels, dropout):
    return Net(pooled(nn.Conv2d(channels, 4, 1)), nn.Linear(4, num_classes), dropout)


NET = Architecture(linear)
"""


@pytest.fixture
def add_net(tmp_path, monkeypatch):
    """Writes a net named "new-net" beside the built-in ones."""
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    yield (tmp_path / "new_net.py").write_text
    sys.modules.pop("equipoise.nets.architectures.new_net", None)


def test_a_net_is_one_file(add_net):
    add_net(LINEAR)
    assert build_net(NetConfig(name="new-net"), 3).feature_size == 4
    assert "architectures/<name>.py" in advice("net")


def test_a_file_without_a_net_is_refused_by_name(add_net):
    add_net(LINEAR.replace("NET =", "OTHER ="))
    with pytest.raises(UserError, match=r"new_net\.py defines no NET = Architecture"):
        build_net(NetConfig(name="new-net"), 3)


# ---- metrics and tasks -----------------------------------------------------------------------------------------


def test_names_of_metrics_stand_in_the_one_file_that_is_named():
    rare = {"balanced_auc", "macro_f1", "ece"}  # accuracy is an ordinary word
    found = files_where(lambda node: isinstance(node, ast.Constant) and node.value in rare)
    assert found == named_files(advice("metric")) == {"metrics.py"}


#: a program in which one more entry of METRICS, and nothing else, is written
WITH_ONE_MORE_METRIC = """
import sys
import numpy as np
from equipoise import metrics

metrics.METRICS += (
    metrics.Metric(
        "geometric_mean",
        "Geometric mean",
        lambda tally: float(np.exp(np.log(np.maximum(tally.recall[~np.isnan(tally.recall)], 1e-9)).mean())),
        short="geom.",
        chooses=True,
        in_curves=True,
        opens=True,
    ),
)
from equipoise.cli.app import main

main()
"""


@pytest.fixture(scope="module")
def one_more_metric(tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder where a run and a study of a new metric left their files, and what they said on the console."""
    folder = tmp_path_factory.mktemp("metric")
    rows = [{"name": name, "method": name} for name in ("fedavg", "local")]
    study = {"name": "small", "metrics": ["geometric_mean", "macro_f1"], "settings": override({}, TINY), "row": rows}
    (folder / "small.toml").write_text(tomli_w.dumps(study))
    chosen = ["run", "--out", "run", "--set=evaluation.metric=geometric_mean", *(f"--set={text}" for text in TINY)]
    said = []
    for arguments in (chosen, ["study", "small.toml"], ["settings", "evaluation"]):
        call = [sys.executable, "-c", WITH_ONE_MORE_METRIC, *arguments]
        done = subprocess.run(call, capture_output=True, text=True, cwd=folder, check=True)
        said.append(" ".join(done.stdout.split()))
    return folder, said


def test_a_new_metric_is_measured_and_may_choose_the_round(one_more_metric):
    folder, (run, _, settings) = one_more_metric
    scored = [line["metrics"]["geometric_mean"] for line in events(folder / "run", "evaluation")]
    assert len(scored) > 6 and all(0 <= value <= 1 for value in scored)
    assert {line["metric"] for line in events(folder / "run", "selection")} == {"geometric_mean"}
    assert " or geometric_mean" in settings and "geom." in run


def test_a_new_metric_stands_in_every_file_of_a_run(one_more_metric):
    folder, _ = one_more_metric
    page = (folder / "run" / "report.html").read_text()
    assert '<th scope="col" class="number">Geometric mean</th>' in page and "<em>Geometric mean</em>" in page
    assert "Geometric mean (%)" in page, "the label of its learning curves"
    (final,) = [line for line in events(folder / "run", "final") if (line["scope"], line["view"]) == ("mean", "global")]
    (row,) = [line for line in csv.DictReader((folder / "run" / "report.csv").open()) if line["scope"] == "mean"]
    assert float(row["geometric_mean"]) == final["metrics"]["geometric_mean"]
    assert "Geometric mean" in (folder / "run" / "report.tex").read_text()


def test_a_new_metric_stands_in_every_file_of_a_study(one_more_metric):
    folder, (_, console, _) = one_more_metric
    study = folder / "studies" / "small"
    summary = json.loads((study / "summary.json").read_text())
    assert summary["primary"] == "geometric_mean" and "geom." in console
    rows = {row["method"]: row["geometric_mean"]["mean"] for row in summary["rows"]}
    table = {row["method"]: float(row["geometric_mean"]) for row in csv.DictReader((study / "table.csv").open())}
    assert rows == table and rows.keys() == {"fedavg", "local"}
    for name in ("table.tex", "table.md", "report.html"):
        assert "Geometric mean" in (study / name).read_text(), name
    base = sqlite3.connect(study / "study.sqlite")
    asked = "SELECT count(*) FROM results WHERE metric = 'geometric_mean' AND scope = 'mean' AND row = 'fedavg'"
    assert base.execute(asked).fetchone() == (1,)


def test_every_metric_is_measured_of_counts():
    task = Classification(("nevus", "melanoma"))
    measured = task.summary(task.measure(torch.eye(2), torch.arange(2)))["metrics"]
    assert list(measured) == [metric.name for metric in METRICS if metric.always]
    assert all(metric.in_tables for metric in METRICS if metric.always and (metric.chooses or metric.opens))


@pytest.mark.parametrize("metric", [metric.name for metric in METRICS if metric.chooses and not metric.always])
def test_a_metric_that_few_runs_measure_is_measured_where_it_chooses(metric):
    counts = Classification(("nevus", "melanoma")).measure(torch.eye(2), torch.arange(2))
    measured = Classification(("nevus", "melanoma"), metric).summary(counts)["metrics"]
    assert measured[metric] is not None


def test_the_places_that_know_one_task_alone_are_listed():
    def makes_the_task(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Classification"

    found = files_where(makes_the_task)
    assert found and found <= named_files(advice("task"))
    assert all((SOURCE / name).is_file() for name in named_files(advice("task")))
