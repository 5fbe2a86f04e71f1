"""Who ended a command of a deployment: said in words, with an exit status that scripts know."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from equipoise.core.termination import SIGNALLED, Terminated


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
        sys.exit(SIGNALLED + signal.SIGTERM)
