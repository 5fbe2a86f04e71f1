"""Who ended a command of a deployment: said in words, with an exit status that scripts know."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def stops_told(say: Callable[[str], None], remedy: str) -> Iterator[None]:
    """Say who stopped the block, where a signal did, and what to do."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted by Ctrl-C, or another SIGINT; {remedy}")
        sys.exit(SIGNALLED + signal.SIGINT)
    except Terminated:
        say(f"stopped by SIGTERM, as `kill`, a service manager or a shutdown sends it; {remedy}")
        raise
