"""Who may import whom: nothing imports upwards (ARCHITECTURE.md, Layers)."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import equipoise

SOURCE = Path(equipoise.__file__).parent
#: packages and modules of the lowest layer: they know nothing of methods, engines and what stands on them
LOWEST = (
    "data", "nets", "losses", "concepts", "prototypes", "aggregation", "metrics", "reported", "streams", "config",
    "tasks", "storage", "errors", "table", "_checks", "_lazy", "_options",
)  # fmt: skip
#: what methods see of the engine, and what that stands on
CONTRACT = (
    "contract",
    "client",
    "server",
    "setting",
    "protocol",
    "training",
    "optimiser",
    "repeat",
    "declared",
    "bulk",
    "capture",
)
#: what drives methods: nothing of it is known to them, nor to the contract
DRIVERS = (
    "allocator", "base", "checkpoint", "cohort", "disclosure", "evaluation", "events", "files", "flower", "hospitals",
    "journal", "local", "loop", "opening", "parcels", "replies", "selection", "site", "states",
)  # fmt: skip
#: what stands on engines and methods
HIGHEST = (
    "study", "report", "deploy", "runs", "settings", "tracking", "progress", "prediction", "exporting", "model_cli",
    "cli", "__main__",
)  # fmt: skip


def imported(path: Path) -> Iterator[str]:
    """The modules of this package that a file imports, within functions too, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "equipoise" else [f"equipoise.{alias.name}" for alias in node.names]
        yield from (name.removeprefix("equipoise.") for name in names if name.startswith("equipoise."))


def files_of(name: str) -> list[Path]:
    """A module, or the modules of a package; commands (cli.py) stand on everything."""
    package = SOURCE / name
    found = sorted(package.rglob("*.py")) if package.is_dir() else [package.with_suffix(".py")]
    return [path for path in found if path.name != "cli.py"]


@pytest.mark.parametrize("name", LOWEST)
def test_the_lowest_layer_knows_nothing_of_those_above(name):
    for path in files_of(name):
        above = [module for module in imported(path) if module.split(".")[0] not in (*LOWEST, "__version__")]
        assert not above, f"{path.relative_to(SOURCE)} imports {', '.join(above)}"


def outside(path: Path, *layers: str) -> list[str]:
    """What a file imports beyond some packages, the contract and the lowest layer."""
    known = {*layers, *LOWEST, "__version__"}
    contract = {f"engine.{name}" for name in CONTRACT}
    return [module for module in imported(path) if module.split(".")[0] not in known and module not in contract]


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_knows_nothing_of_what_drives_methods(name):
    assert not outside(SOURCE / "engine" / f"{name}.py")


def test_methods_know_the_contract_and_no_engine():
    assert not {path.name: found for path in files_of("methods") if (found := outside(path, "methods"))}


def test_engines_know_no_method_and_nothing_that_stands_on_them():
    assert not {path.name: found for path in files_of("engine") if (found := outside(path, "engine"))}


def test_every_module_has_a_layer():
    """A new one has to be given its place here, and in ARCHITECTURE.md."""
    found = {path.stem if path.is_file() else path.name for path in SOURCE.glob("[!.]*") if is_module(path)}
    assert found - {"__init__", "engine", "methods"} == {*LOWEST, *HIGHEST}
    assert {path.stem for path in (SOURCE / "engine").rglob("*.py")} - {"__init__"} == {*CONTRACT, *DRIVERS}


def is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").exists()


def test_the_words_and_numbers_of_a_report_need_no_figures():
    drawing = {"report.figures", "report.plotting", "report.comparison", "report.page", "report"}
    for name in ("events", "record", "validation", "tables", "latex", "curves", "summary"):
        path = SOURCE / "report" / f"{name}.py"
        assert not drawing & set(imported(path)) and "matplotlib" not in path.read_text(encoding="utf-8"), path.name


def test_the_drawing_of_layers_names_every_module():
    text = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"\w+", text.partition("## Layers")[2].split("```")[1]))
    modules = {name for name in (*LOWEST, *CONTRACT, *DRIVERS, *HIGHEST) if not name.startswith("_")}
    assert not modules - drawn


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("given", ["_options", "cli", "data.cli", "deploy.cli"]),
        ("missing_training", ["data.assembly", "deploy.descriptions"]),
        ("byte_unit", ["report.summary", "report.figures"]),
    ],
)
def test_what_several_modules_need_is_written_once(name, homes):
    assert len({getattr(import_module(f"equipoise.{home}"), name) for home in homes}) == 1
