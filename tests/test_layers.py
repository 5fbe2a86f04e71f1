"""Who may import whom: nothing imports upwards (ARCHITECTURE.md, Layers)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import equipoise

SOURCE = Path(equipoise.__file__).parent
#: packages and modules of the lowest layer: they know nothing of methods, engines and what stands on them
LOWEST = (
    "data", "nets", "losses", "concepts", "prototypes", "aggregation", "metrics", "streams", "config", "tasks",
    "storage", "errors", "table",
)  # fmt: skip
#: what stands on engines, or is driven by them
ABOVE_ENGINES = ("methods", "study", "report", "deploy", "cli", "runs")
#: what methods see of the engine
CONTRACT = ("contract", "server", "setting", "protocol", "training", "optimiser", "repeat", "declared", "bulk")


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
        above = [
            module
            for module in imported(path)
            if module.split(".")[0] not in (*LOWEST, "_checks", "_lazy", "__version__")
        ]
        assert not above, f"{path.relative_to(SOURCE)} imports {', '.join(above)}"


def test_methods_know_the_contract_and_no_engine():
    for path in files_of("methods"):
        for module in imported(path):
            layer, _, rest = module.partition(".")
            known = layer in (*LOWEST, "methods", "_checks") or (layer == "engine" and rest.split(".")[0] in CONTRACT)
            assert known, f"{path.name} imports {module}"


def test_engines_know_no_method_study_report_or_deployment():
    for path in files_of("engine"):
        above = [module for module in imported(path) if module.split(".")[0] in ABOVE_ENGINES]
        assert not above, f"{path.name} imports {', '.join(above)}"
