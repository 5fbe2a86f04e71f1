"""Commands that train: `equipoise run`, `resume`, `compare` and `demo`; each hands over to `equipoise.api`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from equipoise.cli import completion
from equipoise.cli.options import (
    Anyway,
    BatchSize,
    Columns,
    Components,
    Cut,
    Data,
    Device,
    Encoder,
    Epochs,
    Layout,
    Method,
    Net,
    Rate,
    Root,
    Rounds,
    Seed,
    Settings,
    Track,
    Views,
    Workers,
    data_table,
    given,
    listed,
    run_tables,
)
from equipoise.cli.screen import ROOMY, console, plain_table, say
from equipoise.core.errors import UserError

#: the numbers of a comparison that are shown in per cent
SPREAD = ("mean", "sd", "low", "high")
#: marks a folder whose runs the demo may replace
DEMO = ".demo"


def run(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[PRESET|FILE|RUN]",
            help="a preset, a TOML file, or a run to go on with",
            autocompletion=completion.presets,
        ),
    ] = None,
    method: Method = None,
    data: Data = None,
    root: Root = None,
    layout: Layout = None,
    column: Columns = None,
    rounds: Rounds = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    net: Net = None,
    encoder: Encoder = None,
    views: Views = None,
    freeze_up_to: Cut = None,
    with_: Components = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/<name>")] = None,
    device: Device = None,
    workers: Workers = None,
    skip_unreadable: Annotated[bool, typer.Option("--skip-unreadable", help="go on without images that fail")] = False,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last complete round")] = False,
    anyway: Anyway = False,
    track: Track = None,
) -> None:
    """Example: equipoise run --method prr --data folder:images --rounds 20 --epochs 5

    Train a federation, test the selected models, and write a report.

    With the folder of a run, go on with it: `equipoise run runs/mine --rounds 40`.
    """
    from equipoise.api.training_runs import run_config
    from equipoise.engine.runs import make_config, refuse_idle_options, refuse_twice

    options = run_tables(
        method, with_, seed, rounds, epochs, batch_size, lr,
        data=data_table(data, root, layout, column, skip_unreadable=skip_unreadable or None),
        net=given(name=net, encoder=encoder, views=views, freeze_up_to=freeze_up_to),
        compute=given(device=device, workers=workers),
    )  # fmt: skip
    refuse_twice(settings or [], options)
    source, out, resume = _run_folder(source, out, resume)
    config = make_config(source, settings or [], **options)
    refuse_idle_options(settings or [], config.method, config.components)
    _show(run_config(config, out, resume=resume, track=track or [], anyway=anyway, progress=True, console=console))


def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run")],
    rounds: Annotated[int | None, typer.Option(min=1, help="go on until so many rounds are done")] = None,
    workers: Workers = None,
    device: Device = None,
    track: Track = None,
) -> None:
    """Example: equipoise resume runs/fedavg-phantom-seed1 --rounds 40

    Go on with a run after its last complete round, to its end or beyond it.
    """
    from equipoise.api import load_result
    from equipoise.api.training_runs import run_config
    from equipoise.engine.runs import make_config

    path = load_result(folder).path
    options: dict[str, Any] = {"train": given(rounds=rounds), "compute": given(device=device, workers=workers)}
    config = make_config(str(path / "config.toml"), **options)
    _show(run_config(config, path, resume=True, track=track or [], progress=True, console=console))


def _run_folder(source: str | None, out: Path | None, resume: bool) -> tuple[str | None, Path | None, bool]:
    """The config file, the folder and whether to resume, where the source is the folder of a run."""
    if source is None or not (Path(source) / "config.toml").is_file():
        return source, out, resume
    if out is not None and out.resolve() != Path(source).resolve():
        return str(Path(source) / "config.toml"), out, resume
    return str(Path(source) / "config.toml"), Path(source), True


def _show(result: Any) -> None:
    """Print the scores of a run that is done, and where its report is."""
    print_headline([result.path])
    say(f"report: {result.report()}")


def compare(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="METHOD...|RUN...",
            help="methods to train, also fedavg+margins; or finished runs",
            autocompletion=completion.methods,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="a further method; repeatable", autocompletion=completion.methods),
    ] = None,
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="NAME,...",
            help="train each method also with these components",
            autocompletion=completion.components,
        ),
    ] = None,
    data: Data = None,
    root: Root = None,
    layout: Layout = None,
    column: Columns = None,
    preset: Annotated[
        str | None,
        typer.Option(help="a preset or TOML file that all runs start from", autocompletion=completion.presets),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each method, with seeds from 1")] = 3,
    rounds: Rounds = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    net: Net = None,
    encoder: Encoder = None,
    out: Annotated[Path | None, typer.Option(help="the comparison's folder; default studies/<methods>")] = None,
    device: Device = None,
    workers: Workers = None,
    settings: Settings = None,
    anyway: Anyway = False,
) -> None:
    """Example: equipoise compare local fedavg prr --data folder:images --rounds 20 --epochs 5

    Train several methods on the same data, and compare them: means, intervals and tests over seeds.

    With the folders of finished runs, write the report that compares these.
    """
    methods = [*(names or ()), *(method or ())]
    if not methods:
        raise UserError("nothing to compare; name methods or runs: equipoise compare local fedavg")
    if all((Path(name) / "events.jsonl").is_file() for name in methods):
        report([Path(name) for name in methods], out)
        return
    for name in methods:
        if (Path(name) / "events.jsonl").is_file():
            raise UserError(f"{name} is a run, and others named are none; compare runs alone, or methods alone")
        if "/" in name and Path(name).is_dir():
            raise UserError(f"{name} is a folder, but no run; name runs or methods. `equipoise runs {name}` lists them")
    from equipoise.api import compare as compare_methods
    from equipoise.contract.config_files import override
    from equipoise.core.table import dotted
    from equipoise.engine.runs import refuse_twice

    tables = {"data": data_table(data, root, layout, column), "net": given(encoder=encoder)}
    refuse_twice(settings or [], tables)
    over = dotted({name: table for name, table in tables.items() if table}) | dotted(override({}, settings or []))
    known = preset or over.get("data.name")
    found = compare_methods(
        None if known else "phantom", methods, components=listed(with_) or (), seeds=seeds, rounds=rounds,
        epochs=epochs, batch_size=batch_size, lr=lr, net=net, device=device, workers=workers, out=out, settings=over,
        preset=preset, anyway=anyway, progress=True,
    )  # fmt: skip
    rows = [
        (
            name,
            int(row["n"]),
            *(_shown(100 * row[number], 1) for number in SPREAD),
            _shown(row["p"], 3),
            _shown(100 * row["difference"], 1),
            _shown(row["probability"], 2),
        )
        for name, row in found.table().iterrows()
    ]
    headings = ("method", "runs", "mean", "sd", "from", "to", "p", "to best", "P(better)")
    console.print(plain_table(headings, rows, "balanced accuracy, %, with 95 % intervals over images and seeds"))
    say(f"report: {found.report()}")


def _shown(number: float, digits: int) -> str:
    return "-" if number != number else f"{number:.{digits}f}"


def print_headline(folders: list[Path]) -> list[Any]:
    """Print the results table of some runs, in per cent, and give what was read of them."""
    from equipoise.report import headline, read_run
    from equipoise.report.run_tables import columns_of

    records = [read_run(folder) for folder in folders]
    rows = headline(records)
    title = "test, %" if {*rows["part"]} <= {"test"} else "validation, % (no test results)"
    gap = 1 if console.width >= ROOMY else 0
    heading = "method" if (rows["label"] == rows["method"]).all() else "run"
    words = (Column(name, overflow="fold") for name in (heading, "model", "scope"))
    table = Table(*words, title=title, box=SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    columns = columns_of(rows)
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True, overflow="fold")
    for _, row in rows.iterrows():
        values = (column.told(row[column.name]) for column in columns)
        table.add_row(escape(row["label"]), row["view"], escape(row["title"].replace("mean over ", "")), *values)
    console.print(table)
    return records


def report(
    runs: Annotated[list[Path], typer.Argument(help="one run folder, or several to compare")],
    out: Annotated[Path | None, typer.Option(help="the HTML file")] = None,
) -> None:
    """Example: equipoise report runs/fedavg runs/prr --out both.html

    Write the report of a run, or a comparison of several.
    """
    from equipoise.report import write_report

    for folder in runs:
        _refuse_cut_log(folder)
    say(f"report: {write_report(print_headline(runs), out)}")


def _refuse_cut_log(run: Path) -> None:
    """Refuse a run whose log ends before the run did: its report would lack what an earlier one may have."""
    from equipoise.engine.events import last_kind

    if (run / "models").is_dir() and last_kind(run / "events.jsonl") not in ("", "start", "end"):
        raise UserError(
            f"{run / 'events.jsonl'} ends before the run did, for {run / 'models'} is there; get a copy of the log, or "
            "go on with --resume"
        )


def demo(
    out: Annotated[Path, typer.Option(help="folder of the demo's runs")] = Path("demo"),
    rounds: Annotated[int | None, typer.Option(min=1)] = None,
    methods: Annotated[str, typer.Option(help="methods, comma separated")] = "local,fedavg,fediic,prr,closed",
    preset: Annotated[str, typer.Option(help="demo, or demo-scanners: patients of a site's own diseases")] = "demo",
) -> None:
    """Example: equipoise demo --rounds 5

    Compare methods on built-in images of hospitals that each lack some diseases; ends with a report to look at.
    """
    from equipoise.api.training_runs import run_config
    from equipoise.core.storage import write_text
    from equipoise.engine import runs
    from equipoise.engine.payload_files import clear_run
    from equipoise.report import write_report

    if out.exists() and not (out / DEMO).exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} is not empty and is no folder of a demo, so files would mix. Choose another --out")
    names = [name.strip() for name in methods.split(",")]
    configs = {name: runs.make_config(preset, method=name, train=given(rounds=rounds)) for name in names}
    configs = _without_missing_weights(configs)
    write_text(out / DEMO, "The runs in this folder are replaced by the next demo.\n")
    for name, config in configs.items():
        clear_run(out / name)
        run_config(config, out / name, anyway=True, progress=True, console=console)
    folders = [out / name for name in configs]
    path = write_report(folders, out / "report.html")
    print_headline(folders)
    say(f"report: {path}")


def _without_missing_weights(configs: dict[str, Any]) -> dict[str, Any]:
    """The runs of a demo whose encoder is installed; a line names each of the others and what to install."""
    from equipoise.nets.encoders import build_encoder

    found = {}
    for name, config in configs.items():
        try:
            if config.net.encoder:
                build_encoder(config.net)
            found[name] = config
        except UserError as problem:
            say(f"The demo leaves {name} out: {problem}")
    if not found:
        raise UserError("The demo has no method left to run; install what the lines above name")
    return found
