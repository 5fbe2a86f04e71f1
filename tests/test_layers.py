"""Who may import whom: packages import downwards only, in the order that `equipoise.core.layers` lists."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import equipoise
from equipoise.core.layers import LAYERS, drawing

SOURCE = Path(equipoise.__file__).parent
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
#: lines that a package's docstring may take
LONGEST_WELCOME = 5


def imported(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, within functions too, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "equipoise" else [f"equipoise.{alias.name}" for alias in node.names]
        yield from (name.removeprefix("equipoise.") for name in names if name.startswith("equipoise."))


def files_of(name: str) -> list[Path]:
    """A module, or the modules of a package."""
    package = SOURCE / name
    return sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]


@pytest.mark.parametrize("name", [name for name in HEIGHT if files_of(name)[0].exists()])
def test_a_package_imports_only_packages_below_it(name):
    for path in files_of(name):
        for module in imported(path):
            package = module.split(".")[0]
            assert package == name or HEIGHT[package] <= HEIGHT[name], f"{path.relative_to(SOURCE)} imports {module}"


def test_every_package_and_module_of_the_root_has_a_layer():
    found = {path.stem for path in SOURCE.glob("[!._]*") if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found <= set(HEIGHT)
    assert set(HEIGHT) - found <= {"api"}


def test_each_package_explains_itself_in_a_few_lines():
    for path in SOURCE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert text and len(text.splitlines()) <= LONGEST_WELCOME, path.relative_to(SOURCE)


def test_the_picture_in_the_tour_is_drawn_from_the_code():
    tour = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert drawing(SOURCE) in tour, f"put this into ARCHITECTURE.md:\n{drawing(SOURCE)}"


def test_the_words_and_numbers_of_a_report_need_no_figures():
    drawing = {"report.run_figures", "report.plotting", "report.run_comparison", "report.page", "report"}
    files = (
        "log_lines",
        "record",
        "validation_scores",
        "run_tables",
        "run_facts",
        "sheet",
        "latex",
        "curves",
        "wording",
    )
    for name in files:
        path = SOURCE / "report" / f"{name}.py"
        assert not drawing & set(imported(path)) and "matplotlib" not in path.read_text(encoding="utf-8"), path.name


def test_a_file_of_reports_and_studies_has_a_name_of_its_own():
    every = [path.stem for path in SOURCE.rglob("[!_]*.py")]
    own = [path.stem for name in ("report", "studies") for path in files_of(name) if path.stem != "__init__"]
    assert not [name for name in own if every.count(name) > 1]


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("given", ["cli.options", "cli.running", "cli.data", "cli.hospitals"]),
        ("missing_training", ["data.soundness", "hospitals.descriptions"]),
        ("byte_unit", ["report.wording", "report.run_figures", "studies.study_figures"]),
    ],
)
def test_what_several_modules_need_is_written_once(name, homes):
    assert len({getattr(import_module(f"equipoise.{home}"), name) for home in homes}) == 1
