"""Commands for what a finished run leaves: `equipoise predict`, `evaluate` and `export`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from equipoise.cli.options import Columns, DataSettings, Layout, Root, data_table, listed
from equipoise.cli.screen import console, plain_table, say
from equipoise.core.errors import UserError

if TYPE_CHECKING:
    pass

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder")]
#: what stands in place of a site's name
SCOPES = {"mean": "mean of sites", "pooled": "all images"}
Site = Annotated[str | None, typer.Option(help="use this site's personal model")]
AsCsv = Annotated[bool, typer.Option("--csv", help="as CSV, for other programs")]


def predict(
    run_folder: RunFolder,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE|FOLDER...")],
    site: Site = None,
    as_csv: AsCsv = False,
    out: Annotated[
        Path | None, typer.Option(help="of segmentation: a new folder for masks (PNG), or a new .npz file")
    ] = None,
) -> None:
    """Example: equipoise predict runs/mine new-images --csv > predictions.csv

    Classify images, or all images in folders, with a run's selected model. A model for segmentation writes masks:
    equipoise predict runs/prostate new-images --out masks
    """
    from equipoise.engine.prediction import files_in, load_predictor, predict_images

    files = [file for path in images for file in files_in(path)]
    if out is not None:
        from equipoise.engine.predicted_masks import write_masks

        if as_csv:
            raise UserError("--csv prints classes and --out writes masks; leave one out")
        write_masks(load_predictor(run_folder, site), files, out)
        say(f"{out}: the masks of {len(files)} images")
        return
    classes, rows = predict_images(run_folder, files, site)
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["image", "prediction", *classes])
        for path, probabilities in zip(files, rows):
            writer.writerow([path, classes[int(probabilities.argmax())], *(f"{p:.6f}" for p in probabilities.tolist())])
        return
    table = Table(Column("image", overflow="fold"), "prediction", *map(escape, classes), box=SIMPLE_HEAD)
    for path, probabilities in zip(files, rows):
        best = int(probabilities.argmax())
        table.add_row(escape(str(path)), escape(classes[best]), *(f"{p:.3f}" for p in probabilities.tolist()))
    console.print(table)


def evaluate(
    run_folder: RunFolder,
    data: Annotated[str | None, typer.Option(help="other labelled images: folder:DIR, manifest:FILE, a source")] = None,
    root: Root = None,
    layout: Layout = None,
    column: Columns = None,
    site: Site = None,
    split: Annotated[str | None, typer.Option(help="only train, valid or test images")] = None,
    by: Annotated[
        str | None, typer.Option(metavar="COLUMN,...", help="a row for each sub-group of images: sex,age")
    ] = None,
    interval: Annotated[bool, typer.Option("--interval", help="95 % intervals, drawn over groups of images")] = False,
    settings: DataSettings = None,
    as_csv: AsCsv = False,
) -> None:
    """Example: equipoise evaluate runs/mine --data folder:other-hospital

    Score a finished run's models on other labelled images; without --data, on its own validation and test images.

    Without --data no image is read: scores are made anew from the run's predictions.
    """
    from equipoise.api import load_result
    from equipoise.api.other_data import federation_like

    result = load_result(run_folder)
    table = data_table(data, root, layout, column)
    if data is None and (table or settings):
        raise UserError("--root, --layout, --column and --set say how --data is read; name the images with --data")
    federation = None if data is None else federation_like(result, table or {}, settings or ())
    columns = listed(by) or []
    found = result.evaluate(federation, site, split, columns, interval)
    if as_csv:
        typer.echo(found.to_csv(index=False), nl=False)
        return
    shown = [metric for metric in result.task.metrics if metric.in_tables]
    kinds = ("view", "split")
    same = [name for name in kinds if found[name].nunique() == 1]  # the title tells these
    told = [name for name in kinds if name not in same]
    rows = [
        (
            row["site"] or SCOPES[row["scope"]],
            *(row[name] for name in (*told, *columns, "n")),
            *(_number(row, metric) for metric in shown),
        )
        for row in found.astype({"n": int}).to_dict("records")
    ]
    headings = (metric.heading for metric in shown)
    words = {"view": "model", "split": "images"}
    whose = "".join(f"{found[name].iloc[0]} {words[name]}, " for name in same)
    title = f"{whose}scores in %" + (", with 95 % intervals over groups of images" if interval else "")
    names = ("model" if name == "view" else name for name in told)
    console.print(plain_table(("site", *names, *columns, "n", *headings), rows, title))


def _number(row: dict[str, Any], metric: Any) -> str:
    """A score, and below it the bounds of its interval if requested."""
    values = [row.get(key) for key in (metric.name, f"low({metric.name})", f"high({metric.name})")]
    value, low, high = (float("nan") if own is None else metric.scale * own for own in values)
    if value != value:
        return "-"
    return f"{value:.1f}" if low != low else f"{value:.1f}\n{low:.0f}-{high:.0f}"


def export(
    run_folder: RunFolder,
    file: Annotated[Path, typer.Argument(help="a new file: .pt2 (PyTorch) or .onnx")],
    site: Site = None,
) -> None:
    """Example: equipoise export runs/mine model.onnx

    Write a run's selected model to a file that works without Equipoise.
    """
    from equipoise.engine.exporting import export_model

    card = export_model(run_folder, file, site)
    shape = ", ".join(map(str, card["pixels"]["shape"]))
    whose = f"the personal model of {card['site']}" if card["site"] else "the global model"
    classes = ", ".join(card["classes"])
    say(f"{file}: {whose} of {card['method']}, uint8 pixels ({shape}) to probabilities of {classes}")
