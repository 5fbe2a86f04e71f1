"""The order of Equipoise's packages, from bottom to top: a package imports only packages that stand before it."""

import ast
from pathlib import Path

#: the package of losses, and all modules at the root: pure mathematics
MATHS = ("losses", *sorted(path.stem for path in Path(__file__).parents[1].glob("[!_]*.py")))

#: from bottom to top
LAYERS = (
    ("core",),
    MATHS,
    ("data",),
    ("nets",),
    ("tasks",),
    ("contract",),
    ("components",),
    ("methods",),
    ("engine",),
    ("evidence",),
    ("hospitals",),
    ("checks",),
    ("report",),
    ("studies",),
    ("watch",),
    ("api",),
    ("cli",),
)


def drawing(source: Path) -> str:
    """The packages from top to bottom, each with the first sentence of its docstring, as ARCHITECTURE.md shows them.

    Args:
        source: the folder of this package
    """
    rows = []
    for names in reversed(LAYERS):
        package = source / names[0] / "__init__.py"
        module = package if package.exists() else source / f"{names[0]}.py"
        if module.exists():
            if names is MATHS:
                rows.append(("losses · the modules at the root", "Pure mathematics: functions of tensors and arrays"))
            else:
                rows.append((names[0], _first_sentence(module)))
    return "\n".join(f"{names}\n    {told}" for names, told in rows)


def _first_sentence(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")
