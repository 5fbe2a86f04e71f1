"""Flower's SuperNode, made to look for messages more often: it sleeps 3 s between two looks, and has no setting for
this.

python -m equipoise.hospitals.node SECONDS [options of flower-supernode]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from equipoise.hospitals.brisk import quicken


class _BriefSleeps:
    """The module `time`, except for a `sleep` that never lasts longer than some seconds."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def sleep(self, seconds: float) -> None:
        """Sleep, but not as long."""
        time.sleep(min(seconds, self._seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def main() -> None:
    """Run a SuperNode that sleeps no longer than the first argument says."""
    from flwr.supernode import start_client_internal as loop
    from flwr.supernode.cli.flower_supernode import flower_supernode

    quicken(loop)
    loop.time = _BriefSleeps(float(sys.argv.pop(1)))  # type: ignore[assignment]
    flower_supernode()


if __name__ == "__main__":
    main()
