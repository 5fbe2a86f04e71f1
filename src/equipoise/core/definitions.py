"""What source files define, read without running them: lists of methods and options must not wait for torch.

A definition is run alone, together with the definitions that it needs. Bodies of functions are not looked at.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = Path(__file__).parents[1]
#: packages whose modules load torch, so that their definitions are read one by one
READ = ("equipoise.methods", "equipoise.components", "equipoise.contract.component", "equipoise.nets")


@cache
def module_names(*folders: str) -> tuple[str, ...]:
    """The modules of a package whose path is these folders. They are read once: a study asks a thousand times."""
    return tuple(module.name for module in pkgutil.iter_modules(folders))


def modules_in(package: str) -> dict[str, Path]:
    """The modules of a package of Equipoise by the names that users write: without _, in alphabetical order."""
    files = sorted((PACKAGE / package).glob("[!_]*.py"))
    return {path.stem.replace("_", "-"): path for path in files}


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring."""
    return " ".join((ast.get_docstring(_tree(path)) or "").partition("\n\n")[0].split())


def names_in_papers(package: str) -> dict[str, str]:
    """The modules of a package by what papers call them: the words before the colon of their first sentence, such as
    PRR-Imbalance."""
    return {summary(path).partition(":")[0]: name for name, path in modules_in(package).items()}


def constant(path: Path, name: str) -> Any:
    """The value of a plain constant at the top of a module."""
    node = _definition(path, name)
    if isinstance(node, ast.ImportFrom):
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return constant(_path(str(node.module)), original)
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        raise LookupError(f"{path} defines no constant {name}")
    return _literal(path, node.value)


def class_constant(path: Path, name: str) -> Any:
    """The plain value that a class at the top of a module gives a name; None where none does."""
    for node in _tree(path).body:
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            if name in _defines(statement) and isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value:
                return ast.literal_eval(statement.value)
    return None


def arguments(path: Path, name: str, options: bool = False) -> dict[str, Any]:
    """The plain keyword arguments of the call that a name at the top of a module stands for; clients and functions are
    left out. With `options`, the class of settings is among them."""
    node = _definition(path, name)
    call = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if not isinstance(call, ast.Call):
        raise LookupError(f"{path} defines no {name} by a call")
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg == "options" and isinstance(keyword.value, ast.Name):
            found |= {"options": defined(path, keyword.value.id)} if options else {}
        elif keyword.arg is not None:
            with suppress(LookupError, ValueError, OSError):
                found[keyword.arg] = _literal(path, keyword.value)
    return found


def defined(path: Path, name: str) -> Any:
    """What a name at the top of a module stands for."""
    module = _module(path)
    if not hasattr(module, name):
        node = _definition(path, name)
        if isinstance(node, ast.ImportFrom):
            alias = next(alias for alias in node.names if (alias.asname or alias.name) == name)
            setattr(module, name, _imported(str(node.module), alias.name))
        elif isinstance(node, ast.Import):
            exec(compile(ast.Module([node], []), str(path), "exec"), vars(module))
        else:
            for needed in _names(node):
                if not hasattr(builtins, needed) and needed != name:
                    defined(path, needed)
            exec(compile(ast.Module([node], []), str(path), "exec"), vars(module))
    return getattr(module, name)


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _module(path: Path) -> ModuleType:
    """An empty module for what is defined in a file; pydantic looks annotations up in it."""
    module = ModuleType(f"equipoise.read.{path.parent.name}.{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    return module


def _definition(path: Path, name: str) -> ast.stmt:
    """The statement at the top of a module that gives a name its meaning."""
    for node in _tree(path).body:
        if name in _defines(node):
            return node
    raise LookupError(f"{path} does not define {name}")


def _literal(path: Path, value: ast.expr) -> Any:
    """A plain value, or that of a constant of the same module."""
    return constant(path, value.id) if isinstance(value, ast.Name) else ast.literal_eval(value)


def _defines(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _path(module: str) -> Path:
    return PACKAGE.parent / f"{module.replace('.', '/')}.py"


def _imported(module: str, name: str) -> Any:
    """A name of another module; definitions of packages that load torch are read, all else is imported."""
    path = _path(module)
    if module.startswith(READ) and path.exists():
        return defined(path, name)
    return getattr(importlib.import_module(module), name)


def _names(node: ast.AST) -> Iterator[str]:
    """The names that a statement needs when it is run, without those in bodies of functions."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    inner = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef):
        inner = iter([*node.decorator_list, *node.args.defaults])  # annotations are read later, if ever
    if isinstance(node, ast.ClassDef):
        own = {name for statement in node.body for name in _defines(statement)}
        yield from (name for child in inner for name in _names(child) if name not in own)
        return
    for child in inner:
        yield from _names(child)
