"""`equipoise server` that is killed while it sends, as a process: a site knows of a message whose bytes never come."""

import os
import signal
import sys

from flwr.superlink.grid import http_grid

from equipoise.cli import app as cli

push_objects = http_grid.push_objects
sent = {"messages": 0}


def push_or_die(*given, **named):
    """Send the bytes of a message, or die when the message is announced and nothing of it is sent."""
    sent["messages"] += 1
    if sent["messages"] == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return push_objects(*given, **named)


if __name__ == "__main__":
    last = int(sys.argv.pop(1))
    http_grid.push_objects = push_or_die
    sys.argv[0:1] = ["equipoise", "server"]
    cli.main()
