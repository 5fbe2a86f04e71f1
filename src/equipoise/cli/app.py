"""The command line: its commands, and how they end. Each group of commands has a file."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.markup import escape

from equipoise.cli import authors as plugins
from equipoise.cli import hospitals as deploy_commands
from equipoise.cli import listing, models, running
from equipoise.cli.audit import audit
from equipoise.cli.components import components_app
from equipoise.cli.concept_banks import concepts_app
from equipoise.cli.data import data_app
from equipoise.cli.embed import embed
from equipoise.cli.screen import ExampleGroup, console
from equipoise.cli.starting import init
from equipoise.cli.study import study
from equipoise.cli.watch import watch
from equipoise.core.errors import UserError, first_line, is_memory, is_users
from equipoise.core.outside import in_plug_in
from equipoise.core.termination import Terminated, end_orderly_on_termination
from equipoise.core.version import __version__

app = typer.Typer(
    name="equipoise",
    cls=ExampleGroup,
    help="Example: equipoise demo\n\nFederated learning for medical images when classes are imbalanced and hospitals "
    "differ.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(running.run)
app.command()(running.resume)
app.command()(running.compare)
app.command()(study)
app.command()(running.report)
app.command()(watch)
app.command()(models.evaluate)
app.command()(models.predict)
app.command()(audit)
app.command()(models.export)
app.command()(embed)
app.command()(init)
app.command()(plugins.new)
app.command()(plugins.check)
app.command()(running.demo)
app.command()(listing.runs)
app.command()(listing.presets)
app.command()(listing.nets)
app.command()(listing.losses)
app.command()(listing.metrics)
app.command("settings")(listing.settings_list)
app.add_typer(listing.methods_app, name="methods")
app.add_typer(components_app, name="components")
app.add_typer(data_app, name="data")
app.add_typer(concepts_app, name="concepts")
deploy_commands.mount(app)

#: the exit status of a process that Ctrl-C ended
INTERRUPTED = 130


def _version(wanted: bool) -> None:
    if wanted:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Example: equipoise demo

    Federated learning for medical images when classes are imbalanced and hospitals differ.
    """


GO_ON = "a run goes on after its last complete round with `--resume`, a study by the same command"


def main() -> None:
    """Run the command line; exit code 2 is the user's mistake, 1 is ours."""
    errors = Console(stderr=True)
    end_orderly_on_termination()
    try:
        status = app(standalone_mode=False) or 0
        if status == INTERRUPTED:  # typer has caught the interrupt
            raise KeyboardInterrupt
        sys.exit(status)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except (click.Abort, KeyboardInterrupt):
        errors.print(f"stopped; {GO_ON}")
        sys.exit(INTERRUPTED)
    except Terminated as stop:
        errors.print(f"stopped by SIGTERM, as `kill`, a service manager or a shutdown sends it; {GO_ON}")
        sys.exit(stop.code)
    except UserError as problem:
        errors.print(f"[red]error:[/] {escape(str(problem))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except OSError as problem:
        named = problem.filename is not None and problem.strerror
        text = f"{problem.filename}: {problem.strerror}" if named else str(problem)
        advice = (
            "; make room, then repeat the command, a run's with `--resume`" if problem.errno == errno.ENOSPC else ""
        )
        errors.print(f"[red]error:[/] {escape(text)}{advice}", highlight=False, soft_wrap=True)
        sys.exit(2 if is_users(problem) else 1)
    except Exception as problem:
        if is_memory(problem):
            text = escape(first_line(problem))
            errors.print(f"[red]error:[/] not enough memory: {text}", highlight=False, soft_wrap=True)
            sys.exit(2)
        traceback.print_exc()
        if place := in_plug_in(problem):
            errors.print(
                f"[red]error:[/] {escape(first_line(problem))}: in the plug-in {escape(place)}", soft_wrap=True
            )
            sys.exit(2)
        errors.print("[red]this is a fault of Equipoise, not yours; the lines above say where[/]")
        sys.exit(1)


if __name__ == "__main__":
    main()
