"""The one exception that means: the user can mend this (exit code 2)."""


class UserError(Exception):
    """Something the user gave us cannot be used; the message says what, where, and what to do."""
