"""The commands of a deployment: `equipoise server | site | certificates | renew | pilot`. They need Flower."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from equipoise.cli.options import (
    Anyway,
    BatchSize,
    Columns,
    Components,
    Data,
    Epochs,
    File,
    Layout,
    Method,
    Net,
    Rate,
    Root,
    Rounds,
    Seed,
    Settings,
    data_table,
    given,
    run_tables,
)
from equipoise.cli.screen import console
from equipoise.cli.screen import say as _say
from equipoise.core.errors import UserError, install

KeepUpdates = Annotated[
    bool, typer.Option("--keep-updates", help="keep every site's replies in the run's folder, under journal/")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="no TLS, keys and signatures; on 127.0.0.1 only")]


GO_ON = "the same command with --resume goes on after the last complete round"
COME_BACK = "the same command lets this site take part again, and in the same run where it left off"


def _prepare() -> None:
    """Check that Flower is installed; its processes end with this one, and its files stay private."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError(f"this command needs Flower: {install('flower')}") from None
    from equipoise.hospitals.processes import spare_loopback_the_proxy

    spare_loopback_the_proxy()
    os.umask(0o077)


def _refuse_windows() -> None:
    """Say that processes cannot be run here: they are stopped by signals that only POSIX has."""
    if sys.platform == "win32":
        raise UserError(
            "server, site and pilot stop their processes by signals, which Windows lacks; run them on Linux, in WSL "
            "or in the container"
        )


def _tell_stop(text: str) -> None:
    """One line for the user who stopped a command, and for the log of a service."""
    Console(stderr=True).print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _config(source: str | None, settings: list[str] | None, anyway: bool, **top: Any) -> Any:
    from equipoise.engine.runs import make_config, refuse_idle_options, refuse_idle_parts, refuse_twice

    refuse_twice(settings or [], top)
    config = make_config(source, settings or [], **top)
    refuse_idle_options(settings or [], config.method, config.components)
    if not anyway:
        refuse_idle_parts(config)
    return config


def _named(config: Any) -> Any:
    """The config of a run whose data lies at sites; it uses the phantom only if the user names it."""
    if "name" in config.data.model_fields_set:
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"name": "hospitals"})})


def server(
    file: Annotated[Path, typer.Argument(metavar="SERVER.toml", help="addresses, sites and keys")],
    source: File = None,
    method: Method = None,
    with_: Components = None,
    rounds: Rounds = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    net: Net = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="the run's folder; default runs/<name>")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last complete round")] = False,
    anyway: Anyway = False,
    keep_updates: KeepUpdates = False,
    insecure: Insecure = False,
) -> None:
    """Example: equipoise server server.toml prr-dermoscopy

    Run a config with the hospitals that a file names, and write the report.
    """
    _refuse_windows()
    _prepare()
    from equipoise.engine.payload_files import refuse_foreign
    from equipoise.hospitals.coordinator import check_config, running_superlink
    from equipoise.hospitals.deployment_files import ServerFile
    from equipoise.hospitals.stops import stops_told

    known = ServerFile.read(file)
    tables = run_tables(method, with_, seed, rounds, epochs, batch_size, lr, net=given(name=net))
    config = _named(_config(source, settings, anyway or resume, **tables))
    check_config(config, known)
    folder = out or Path("runs") / config.run_name
    refuse_foreign(folder)
    with stops_told(_tell_stop, GO_ON), running_superlink(known, insecure) as superlink:
        _say(f"SuperLink at {superlink.public.url}; waiting for {', '.join(known.sites)}")
        _conduct(config, known, folder, superlink, resume, keep_updates)
    _report(folder)


def _conduct(
    config: Any,
    known: Any,
    folder: Path,
    superlink: Any,
    resume: bool,
    keep_updates: bool,
    while_waiting: Callable[[], None] = lambda: None,
) -> None:
    from equipoise.api.progress import ProgressDisplay
    from equipoise.hospitals.coordinator import conduct

    class Display(ProgressDisplay):
        def _on_connected(self, fields: dict[str, Any]) -> None:
            waiting = f"; waiting for {', '.join(fields['missing'])}" if fields["missing"] else ""
            _say(f"connected: {', '.join(fields['sites']) or 'nobody'}{waiting}")

    with Display(console, config.train.rounds, config.evaluation.metric, config.run_name) as display:
        conduct(config, known, folder, superlink, resume, [display], while_waiting, keep_updates)


def _report(folder: Path) -> None:
    from equipoise.report import write_report

    _say(f"report: {write_report([folder])}")


