"""The command line: `equipoise run | study | report | methods | data | concepts | predict | export | server | ...`."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from equipoise.cli import hospitals as deploy_commands
from equipoise.cli.concepts import concepts_app
from equipoise.cli.data import data_app
from equipoise.cli.given import given
from equipoise.cli.models import export, predict
from equipoise.cli.study import study
from equipoise.core.errors import UserError, first_line, is_memory, is_users
from equipoise.core.version import __version__

app = typer.Typer(
    name="equipoise",
    help="Federated learning for medical images when classes are imbalanced and hospitals differ.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
methods_app = typer.Typer(help="The methods: list them, or show one with its disclosure sheet.")
app.add_typer(methods_app, name="methods")
app.add_typer(data_app, name="data")
app.add_typer(concepts_app, name="concepts")
app.command()(study)
app.command()(predict)
app.command()(export)
deploy_commands.mount(app)
console = Console()

#: the exit status of a process that Ctrl-C ended
INTERRUPTED = 130
#: marks a folder whose runs the demo may replace
DEMO = ".demo"
#: what a method costs beside FedAvg: a round's computing and traffic, and an evaluation with its adaptation
COSTS = ("compute", "traffic", "evaluation")
#: columns of a terminal that has room for wider gaps in a table
ROOMY = 90
Settings = Annotated[list[str] | None, typer.Option("--set", help="any config value, key=value; repeatable")]


@app.command()
def run(
    source: Annotated[str | None, typer.Argument(metavar="[PRESET|FILE]", help="a preset or a TOML file")] = None,
    method: Annotated[str | None, typer.Option(help="see `equipoise methods`")] = None,
    data: Annotated[str | None, typer.Option(help="a source, folder:DIR or manifest:FILE")] = None,
    root: Annotated[Path | None, typer.Option(help="folder of the source's raw files")] = None,
    rounds: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/<name>")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="worker processes on a CPU")] = None,
    skip_unreadable: Annotated[bool, typer.Option("--skip-unreadable", help="go on without images that fail")] = False,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last complete round")] = False,
    track: Annotated[list[str] | None, typer.Option(help="also to tensorboard or mlflow; repeatable")] = None,
) -> None:
    """Train a federation, test the selected models, and write a report."""
    from equipoise.engine.runs import make_config, refuse_idle_options, refuse_twice

    options: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "data": given(name=data, root=str(root) if root else None, skip_unreadable=skip_unreadable or None),
        "train": given(rounds=rounds),
        "compute": given(device=device, workers=workers),
    }
    refuse_twice(settings or [], options)
    config = make_config(source, settings or [], **options)
    refuse_idle_options(settings or [], config.method)
    folder = out or Path("runs") / config.run_name
    _run_and_report(config, folder, resume, track or [])


def _run_and_report(config: Any, folder: Path, resume: bool, track: list[str]) -> None:
    from equipoise.cli.progress import ProgressDisplay
    from equipoise.engine.payload_files import refuse_foreign
    from equipoise.engine.runs import execute
    from equipoise.engine.tracking import Trackers, check_trackers
    from equipoise.report import write_report

    names = check_trackers(track)
    refuse_foreign(folder)
    with Trackers(names, folder) as trackers:
        with ProgressDisplay(console, config.train.rounds, config.run_name) as display:
            execute(config, folder, resume, [display, trackers])
        path = trackers.report = write_report([folder])
    _print_headline([folder])
    console.print(f"report: {escape(str(path))}", highlight=False, soft_wrap=True)


def _print_headline(folders: list[Path]) -> None:
    """The results table of some runs, in per cent."""
    from equipoise.report import headline, read_run
    from equipoise.report.run_tables import COLUMNS
    from equipoise.report.wording import percent

    rows = headline([read_run(folder) for folder in folders])
    title = "test, %" if {*rows["part"]} <= {"test"} else "validation, % (no test results)"
    gap = 1 if console.width >= ROOMY else 0
    heading = "method" if (rows["label"] == rows["method"]).all() else "run"
    table = RichTable(heading, "model", "scope", title=title, box=SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column.heading, justify="right")
    for _, row in rows.iterrows():
        values = (percent(row[column.name]) for column in COLUMNS)
        table.add_row(escape(row["label"]), row["view"], escape(row["title"].replace("mean over ", "")), *values)
    console.print(table)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="one run folder, or several to compare")],
    out: Annotated[Path | None, typer.Option(help="the HTML file")] = None,
) -> None:
    """Write the report of a run, or a comparison of several."""
    from equipoise.report import write_report

    for run in runs:
        _refuse_cut_log(run)
    _print_headline(runs)
    console.print(f"report: {escape(str(write_report(runs, out)))}", highlight=False, soft_wrap=True)


def _refuse_cut_log(run: Path) -> None:
    """Refuse a run whose log ends before the run did: its report would lack what an earlier one may have."""
    from equipoise.engine.events import last_kind

    if (run / "models").is_dir() and last_kind(run / "events.jsonl") not in ("", "start", "end"):
        raise UserError(
            f"{run / 'events.jsonl'} ends before the run did, for {run / 'models'} is there; get a copy of the log, or "
            "go on with --resume"
        )


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="folder of the demo's runs")] = Path("demo"),
    rounds: Annotated[int | None, typer.Option(min=1)] = None,
    methods: Annotated[str, typer.Option(help="methods to compare, comma separated")] = "local,fedavg,prr",
) -> None:
    """Compare local training, FedAvg and PRR-Imbalance on the built-in phantom; ends with a report to look at."""
    from equipoise.cli.progress import ProgressDisplay
    from equipoise.core.storage import write_text
    from equipoise.engine.payload_files import clear_run
    from equipoise.engine.runs import execute, make_config
    from equipoise.report import write_report

    if out.exists() and not (out / DEMO).exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(
            f"{out} is not empty and holds no demo that could be replaced; delete it, or choose another --out"
        )
    names = [name.strip() for name in methods.split(",")]
    configs = {name: make_config("demo", method=name, train=given(rounds=rounds)) for name in names}
    write_text(out / DEMO, "The runs in this folder are replaced by the next demo.\n")
    for name, config in configs.items():
        clear_run(out / name)
        with ProgressDisplay(console, config.train.rounds, name) as display:
            execute(config, out / name, observers=[display])
    folders = [out / name for name in configs]
    path = write_report(folders, out / "report.html")
    _print_headline(folders)
    console.print(f"report: {escape(str(path))}", highlight=False, soft_wrap=True)


@methods_app.callback(invoke_without_command=True)
def methods_list(context: typer.Context) -> None:
    """List the methods."""
    if context.invoked_subcommand is not None:
        return
    from equipoise.engine.disclosure import POOLED
    from equipoise.methods import get_method, method_names

    headings = ("method", "paper", "what it changes", "what it sends", *COSTS)
    table = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for name in method_names():
        method = get_method(name)
        sheet = POOLED if method.pooled else method.client.discloses
        sent = ", ".join(dict.fromkeys(entry for entries in sheet.values() for entry in entries))
        paper = f"{method.paper.split(',')[0]} {method.year}" if method.year else "none"
        table.add_row(name, paper, method.changes, sent or "nothing", *_costs(name))
    console.print(table)
    console.print("compute, traffic, evaluation: beside FedAvg, measured on the phantom (benchmarks/method_costs.py);")
    console.print("the paper's title, options and what exactly leaves a site: equipoise methods show NAME")


def _costs(name: str) -> list[str]:
    """Compute and traffic of a method beside FedAvg, as last measured."""
    from equipoise.methods import measured_costs

    measured = measured_costs().get(name, {})
    return [f"x{measured[kind]:.1f}" if kind in measured else "-" for kind in COSTS]


@methods_app.command("show")
def methods_show(name: Annotated[str, typer.Argument(help="a method's name")]) -> None:
    """Show a method: paper, options, and everything that leaves a site."""
    from equipoise.engine.disclosure import widest_sheet
    from equipoise.methods import get_method

    method = get_method(name)
    console.print(f"[bold]{name}[/]  {method.summary}", highlight=False)
    console.print(f"paper: {method.paper}", highlight=False)
    console.print(f"changes: {method.changes}", highlight=False)
    costs = ", ".join(f"{kind} {cost}" for kind, cost in zip(COSTS, _costs(name)))
    console.print(f"beside FedAvg, on the phantom: {costs}", highlight=False)
    sheet = RichTable("action", "entry", "what leaves the site", title="disclosure sheet")
    for action, entries in widest_sheet(method).items():
        for entry, text in entries.items():
            sheet.add_row(action, entry, text)
    console.print(sheet)
    if method.options.model_fields:
        options = RichTable("option", "default", "meaning", title=f"[{name}]".replace("[", r"\["))
        for key, field in method.options.model_fields.items():
            options.add_row(key, str(field.default), field.description or "")
        console.print(options)


@app.command("settings")
def settings_list(
    table: Annotated[str | None, typer.Argument(help="a table of the config, such as train or prr")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="as the page docs/settings.md")] = False,
) -> None:
    """List every key of a config, with its type, default and meaning."""
    from equipoise.cli.settings import as_markdown, as_table, notes, sections

    chosen = sections(table)
    if markdown:
        typer.echo(as_markdown(chosen), nl=False)
        return
    console.print(as_table(chosen))
    for note in notes():
        console.print(escape(note), highlight=False)


@app.command()
def presets() -> None:
    """List the presets, with their data."""
    from equipoise.contract.config import preset_names, read_raw

    for name in preset_names():
        data = read_raw(name).get("data", {}).get("name", "phantom")
        console.print(f"{name:<24} {data}", highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(__version__, highlight=False)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Federated learning for medical images."""


def main() -> None:
    """Run the command line; exit code 2 is the user's mistake, 1 is ours."""
    errors = Console(stderr=True)
    try:
        status = app(standalone_mode=False) or 0
        if status == INTERRUPTED:  # typer has caught the interrupt
            raise KeyboardInterrupt
        sys.exit(status)
    except click.ClickException as problem:
        problem.show()
        sys.exit(problem.exit_code)
    except (click.Abort, KeyboardInterrupt):
        errors.print(
            "stopped; a run goes on after its last complete round with `--resume`, a study by the same command"
        )
        sys.exit(INTERRUPTED)
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
        errors.print("[red]this is a fault of Equipoise, not yours; the lines above say where[/]")
        sys.exit(1)


if __name__ == "__main__":
    main()
