"""What users bring: objects from Python, and `package.module[:NAME]` or `path/to/file.py[:NAME]`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from equipoise.core.errors import UserError
from equipoise.core.suggestions import meant

#: how the names of objects begin that Python gave
GIVEN = "python:"

#: how the names of modules begin that are files of users
LOADED = "equipoise_file_"
#: what files call their plug-ins; a name with one of these is that of the file
USUAL = ("", "METHOD", "COMPONENT", "NET", "SOURCE", "LOSS", "METRIC")
#: objects that this process was given, by their names in configs
_objects: dict[str, Any] = {}


def is_outside(name: str) -> bool:
    """Whether a name leads out of this package."""
    return ":" in name or name.endswith(".py") or "." in name


def short_name(name: str) -> str:
    """The name of a table of settings, or of a folder, for something from outside; other names stay unchanged.

    >>> short_name("methods/my_method.py"), short_name("lab.methods:FedMine"), short_name("python:FedMine-1a2b3c4d")
    ('my-method', 'fedmine', 'fedmine')
    >>> short_name("fednpr-per")
    'fednpr-per'
    """
    if not is_outside(name):
        return name
    if name.startswith(GIVEN):
        return _plain(name.removeprefix(GIVEN).rpartition("-")[0])
    place, attribute = _parts(name)
    return _plain(attribute if attribute not in USUAL else Path(place.removesuffix(".py")).name.rpartition(".")[2])


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()


def _parts(name: str) -> tuple[str, str]:
    """The file or module, and the name in it."""
    if name.endswith(".py"):
        return name, ""
    place, _, attribute = name.rpartition(":")
    return (place, attribute) if place else (attribute, "")


# ---- objects ---------------------------------------------------------------------------------------------------------


def give(title: str, given: Any, digest: str, kept: Any = None, name: str | None = None) -> str:
    """The name of an object that Python gave, under which `find` finds it in this process.

    Args:
        kept: what `find` gives, if not the object itself
        name: the name that it must have, where a run knows it already
    """
    own = f"{GIVEN}{title}-{digest}"
    if name is not None and own != name:
        raise UserError(f"the object that was given is {own}, but the run was made with {name}; give that one")
    _objects[own] = given if kept is None else kept
    return own


def reachable(given: Any, module: str, name: str) -> bool:
    """Whether `module:name` leads any process to an object."""
    return module != "__main__" and getattr(sys.modules.get(module), name, None) is given and "<" not in name


def find(name: str, default: str = "") -> Any:
    """The object behind a name; `default` is the attribute that a name without one means."""
    if name.startswith(GIVEN):
        if name not in _objects:
            raise UserError(
                f"{name} was given as an object to another Python process; give it again, or put it into a module and "
                "name it package.module:NAME"
            )
        return _objects[name]
    place, attribute = _parts(name)
    module = _file(Path(place)) if place.endswith(".py") else _import(place, name)
    if not attribute and default == "SOURCE" and not hasattr(module, default):
        return module  # a source may be a module, as the built-in ones are
    found: Any = module
    for part in (attribute or default).split("."):
        found = getattr(found, part, None)
    if found is None:
        close = meant(attribute or default, [other for other in vars(module) if not other.startswith("_")])
        hint = f"did you mean {place}:{close}?" if close else "check its name"
        raise UserError(f"{place} has no {attribute or default}; {hint}")
    return found


def source_file(name: str) -> Path:
    """The file that holds what a name leads to; the module itself is not run."""
    place, _ = _parts(name)
    if place.endswith(".py"):
        return _existing(Path(place))
    _look_here()
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError) as problem:
        raise _unreachable(name, place, problem) from None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        raise _unreachable(name, place, f"there is no module {place} with a file")
    return Path(spec.origin)


def contents(module: str) -> list[tuple[str, Any]]:
    """What a loaded module holds, by name."""
    return list(vars(sys.modules[module]).items()) if module in sys.modules else []


def code_digest(*objects: Any) -> str:
    """Identifies functions and classes by their code."""
    found = hashlib.sha256()
    for given in objects:
        for text in _told(given):
            found.update(text.encode())
    return found.hexdigest()[:8]


def _told(given: Any) -> Iterator[str]:
    """Texts that identify an object's content; they are the same in every process."""
    try:
        yield inspect.getsource(given)
        return
    except (OSError, TypeError):
        yield getattr(given, "__qualname__", type(given).__name__)
    if inspect.isclass(given):
        for name, value in sorted(vars(given).items()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if hasattr(function, "__code__"):
                yield from (name, *_code(function.__code__))
    elif hasattr(given, "__code__"):
        yield from _code(given.__code__)


def _code(code: CodeType) -> Iterator[str]:
    yield from (code.co_code.hex(), *code.co_names)
    for constant in code.co_consts:
        yield from _code(constant) if isinstance(constant, CodeType) else (repr(constant),)


# ---- modules and files -----------------------------------------------------------------------------------------------


def _look_here() -> None:
    """Modules are looked for in the working folder as well."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())


def _unreachable(name: str, place: str, problem: object) -> UserError:
    return UserError(f"{name}: {problem}; start where the module {place} can be imported, or install its package")


def _import(place: str, name: str) -> ModuleType:
    """A module, looked for in the working folder as well."""
    _look_here()
    try:
        return importlib.import_module(place)
    except ImportError as problem:
        raise _unreachable(name, place, problem) from None
    except Exception as problem:
        raise _unloadable(place, problem) from problem


def _unloadable(place: Path | str, problem: Exception) -> Exception:
    """The message for a plug-in that fails while it is loaded: its author's error, and the line."""
    if isinstance(problem, UserError | MemoryError):
        return problem
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename]
    at = problem if isinstance(problem, SyntaxError) else own[-1]
    text = problem.msg if isinstance(problem, SyntaxError) else str(problem)
    return UserError(f"{place} cannot be loaded: {type(problem).__name__}: {text} ({at.filename}, line {at.lineno})")


def in_plug_in(problem: BaseException) -> str:
    """Where an error last passed through the file of a plug-in: the file and its line; empty if it never did."""
    frames = reversed([*traceback.walk_tb(problem.__traceback__)])
    inside = ((frame.f_code.co_filename, line) for frame, line in frames if _is_plug_in(frame.f_globals))
    return next((f"{file}, line {line}" for file, line in inside), "")


def _is_plug_in(variables: Mapping[str, Any]) -> bool:
    return str(variables.get("__name__", "")).startswith(LOADED)


def _existing(path: Path) -> Path:
    resolved = path.expanduser().resolve()
    if not resolved.is_file():
        raise UserError(f"there is no file {path}; check its path")
    return resolved


def _file(path: Path) -> ModuleType:
    """A Python file as a module; a file that has changed since is run anew."""
    resolved = _existing(path)
    known = hashlib.sha256(str(resolved).encode() + resolved.read_bytes()).hexdigest()[:8]
    title = f"{LOADED}{resolved.stem}_{known}"
    if title not in sys.modules:
        spec = importlib.util.spec_from_file_location(title, resolved)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[title] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as problem:
            del sys.modules[title]
            if isinstance(problem, Exception):
                raise _unloadable(path, problem) from problem
            raise
    return sys.modules[title]