def site(
    file: Annotated[Path, typer.Argument(metavar="SITE.toml", help="name, data, keys and policy of this hospital")],
    check: Annotated[bool, typer.Option("--check", help="check data, keys and connection, and end")] = False,
    wait: Annotated[float, typer.Option(min=0, help="seconds to wait for the server")] = 0.0,
    insecure: Insecure = False,
    watched: Annotated[bool, typer.Option("--watch", help="also a local page of all messages")] = False,
) -> None:
    """Example: equipoise site site.toml

    Let a hospital take part: check its data and the connection, then answer the server until stopped.
    """
    _refuse_windows()
    _prepare()
    from equipoise.hospitals.deployment_files import SiteFile
    from equipoise.hospitals.descriptions import describe
    from equipoise.hospitals.site import check_admission, check_connection, check_site, serve
    from equipoise.hospitals.stops import stops_told

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    known = SiteFile.read(file)
    federation = check_site(known, insecure)
    told = describe(known.name, federation)
    numbers = ", ".join(f"{sum(counts)} {part}" for part, counts in told["counts"].items())
    _say(f"{known.name}: {numbers} images, {len(told['classes'])} classes")
    for action, entries in known.policy.items():
        _say(f"  may leave in '{action}': {', '.join(entries)}")
    check_connection(known, insecure, wait)
    _say(f"the SuperLink at {known.superlink} answers")
    if check:
        if not insecure:
            check_admission(known)
        _say("its name is checked when a run starts" if insecure else "and lets this site in")
    else:
        with stops_told(_tell_stop, COME_BACK), _watched(known.state) if watched else nullcontext():
            serve(known, insecure, federation)


@contextmanager
def _watched(state: Path) -> Iterator[None]:
    """A page of the site's messages, in a separate process: an error in the page does not reach the site."""
    from equipoise.hospitals.ledger import Ledger

    Ledger(state)
    page = subprocess.Popen([sys.executable, "-m", "equipoise", "watch", str(state)])
    try:
        yield
    finally:
        page.terminate()
        page.wait()


def certificates(
    out: Annotated[Path, typer.Argument(help="a new folder")],
    sites: Annotated[list[str], typer.Option("--site", help="a site's name; repeat for each")],
    hosts: Annotated[list[str], typer.Option("--host", help="name or address by which sites reach the server")],
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8443,
    days: Annotated[int, typer.Option(min=1, max=36500, help="how long certificates are valid")] = 365,
) -> None:
    """Example: equipoise certificates keys --site A --site B --host server.example.org

    Make a small CA, the server's certificate, the coordinator's key and a key for every site.
    """
    _prepare()
    from equipoise.hospitals.pilot import make_certificates

    server_file, files = make_certificates(out, f"0.0.0.0:{port}", hosts, sites, days)
    _say(f"server: {server_file.parent}")
    for name, path in files.items():
        _say(f"{name}: {path.parent}  (add data and policy to {path.name})")
    _say(f"keep {out / 'ca.key'} offline")


def renew(
    file: Annotated[Path, typer.Argument(metavar="SERVER.toml|SITE.toml", help="whose key or certificate it is")],
    what: Annotated[str, typer.Argument(help="server: ca, certificate or coordinator; site: key")],
    authority: Annotated[Path | None, typer.Option(help="the CA's key, ca.key; for ca and certificate")] = None,
    days: Annotated[int, typer.Option(min=1, max=36500, help="how long a new certificate is valid")] = 365,
) -> None:
    """Example: equipoise renew site.toml key

    Make a new key or certificate in place of an old one, and say who needs it.
    """
    _prepare()
    from equipoise.hospitals.renewal import renew as renewed

    for line in renewed(file, what, authority, days):
        _say(line)


def pilot(
    source: File = None,
    sites: Annotated[int | None, typer.Option(min=1, help="how many, for the phantom and drawn partitions")] = None,
    method: Method = None,
    with_: Components = None,
    data: Data = None,
    root: Root = None,
    layout: Layout = None,
    column: Columns = None,
    rounds: Rounds = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    lr: Rate = None,
    net: Net = None,
    seed: Seed = None,
    out: Annotated[Path, typer.Option(help="the run's folder")] = Path("pilot"),
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on after the last complete round")] = False,
    anyway: Anyway = False,
    keep_updates: KeepUpdates = False,
    insecure: Insecure = False,
) -> None:
    """Example: equipoise pilot --method fedavg --rounds 2

    Rehearse a deployment on this machine: SuperLink and sites as processes, with TLS, ending in the report.
    """
    _refuse_windows()
    _prepare()
    from equipoise.engine.payload_files import refuse_foreign
    from equipoise.hospitals.coordinator import running_superlink
    from equipoise.hospitals.deployment_files import ServerFile
    from equipoise.hospitals.pilot import check_running, files_of, lay_out, running_sites
    from equipoise.hospitals.stops import stops_told

    refuse_foreign(out)
    known_files = (out / "pilot").exists()
    if known_files and not resume:
        raise UserError(f"{out} already holds a pilot; use --resume to go on, or another --out")
    tables = run_tables(method, with_, seed, rounds, epochs, batch_size, lr, net=given(name=net))
    places = data_table(data, root, layout, column)
    config = _config(source, settings, anyway or resume, data=places, **tables)
    if sites is not None:
        number = {"phantom": {"sites": sites}} if config.data.name == "phantom" else {"sites": sites}
        config = _config(source, settings, True, data=(places or {}) | number, **tables)
    server_file, files = files_of(out / "pilot") if known_files else lay_out(out / "pilot", config)
    known = ServerFile.read(server_file)
    with (
        stops_told(_tell_stop, GO_ON),
        running_superlink(known, insecure) as superlink,
        running_sites(files, insecure) as children,
    ):
        _say(f"SuperLink at {superlink.public.url}; {len(files)} sites start")
        _conduct(config, known, out, superlink, resume, keep_updates, lambda: check_running(children))
    _report(out)


def mount(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (server, site, certificates, renew, pilot):
        app.command()(command)
