"""The one exception that means: the user can mend this (exit code 2); and what messages are made of."""

import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

PACKAGE = "equipoise"


class UserError(Exception):
    """Something the user gave us cannot be used; the message says what, where, and what to do.

    >>> import equipoise as eq
    >>> try:
    ...     eq.train("phantom", "fedavgg")
    ... except eq.UserError as problem:
    ...     print(problem)
    there is no method 'fedavgg'; did you mean 'fedavg'?
    """


class FolderBusy(UserError):
    """Another process is at work in a run's folder."""


#: a full or broken disk, a missing or forbidden path, a name or file too long, too many files: what the user can mend
_USERS_ERRNOS = {1, 2, 5, 13, 17, 20, 21, 23, 24, 27, 28, 30, 36, 40, 116, 122}


def is_users(problem: BaseException) -> bool:
    """Whether the user can mend what went wrong, and needs no traceback."""
    if isinstance(problem, OSError):  # some libraries leave the number out
        return problem.errno in _USERS_ERRNOS or isinstance(problem, FileNotFoundError | PermissionError)
    return isinstance(problem, UserError) or is_memory(problem)


def is_memory(problem: BaseException) -> bool:
    """Whether memory has run out, on the machine or on a device; torch has no exception type for the former."""
    told = ("not enough memory", "out of memory", "can't allocate memory")
    return isinstance(problem, MemoryError) or (
        isinstance(problem, RuntimeError) and any(text in str(problem) for text in told)
    )


def first_line(problem: BaseException) -> str:
    """What went wrong, in a line."""
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__)


def install(extra: str) -> str:
    """How to get what an extra of this package brings, wherever the package itself came from."""
    try:
        told = requires(PACKAGE) or []
    except PackageNotFoundError:  # the sources alone, on the path
        told = []
    wanted = [text.partition(";")[0].strip() for text in told if text.endswith(f'extra == "{extra}"')]
    return f"install the extra {extra}: pip install " + (" ".join(map(repr, wanted)) or f"'{PACKAGE}[{extra}]'")


def first_few(names: Iterable[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def as_text(content: bytes, where: str, encoding: str = "utf-8") -> str:
    """The text of a file that a user wrote; `where` names the file.

    Raises:
        UserError: for text that is not UTF-8, naming the line
    """
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as problem:
        line = content[: problem.start].count(b"\n") + 1
        raise UserError(f"{where}, line {line}: the text is not UTF-8; save the file in that encoding") from None


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """The tables of a TOML file; `where` names it in messages."""
    try:
        return tomllib.loads(as_text(content, where))
    except tomllib.TOMLDecodeError as problem:
        raise UserError(f"{where} is not valid TOML: {problem}") from None
