"""Commands for what a finished run leaves: `equipoise predict` and `equipoise export`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

console = Console()

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's folder")]
Site = Annotated[str | None, typer.Option(help="use this site's personal model")]


def predict(
    run_folder: RunFolder,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...")],
    site: Site = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="as CSV, for other programs")] = False,
) -> None:
    """Classify images with a run's selected model."""
    from equipoise.engine.prediction import predict_images

    classes, rows = predict_images(run_folder, images, site)
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["image", "prediction", *classes])
        for path, probabilities in zip(images, rows):
            writer.writerow([path, classes[int(probabilities.argmax())], *(f"{p:.6f}" for p in probabilities.tolist())])
        return
    table = Table(Column("image", overflow="fold"), "prediction", *map(escape, classes))
    for path, probabilities in zip(images, rows):
        best = int(probabilities.argmax())
        table.add_row(escape(str(path)), escape(classes[best]), *(f"{p:.3f}" for p in probabilities.tolist()))
    console.print(table)


def export(
    run_folder: RunFolder,
    file: Annotated[Path, typer.Argument(help="a new file: .pt2 (PyTorch) or .onnx")],
    site: Site = None,
) -> None:
    """Write a run's selected model to a file that works without Equipoise."""
    from equipoise.engine.exporting import export_model

    card = export_model(run_folder, file, site)
    shape = ", ".join(map(str, card["pixels"]["shape"]))
    whose = f"the personal model of {card['site']}" if card["site"] else "the global model"
    console.print(
        f"{escape(str(file))}: {escape(whose)} of {escape(card['method'])}, uint8 pixels ({shape}) to probabilities of "
        f"{escape(', '.join(card['classes']))}",
        highlight=False,
        soft_wrap=True,
    )
