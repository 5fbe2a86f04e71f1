"""Options that several commands share, and the tables of a config that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise.cli import completion
from equipoise.core.errors import UserError

File = Annotated[str | None, typer.Argument(metavar="[PRESET|FILE]", help="a preset or a TOML file")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="any config value, key=value; repeatable")]
Method = Annotated[
    str | None, typer.Option(help="see `equipoise methods`; or my_method.py", autocompletion=completion.methods)
]
Data = Annotated[
    str | None,
    typer.Option(help="a source, folder:DIR, manifest:FILE or my_source.py", autocompletion=completion.sources),
]
Root = Annotated[Path | None, typer.Option(help="folder of the source's raw files")]
Layout = Annotated[str | None, typer.Option(help="levels of folder:DIR, such as site/class or split/class")]
Columns = Annotated[
    list[str] | None, typer.Option("--column", help="title of a manifest's column, such as label=dx; repeatable")
]
DataSettings = Annotated[
    list[str] | None, typer.Option("--set", help="any value of the table data, key=value; repeatable")
]
Rounds = Annotated[int | None, typer.Option(min=1, help="rounds of communication")]
Epochs = Annotated[int | None, typer.Option(min=1, help="passes over a site's images in a round")]
BatchSize = Annotated[int | None, typer.Option(min=2, help="images of a local step")]
Rate = Annotated[float | None, typer.Option("--lr", help="learning rate of the first round")]
Encoder = Annotated[str | None, typer.Option(help="frozen encoder of the net adapter, such as efficientnet-lite0")]
Views = Annotated[int | None, typer.Option(min=0, help="with --encoder: augmented views of each image")]
Cut = Annotated[str | None, typer.Option(help="with --encoder: its last frozen layer, such as blocks.12")]
Net = Annotated[str | None, typer.Option(help="see `equipoise nets`; or my_net.py", autocompletion=completion.nets)]
Components = Annotated[
    str | None,
    typer.Option(
        "--with",
        metavar="NAME,...",
        help="ideas to put on the method; see `equipoise components`",
        autocompletion=completion.components,
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="seed of weights, batches and drawn partitions")]
Device = Annotated[
    str | None, typer.Option(help="auto, cpu or cuda; sites spread over several: cuda:0,cuda:1 or cpu:2")
]
Workers = Annotated[int | None, typer.Option(min=1, help="worker processes on a CPU")]
Anyway = Annotated[bool, typer.Option("--anyway", help="run also where the method's distinctive part has no effect")]
Track = Annotated[list[str] | None, typer.Option(help="also to tensorboard or mlflow; repeatable")]


def given(**values: Any) -> dict[str, Any] | None:
    """The options that the user gave, as a table of the config; None where there are none, and nothing is set."""
    return {name: value for name, value in values.items() if value is not None} or None


def pairs(option: str, texts: Iterable[str] | None) -> dict[str, str] | None:
    """The values of a repeatable option such as `--column label=dx`, by name; None where there are none."""
    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UserError(f"{option} {text}: expected name=value, for example {option} label=dx")
        found[name] = value
    return found or None


def listed(text: str | None) -> list[str] | None:
    """The names between commas; None where there are none."""
    return [name.strip() for name in (text or "").split(",") if name.strip()] or None


def data_table(
    name: str | None, root: Path | None = None, layout: str | None = None, column: list[str] | None = None, **more: Any
) -> dict[str, Any] | None:
    """The table `data` that options give; None where they give nothing."""
    columns = pairs("--column", column)
    return given(name=name, root=str(root) if root else None, layout=layout, columns=columns, **more)


def run_tables(
    method: str | None = None,
    with_: str | None = None,
    seed: int | None = None,
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    **tables: Any,
) -> dict[str, Any]:
    """The tables of a config that options of a run give; None where they give nothing."""
    return {
        "method": method,
        "seed": seed,
        "components": listed(with_),
        "train": given(rounds=rounds, epochs=epochs, batch_size=batch_size, optimiser=given(lr=lr)),
        **tables,
    }
