"""The order of Equipoise's packages, from bottom to top: a package imports only packages that stand before it."""

import ast
from pathlib import Path

#: modules at the root that hold pure mathematics, together with the package of losses
MATHS = (
    "losses",
    "aggregation",
    "closed_form",
    "prototypes",
    "metrics",
    "mask_metrics",
    "statistics",
    "bootstrap",
    "thresholds",
    "sums",
)

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
    ("report",),
    ("studies",),
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
            told = "pure mathematics: functions of tensors and arrays" if names is MATHS else _first_sentence(module)
            rows.append((" · ".join(names), told))
    return "\n".join(f"{names}\n    {told}" for names, told in rows)


def _first_sentence(module: Path) -> str:
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")
