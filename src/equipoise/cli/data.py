"""`equipoise data`: list sources, prepare a packed store, inspect a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from equipoise.cli.given import given, pairs
from equipoise.cli.listing import sources
from equipoise.cli.screen import ExampleGroup, console

data_app = typer.Typer(
    cls=ExampleGroup,
    help="Example: equipoise data inspect folder:images\n\nData: list sources, prepare a packed store, inspect a "
    "federation.",
    no_args_is_help=True,
)

Layout = Annotated[str | None, typer.Option(help="levels of folder:DIR, such as site/class or split/class")]
Columns = Annotated[
    list[str] | None, typer.Option("--column", help="title of a manifest's column, such as label=dx; repeatable")
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="any value of the table data, key=value; repeatable")]


data_app.command("list")(sources)


@data_app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="a source, folder:DIR or manifest:FILE")],
    from_dir: Annotated[Path | None, typer.Option("--from", help="folder of the raw files")] = None,
    size: Annotated[int | None, typer.Option(min=8, help="pixels per side")] = None,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    skip_unreadable: Annotated[bool, typer.Option("--skip-unreadable")] = False,
    layout: Layout = None,
    column: Columns = None,
    settings: Settings = None,
) -> None:
    """Example: equipoise data prepare pbc --from downloads

    Decode a source's images once into a packed store.
    """
    from equipoise.data.prepare import prepare

    config = _data_config(
        name, None, size, settings, layout=layout, column=column, skip_unreadable=skip_unreadable or None
    )
    store = prepare(config, from_dir, workers=workers, progress=True)
    _print_reading(store)
    console.print(f"{len(store.index)} images in {escape(str(store.folder))}", highlight=False, soft_wrap=True)
    for warning in store.index.warnings():
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)


@data_app.command("inspect")
def data_inspect(
    name: Annotated[str, typer.Argument(help="a source, folder:DIR or manifest:FILE")] = "phantom",
    root: Annotated[Path | None, typer.Option(help="folder of the raw files")] = None,
    size: Annotated[int | None, typer.Option(min=8)] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 1,
    chart: Annotated[Path | None, typer.Option(help="draw the site x class bubble chart here (PNG, SVG, PDF)")] = None,
    layout: Layout = None,
    column: Columns = None,
    settings: Settings = None,
) -> None:
    """Example: equipoise data inspect folder:images --chart sites.png

    Print a data set's terms, the federation's site x class table, its warnings, and draw it.
    """
    from equipoise.cli.inspection import bubble_chart, table
    from equipoise.data import load_federation
    from equipoise.data.sources import terms

    for what, text in terms(name).items():
        console.print(f"{what}: {escape(text)}", highlight=False, soft_wrap=True)
    federation = load_federation(_data_config(name, root, size, settings, layout=layout, column=column), seed)
    _print_reading(next(iter(federation.places()[0].splits.values())).store)
    console.print(table(federation))
    for warning in federation.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
    if chart is not None:
        bubble_chart(federation, chart)
        console.print(f"chart: {escape(str(chart))}", highlight=False, soft_wrap=True)


def _print_reading(store: Any) -> None:
    """How the files of a user were understood, where there was something to understand."""
    if read_as := store.index.facts.get("read_as"):
        console.print(escape(read_as), highlight=False, soft_wrap=True)


def _data_config(
    name: str,
    root: Path | None,
    size: int | None,
    settings: list[str] | None,
    column: list[str] | None = None,
    **more: Any,
) -> Any:
    from equipoise.engine.runs import make_config

    data = given(name=name, root=str(root) if root else None, size=size, columns=pairs("--column", column), **more)
    return make_config(None, [s if s.startswith("data.") else f"data.{s}" for s in settings or []], data=data).data
