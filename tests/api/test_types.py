"""The modules that define public names are held to what mypy --strict asks for."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import equipoise as eq

SETTINGS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
#: what --strict turns on, besides what holds for all modules; a module may set these alone
STRICT = {
    "disallow_any_generics", "disallow_incomplete_defs", "disallow_subclassing_any", "disallow_untyped_calls",
    "disallow_untyped_decorators", "extra_checks", "strict_equality", "warn_return_any", "warn_unused_ignores",
}  # fmt: skip


def test_the_modules_of_public_names_are_checked_strictly():
    strict = SETTINGS["overrides"][0]
    homes = {getattr(eq, name).__module__ for name in eq.__all__ if name != "__version__"}
    assert [home for home in sorted(homes) if not any(fnmatch(home, known) for known in strict["module"])] == []
    assert all(strict[name] for name in STRICT) and strict["implicit_reexport"] is False
    assert SETTINGS["check_untyped_defs"] and SETTINGS["disallow_untyped_defs"] and SETTINGS["warn_redundant_casts"]
    assert "tests/api/typed_program.py" in SETTINGS["files"] and "typed_program" in strict["module"]


def test_type_checkers_find_every_public_name_and_no_other():
    source = Path(eq.__file__).read_text(encoding="utf-8")
    imported = source[source.index("if TYPE_CHECKING:") : source.index("_HOMES")]
    assert all(name in imported.replace(",", " ").split() for name in eq.__all__ if name != "__version__")
    assert "if not TYPE_CHECKING:" in source, "__getattr__ would let mypy accept any name"
    assert (Path(eq.__file__).parent / "py.typed").exists()
