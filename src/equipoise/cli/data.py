"""`equipoise data`: list sources, prepare a packed store, inspect a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from equipoise.cli.listing import sources
from equipoise.cli.options import Columns, DataSettings, Layout, Root, data_table, given
from equipoise.cli.screen import ExampleGroup, console

data_app = typer.Typer(
    cls=ExampleGroup,
    help="Example: equipoise data inspect folder:images\n\nData: list sources, prepare a packed store, inspect a "
    "federation.",
    no_args_is_help=True,
)


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
    settings: DataSettings = None,
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
    root: Root = None,
    size: Annotated[int | None, typer.Option(min=8)] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 1,
    chart: Annotated[Path | None, typer.Option(help="draw the site x class bubble chart here (PNG, SVG, PDF)")] = None,
    layout: Layout = None,
    column: Columns = None,
    settings: DataSettings = None,
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
    store = next(iter(federation.places()[0].splits.values())).store
    if not any(store.index.facts.get("read_as", "") in warning for warning in federation.warnings):
        _print_reading(store)
    console.print(table(federation))
    for warning in federation.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
    if chart is not None:
        bubble_chart(federation, chart)
        console.print(f"chart: {escape(str(chart))}", highlight=False, soft_wrap=True)


@data_app.command("features")
def data_features(
    name: Annotated[str, typer.Argument(help="a source, folder:DIR or manifest:FILE")],
    encoder: Annotated[str, typer.Option(help="frozen encoder; see `equipoise settings net`")],
    views: Annotated[int, typer.Option(min=0, help="augmented views of each image besides")] = 0,
    root: Root = None,
    size: Annotated[int | None, typer.Option(min=8, help="pixels per side of the stored images")] = None,
    freeze_up_to: Annotated[str | None, typer.Option(help="cut the encoder after this layer, and store maps")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    layout: Layout = None,
    column: Columns = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="any value of data, net, augment, compute; repeatable")
    ] = None,
) -> None:
    """Example: equipoise data features folder:images --encoder efficientnet-lite0

    Compute the features of all images once, by a frozen encoder. Runs with the same encoder find them.
    """
    from equipoise.core.errors import UserError
    from equipoise.data import load_federation
    from equipoise.engine.runs import choose_device, make_config, with_encoder

    config = make_config(
        None,
        settings or [],
        data=data_table(name, root, layout, column, size=size),
        net=given(encoder=encoder, views=views or None, freeze_up_to=freeze_up_to),
        compute=given(device=device),
    )
    if config.net.low_rank:
        raise UserError("LoRA trains within the encoder and stores no features; set net.adapter to linear or hidden")
    federation = load_federation(config.data, config.seed)
    _, found = with_encoder(config, federation, choose_device(config.compute.device), progress=True)
    assert found.features is not None
    for store in {split.store for place in found.places() for split in place.splits.values()}:
        console.print(_features_told(store), highlight=False, soft_wrap=True)


def _features_told(store: Any) -> str:
    """What lies in a folder of features, and what it took."""
    about = store.about
    shape = "x".join(str(number) for number in about["shape"] if number > 1)
    each = f", {about['seconds'] / about['computed']:.4f} s each" if about["computed"] else ""
    views = f" and of {about['views']} augmented views" if about["views"] else ""
    size = store.packed.nbytes / 1e6
    return (
        f"features {shape} of {len(store.packed)} images{views} in {escape(str(store.folder))}: {size:.1f} MB; "
        f"{about['computed']} computed from {about['pixels']} pixels in {about['seconds']:.1f} s{each}"
    )


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

    data = data_table(name, root, column=column, size=size, **more)
    return make_config(None, [s if s.startswith("data.") else f"data.{s}" for s in settings or []], data=data).data
