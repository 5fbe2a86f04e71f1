"""`equipoise concepts build | list | show`: the banks of text embeddings that FedBM's classifier is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from equipoise.cli.screen import ExampleGroup, console
from equipoise.core.errors import UserError

concepts_app = typer.Typer(
    cls=ExampleGroup,
    help="Example: equipoise concepts list\n\nClass concepts in words, for FedBM: build, list and show banks.",
    no_args_is_help=True,
)


Data = Annotated[str, typer.Argument(metavar="DATA", help="a data set, folder:DIR or manifest:FILE")]
Classes = Annotated[str | None, typer.Option(help="class names, comma separated; default the data set's")]
Encoder = Annotated[
    str | None,
    typer.Option(help="minilm, the default; biomedclip; or a BERT-like model (Hugging Face name or folder)"),
]


@concepts_app.command("build")
def build(
    data: Data,
    classes: Classes = None,
    encoder: Encoder = None,
    prompts: Annotated[Path | None, typer.Option(help="TOML file with templates and a table concepts")] = None,
    out: Annotated[Path | None, typer.Option(help="default: where FedBM looks for it")] = None,
) -> None:
    """Example: equipoise concepts build pbc

    Encode the prompts of a data set's classes, once, and keep the embeddings.
    """
    from equipoise.nets.concepts.bank import bank_file, bank_folders, build_bank, dataset_key
    from equipoise.nets.concepts.prompts import DEFAULT_ENCODER, read_wording
    from equipoise.nets.concepts.text_encoders import load_encoder

    chosen = class_names(data, classes)
    wording = read_wording(prompts) if prompts else None
    text_encoder = load_encoder(encoder or DEFAULT_ENCODER)
    dataset = dataset_key(data)
    path = out or bank_folders()[0] / bank_file(dataset, text_encoder.name)
    bank = build_bank(dataset, chosen, text_encoder, path, wording)
    count, number, width = bank.embeddings.shape
    console.print(
        f"{count} classes, {number} prompts each, {width} numbers per prompt: {path}", highlight=False, soft_wrap=True
    )


def class_names(data: str, given: str | None) -> tuple[str, ...]:
    """The classes to build a bank for: those given, a built-in data set's, or those of a user's folder or list."""
    if given:
        return tuple(name.strip() for name in given.split(",") if name.strip())
    from equipoise.data import sources
    from equipoise.data.data_config import DataConfig
    from equipoise.nets.concepts.prompts import WORDINGS

    kind, _, argument = data.partition(":")
    if kind in sources.known() and sources.lists_own_files(kind):
        return sources.load(data).listing(DataConfig(name=data), Path(argument)).classes
    if kind in WORDINGS:
        return tuple(WORDINGS[kind].concepts)
    raise UserError(f"the classes of {data!r} are not known; name them with --classes a,b,c")


@concepts_app.command("list")
def list_banks() -> None:
    """Example: equipoise concepts list

    List the banks at hand.
    """
    from equipoise.nets.concepts.bank import bank_folders, stored_banks

    table = Table("data set", "encoder", "classes", "prompts", "width", "where")
    for path, bank in stored_banks():
        sizes = (str(size) for size in bank.embeddings.shape)
        table.add_row(bank.dataset, bank.encoder, *sizes, "built in" if path.parent != bank_folders()[0] else str(path))
    console.print(table)


@concepts_app.command("show")
def show(data: Data, classes: Classes = None, encoder: Encoder = None) -> None:
    """Example: equipoise concepts show pbc

    Show what a bank says about each class, and how far apart the classes lie.
    """
    from equipoise.data.data_config import DataConfig
    from equipoise.nets.concepts.bank import find_bank
    from equipoise.nets.concepts.prompts import DEFAULT_ENCODER
    from equipoise.prototypes import concept_statistics

    bank = find_bank(DataConfig(name=data), class_names(data, classes), encoder or DEFAULT_ENCODER)
    mean, variance = concept_statistics(bank.embeddings)
    table = Table("class", "first prompt", "spread", "nearest class", "distance")
    distances = (mean[:, None] - mean).norm(dim=-1)
    distances.fill_diagonal_(float("inf"))
    for row, name in enumerate(bank.classes):
        distance, nearest = distances[row].min(0)
        spread = f"{variance[row].sum().sqrt():.3f}"
        table.add_row(name, bank.prompts[row][0], spread, bank.classes[int(nearest)], f"{distance:.3f}")
    console.print(table)
    console.print(f"{len(bank.prompts[0])} prompts per class, encoded by {bank.encoder}", highlight=False)
