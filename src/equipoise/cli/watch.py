"""`equipoise watch`: a local page that follows a run, a study, a federation or a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.screen import console


def watch(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="[RUN|STUDY|SERVER|SITE]",
            help="folder of a run (also a server's), of a study, of a site's state, or of several runs",
        ),
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on 127.0.0.1; 0: a free one")] = 0,
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait for the folder to appear")] = 0.0,
) -> None:
    """Example: equipoise watch runs/fedavg

    Follow a run, a study, a federation or a site in the browser while it works. The page is read-only.
    """
    from equipoise.watch.following import follow
    from equipoise.watch.serving import serve, wait_for

    wait_for(path, wait)
    serve(follow(path), port, say)


def say(text: str) -> None:
    """Print the page's address as it stands."""
    console.print(
        f"open {text}  (Ctrl-C ends the page, not what it follows)", markup=False, highlight=False, soft_wrap=True
    )
