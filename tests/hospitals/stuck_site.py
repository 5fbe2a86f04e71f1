"""`equipoise site` that never ends its work of round 2, as a process: it says so in a file, and waits to be killed."""

import sys
import time
from pathlib import Path

from equipoise.cli import app as cli
from equipoise.hospitals import office

perform = office.Office._perform


def hang(self, work, records, header, message):
    """Work as always, except in round 2."""
    if header["action"] == "train" and header["round"] == 2:
        Path(told).touch()
        time.sleep(3600)
    return perform(self, work, records, header, message)


if __name__ == "__main__":
    told = sys.argv.pop()
    office.Office._perform = hang
    sys.argv[0:1] = ["equipoise", "site"]
    cli.main()
