"""The one exception that means: the user can mend this (exit code 2); and what messages are made of."""


class UserError(Exception):
    """Something the user gave us cannot be used; the message says what, where, and what to do."""


def first_line(problem: BaseException) -> str:
    """What went wrong, in a line."""
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__)


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
