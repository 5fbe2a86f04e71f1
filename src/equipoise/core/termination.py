"""SIGTERM as an exception, so that blocks that hold files and processes end in order."""

from __future__ import annotations

import signal

#: the exit status of a process that a signal ended is this, and the signal's number
SIGNALLED = 128


class Terminated(SystemExit):
    """SIGTERM came; it unwinds our blocks, so that the processes they hold are ended too."""

    def __init__(self) -> None:
        super().__init__(SIGNALLED + signal.SIGTERM)


def end_orderly_on_termination() -> None:
    """Turn SIGTERM into an exception."""

    def terminate(*_: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
