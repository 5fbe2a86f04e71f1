"""What ARCHITECTURE.md says under "Where to add" holds: a source that lacks something is refused by name, and the
places that know metrics and tasks are those which are listed."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from equipoise.report.tables import COLUMNS, METRIC_TITLES, SHORT_TITLES

import equipoise
from equipoise.contract.config import EvaluationConfig
from equipoise.data import sources
from equipoise.studies.grid import METRICS
from equipoise.tasks.classification import Classification

SOURCE = Path(equipoise.__file__).parent
DOCUMENT = SOURCE.parents[1] / "ARCHITECTURE.md"


def advice(what: str) -> str:
    """The paragraph about adding something."""
    return DOCUMENT.read_text(encoding="utf-8").partition(f"- **A {what}**")[2].partition("\n- **")[0]


def named_files(text: str) -> set[str]:
    """The modules of the package that a text names, such as `data/store.py`."""
    return set(re.findall(r"`([\w/]+\.py)`", text))


def files_where(holds) -> set[str]:
    """The modules outside `methods/` one of whose syntax nodes fits."""
    paths = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    trees = {path.as_posix(): ast.parse((SOURCE / path).read_text(encoding="utf-8")) for path in paths}
    return {name for name, tree in trees.items() if any(map(holds, ast.walk(tree))) and "methods/" not in name}


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


def test_every_source_lists_its_images_but_the_phantom_which_draws_them():
    listed = {name for name in sources.known() if hasattr(sources._module(name), "listing")}
    assert sources.known().keys() - listed == set(sources.DRAWN_SOURCES) == {"phantom"}


# ---- metrics and tasks -----------------------------------------------------------------------------------------


def test_names_of_metrics_stand_in_the_files_that_are_listed():
    rare = {"balanced_auc", "macro_f1", "ece"}  # not the default one, which stands in for others here and there
    found = files_where(lambda node: isinstance(node, ast.Constant) and node.value in rare)
    assert found == named_files(advice("metric"))


def test_every_named_metric_is_measured_and_has_a_title():
    task = Classification(("nevus", "melanoma"))
    measured = task.summary(task.measure(torch.eye(2), torch.arange(2)))["metrics"].keys()
    choosing = set(get_args(EvaluationConfig.model_fields["metric"].annotation))
    over_sites = {"worst_site", "spread"}
    assert choosing <= set(METRICS) <= measured
    assert set(METRICS) == {column.key for column in COLUMNS} - over_sites
    assert measured <= METRIC_TITLES.keys() and SHORT_TITLES.keys() <= METRIC_TITLES.keys()


def test_the_places_that_know_one_task_alone_are_listed():
    def makes_the_task(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Classification"

    found = files_where(makes_the_task)
    assert found and found <= named_files(advice("task"))
    assert all((SOURCE / name).is_file() for name in named_files(advice("task")))
