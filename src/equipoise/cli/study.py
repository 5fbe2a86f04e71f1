"""`equipoise study FILE`: run what a study lacks and write its tables; `equipoise study list` shows what there is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from equipoise.cli import completion
from equipoise.cli.options import Anyway, Device, Settings, Track
from equipoise.cli.screen import console, plain_table
from equipoise.core.errors import UserError

if TYPE_CHECKING:
    from equipoise.contract.config import Config
    from equipoise.engine.loop import Run
    from equipoise.studies.grid import Cell
    from equipoise.studies.runner import Tally
    from equipoise.studies.study_file import StudyConfig


def study(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="a study's name or TOML file; `list`: name them", autocompletion=completion.studies
        ),
    ],
    out: Annotated[Path, typer.Option(help="the study gets a folder of its name in here")] = Path("studies"),
    device: Device = None,
    together: Annotated[int, typer.Option(min=1, help="runs that share the device in this process")] = 1,
    workers: Annotated[int | None, typer.Option(min=1, help="worker processes of each run on a CPU")] = None,
    devices: Annotated[
        str | None, typer.Option(help="a process for each: cuda:0,cuda:1, or cpu:4; the longest runs start first")
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="slurm: run jobs on a cluster; local: run jobs on this machine")
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(help="TOML file with the jobs' number and settings, such as slurm_partition")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="rows to run, comma separated; repeatable")] = None,
    seeds: Annotated[str | None, typer.Option(help="seeds to run instead of the file's, comma separated")] = None,
    full: Annotated[bool, typer.Option("--full", help="the full grid, with the file's later rows and seeds")] = False,
    limit_seconds: Annotated[
        float | None, typer.Option(min=0, help="stop in time, after a saved round; call again to go on")
    ] = None,
    settings: Settings = None,
    plan: Annotated[bool, typer.Option("--plan", help="show the rows and their seeds, run nothing")] = False,
    keep: Annotated[bool, typer.Option("--keep-checkpoints", help="also of finished runs")] = False,
    report_only: Annotated[bool, typer.Option("--report-only", help="run nothing, write anew")] = False,
    anyway: Anyway = False,
    track: Track = None,
) -> None:
    """Example: equipoise study phantom-all --plan

    Run the grid of a study, go on where it stopped, and write its tables, statistics and report.
    """
    if source == "list":
        list_studies()
        return
    from equipoise.cli.study_tables import print_plan
    from equipoise.engine.runs import refuse_twice
    from equipoise.studies.checks import Checks, check_common_sets, refuse_idle_rows
    from equipoise.studies.grid import grid
    from equipoise.studies.runner import Tally
    from equipoise.studies.study_file import load_study

    config = load_study(source)
    folder = out / config.name
    outcome = Tally()
    if report_only:
        _refuse_idle(
            only=only, seeds=seeds, full=full, set=settings, limit_seconds=limit_seconds, plan=plan, track=track
        )
    else:
        if limit_seconds is not None and not math.isfinite(limit_seconds):
            raise UserError(f"--limit-seconds {limit_seconds}: expected a number of seconds")
        refuse_twice(settings or [], {"compute": {"device": device, "workers": workers}})
        over = [f"compute.device={device}"] if device else []
        over += [f"compute.workers={workers}"] if workers else []
        cells = grid(config, folder, _rows(config, only), _numbers(seeds), full)
        if plan:
            whole = grid(config, folder, _rows(config, only), full=True) if seeds is None else ()
            everything = [*cells, *(cell for cell in whole if cell not in cells)]
            planned = _planned(config, everything, [*over, *(settings or [])])
            print_plan(console, planned[: len(cells)], planned[len(cells) :])
            return
        if not cells:
            raise UserError("no run is chosen: these rows are kept for the full grid; add --full, or --seeds")
        planned = _planned(config, cells, [*over, *(settings or [])])
        if not (anyway or config.anyway):
            refuse_idle_rows(planned)
        if config.scope == "common":
            check_common_sets(config, planned)
        check = Checks(config, folder)
        if on:
            _refuse_beside("--on", devices=devices, together=together - 1, limit_seconds=limit_seconds, track=track)
            outcome = _run_on_cluster(planned, on, folder, cluster, keep, check)
        elif devices:
            _refuse_beside("--devices", device=device, together=together - 1, limit_seconds=limit_seconds, track=track)
            outcome = _run_on_devices(planned, folder, devices, keep, check)
        else:
            outcome = _run(planned, folder, together, limit_seconds, keep, track or [], check)
    _conclude(config, folder, outcome, report_only)


def _run(
    planned: Sequence[tuple[Cell, Config]],
    folder: Path,
    together: int,
    limit_seconds: float | None,
    keep: bool,
    track: Sequence[str],
    check: Callable[[Run], None],
) -> Tally:
    """Run the grid under the eyes of the display and of the trackers."""
    from equipoise.api.grid_progress import GridProgress
    from equipoise.engine.runs import choose_device
    from equipoise.engine.tracking import check_trackers
    from equipoise.studies.runner import run_grid
    from equipoise.studies.tracked import TrackedGrid

    names = check_trackers(track)
    for name in {config.compute.device for _, config in planned}:
        choose_device(name)
    _refuse_tables_of_other_runs(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with GridProgress(console, planned) as display, TrackedGrid(display, names) as tracked:
        return run_grid(planned, tracked, together, limit_seconds, keep, check)


def _refuse_beside(option: str, **others: object) -> None:
    """Options that say in another way where runs are, or how long."""
    for name, value in others.items():
        if value:
            raise UserError(f"{option} and --{name.replace('_', '-')} do not go together; leave one out")


def _run_on_devices(
    planned: Sequence[tuple[Cell, Config]], folder: Path, devices: str, keep: bool, check: Callable[[Run], None]
) -> Tally:
    """Run the grid in a process for each device."""
    from equipoise.api.grid_progress import GridProgress
    from equipoise.core.device_names import devices_of
    from equipoise.engine.runs import choose_device
    from equipoise.studies.devices import run_on_devices

    names = devices_of(devices)
    for name in names:
        choose_device(name)
    _refuse_tables_of_other_runs(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with GridProgress(console, planned) as display:
        return run_on_devices(planned, display, names, keep, check)


def _run_on_cluster(
    planned: Sequence[tuple[Cell, Config]],
    on: str,
    folder: Path,
    cluster: Path | None,
    keep: bool,
    check: Callable[[Run], None],
) -> Tally:
    """Run the grid as jobs, and wait for them."""
    from equipoise.studies.devices import CLUSTERS, JOBS, cluster_settings, run_on_cluster

    if on not in CLUSTERS:
        raise UserError(f"--on {on}: choose one of {', '.join(CLUSTERS)}")
    settings = cluster_settings(cluster)
    _refuse_tables_of_other_runs(folder)
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"jobs on {on}; their logs lie in {escape(str(folder / JOBS))}", highlight=False, soft_wrap=True)
    return run_on_cluster(planned, on, folder, settings, keep, check)


def _conclude(config: StudyConfig, folder: Path, outcome: Tally, report_only: bool) -> None:
    """Write and show what there is, and say what came of the runs."""
    from equipoise.cli.study_tables import print_tables
    from equipoise.engine.payload_files import claimed_folder
    from equipoise.studies.grid import listed
    from equipoise.studies.results import collect
    from equipoise.studies.study_files import write_study

    with claimed_folder(folder, wait=True) if folder.is_dir() else nullcontext():
        results = collect(config, folder)
        if results.runs:  # otherwise keep existing tables, whose runs lie elsewhere
            write_study(results, folder)
    if results.runs:
        print_tables(console, results)
    elif report_only:
        raise UserError(f"{folder} holds no finished run of {config.name}: nothing was written")
    if outcome.stopped:
        console.print(f"{_runs(outcome.stopped)} not finished: the same command goes on", highlight=False)
    elif report_only and results.unfinished:
        named = escape(listed(results.unfinished))
        console.print(f"{_runs(results.unfinished)} not finished: {named}", highlight=False)
    finished = {run.cell.label for run in results.runs}
    if busy := [label for label in outcome.busy if label not in finished]:
        console.print(f"{_runs(busy)} left to another process", highlight=False)
    if results.strangers:
        named = escape(listed(results.strangers))
        console.print(f"{_runs(results.strangers)} of no row of the study, and left aside: {named}", highlight=False)
    if results.runs:
        console.print(f"report: {escape(str(folder / 'report.html'))}", highlight=False, soft_wrap=True)
    outcome.failed = {**results.damaged, **outcome.failed}
    outcome.complain()


def _runs(labels: Sequence[str]) -> str:
    return "1 run is" if len(labels) == 1 else f"{len(labels)} runs are"


def _refuse_idle(**options: object) -> None:
    """Options that choose what to run have no effect with --report-only."""
    for name, value in options.items():
        if value:
            raise UserError(f"--report-only runs nothing, so --{name.replace('_', '-')} has no effect; leave one out")


def _planned(config: StudyConfig, cells: Sequence[Cell], settings: Sequence[str]) -> list[tuple[Cell, Config]]:
    """The runs with their configs; settings of the command line must concern some row, and not what rows decide."""
    from equipoise.data import sources
    from equipoise.methods import method_names
    from equipoise.studies.grid import cell_config
    from equipoise.studies.study_file import DECIDED

    methods = {cell.row.method for cell in cells}
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key in DECIDED:
            raise UserError(f"--set {setting}: the {key} of a run is its row's and seed's; see --only and --seeds")
        table = key.partition(".")[0]
        if table in method_names() and table not in methods:
            raise UserError(f"--set {setting}: no row that is run has the method {table}")
    planned = [(cell, cell_config(config, cell, settings)) for cell in cells]
    for name in {run.data.name for _, run in planned}:
        sources.load(name)  # refuses an unknown one before anything is trained
    return planned


def _refuse_tables_of_other_runs(folder: Path) -> None:
    """Never replace tables of runs that are elsewhere, which could not be made again from here."""
    try:
        runs = sum(len(row["seeds"]) for row in json.loads((folder / "summary.json").read_bytes())["rows"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if runs and not (folder / "runs").exists():
        raise UserError(
            f"{folder} holds tables of {runs} runs that are not there, and would be replaced: choose another --out, or "
            "delete its summary.json"
        )


def _rows(config: StudyConfig, asked: Sequence[str] | None) -> list[str] | None:
    """The requested names of rows, one by one or between commas. A name may contain commas."""
    known = {row.name for row in config.rows}
    parts = [[text] if text in known else text.split(",") for text in asked or ()]
    return [name.strip() for part in parts for name in part] or None


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds {text!r}: expected numbers, for example 1,2,3") from None
    from equipoise.studies.study_file import check_different

    try:
        check_different(numbers, "--seeds")
    except ValueError as problem:
        raise UserError(str(problem)) from None
    return numbers


def list_studies() -> None:
    """Name the studies that come with the package, with their runs: those of the first wave, and all."""
    from equipoise.studies.grid import grid
    from equipoise.studies.study_file import load_study, study_names

    rows = []
    for name in study_names():
        found = load_study(name)
        first, everything = (len(grid(found, Path(), full=full)) for full in (False, True))
        rows.append((name, found.title, len(found.rows), first, everything))
    console.print(plain_table(("study", "what it is", "rows", "runs", "in full"), rows))
