"""Commands that list what there is. They read names and first lines from source files, so that they answer at once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from equipoise.cli import completion
from equipoise.cli.screen import ExampleGroup, console, first_sentence, plain_table
from equipoise.core.definitions import PACKAGE, arguments, class_constant, constant, modules_in, summary
from equipoise.core.errors import UserError
from equipoise.core.plugins import announced

#: what a method costs beside FedAvg: a round's computing and traffic, and an evaluation with its adaptation
COSTS = ("compute", "traffic", "evaluation")
#: where runs lie that were not told where to lie
RUNS = Path("runs")

methods_app = typer.Typer(
    cls=ExampleGroup,
    help="Example: equipoise methods show prr\n\nList the methods, or show one with its disclosure sheet.",
)


@methods_app.callback(invoke_without_command=True)
def methods_list(context: typer.Context) -> None:
    """Example: equipoise methods

    List the methods, or show one with its disclosure sheet.
    """
    if context.invoked_subcommand is not None:
        return
    rows = []
    for name, path in modules_in("methods").items():
        method = arguments(path, "METHOD")
        paper = f"{method['paper'].split(',')[0]} {method['year']}" if method["year"] else "none"
        rows.append((name, paper, method["changes"], *_costs(name)))
    console.print(plain_table(("method", "paper", "what it changes", "compute", "traffic", "eval."), rows))
    console.print("compute, traffic, evaluation: beside FedAvg, measured on the phantom")
    print_announced("method")
    console.print("options, and all that leaves a site: equipoise methods show NAME")


def _costs(name: str) -> list[str]:
    """Compute, traffic and evaluation of a method beside FedAvg, as last measured."""
    costs = PACKAGE / "methods" / "costs.json"
    measured = json.loads(costs.read_text()).get(name, {}) if costs.exists() else {}
    return [f"x{measured[kind]:.1f}" if kind in measured else "-" for kind in COSTS]


@methods_app.command("show")
def methods_show(
    name: Annotated[
        str,
        typer.Argument(help="a method, or a composition: fedbn+margins", autocompletion=completion.methods),
    ],
) -> None:
    """Example: equipoise methods show fedavg

    Show a method: its paper, its options, and everything that leaves a site.

    Of a composition such as fedbn+margins+npr, show what leaves a site with the default options.
    """
    from equipoise.contract.disclosed import below_the_limit
    from equipoise.engine.disclosure import run_sheet, widest_sheet
    from equipoise.engine.runs import make_config
    from equipoise.methods import get_method

    method, config = get_method(name), make_config(method=name)
    console.print(f"[bold]{name}[/]  {method.summary}", highlight=False)
    console.print(f"paper: {method.paper}", highlight=False)
    console.print(f"changes: {method.changes}", highlight=False)
    costs = ", ".join(f"{kind} {cost}" for kind, cost in zip(COSTS, _costs(name)))
    console.print(f"beside FedAvg, on the phantom: {costs}", highlight=False)
    sheet = Table("action", "entry", "what leaves the site", "below privacy.least", title="disclosure sheet")
    leaves = run_sheet(method, method.client_class(config)) if config.components else widest_sheet(method)
    for action, entries in leaves.items():
        for entry, text in entries.items():
            sheet.add_row(action, entry, text, below_the_limit(text))
    console.print(sheet)
    console.print(f"[bold]with privacy.secure_sums = true[/] {_with_sums(name)}", highlight=False)
    if method.options.model_fields:
        options = Table("option", "default", "meaning", title=f"[{name}]".replace("[", r"\["))
        for key, field in method.options.model_fields.items():
            options.add_row(key, str(field.default), field.description or "")
        console.print(options)


def _with_sums(name: str) -> str:
    """What the server still sees of a method with secure sums, or why it refuses them."""
    from equipoise.contract.summed import WORDS, summing_of
    from equipoise.engine.runs import make_config
    from equipoise.methods import get_method

    try:
        config = make_config(None, ["privacy.secure_sums=true"], method=name)
    except UserError as problem:
        return f"the method is refused: {problem}"
    told = []
    for action, entries in get_method(name).client_class(config).discloses.items():
        for entry, text in entries.items():
            summing = summing_of(text)
            assert summing is not None
            told.append(f"{WORDS[summing.kind]} of '{entry}' ({action})")
    seen = ["the sum over sites of the counts of evaluations", *told]
    return f"the server sees, besides each site's description: {'; '.join(seen)}"


def settings_list(
    table: Annotated[str | None, typer.Argument(help="a table or key of the config: train, prr, train.epochs")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="as the page docs/settings.md")] = False,
) -> None:
    """Example: equipoise settings train.optimiser

    List every key of a config, with its type, default and meaning.
    """
    from equipoise.cli.settings import as_lines, as_markdown, notes, sections

    chosen = sections(table)
    if markdown:
        typer.echo(as_markdown(chosen), nl=False)
        return
    for line in as_lines(chosen):
        console.print(line)
    for note in notes(chosen):
        console.print(escape(note), highlight=False)


def print_announced(kind: str) -> None:
    """What installed packages add to a list, with where it comes from; and how a file is named."""
    rows = announced(kind)
    if rows:
        console.print(plain_table((f"from packages: {kind}", "from", "what it does"), rows))


def nets() -> None:
    """Example: equipoise nets

    List the nets; any other comes by name as well.
    """
    rows = [(name, summary(path).rstrip(".")) for name, path in modules_in("nets/architectures").items()]
    console.print(plain_table(("net", "what it is"), rows))
    print_announced("net")
    console.print("others: --net monai:NAME, hf:NAME_OR_FOLDER, my_net.py, package.module:NAME", highlight=False)


def losses() -> None:
    """Example: equipoise losses

    List the supervised losses that train.loss names.
    """
    rows = [("ce", "Cross entropy")]
    for path in modules_in("components").values():
        name = class_constant(path, "loss_name")
        rows += [(name, first_sentence(summary(path)))] if name else []
    console.print(plain_table(("loss", "what it is"), rows))
    print_announced("loss")
    console.print("your own: --set train.loss=my_loss.py:NAME, a function of logits and labels", highlight=False)


def metrics() -> None:
    """Example: equipoise metrics

    List the metrics, and which of them may choose the reported round.
    """
    from equipoise.metrics import METRICS

    rows = [(metric.name, metric.title, "yes" if metric.chooses else "") for metric in METRICS]
    console.print(plain_table(("metric", "title", "chooses rounds"), rows))
    print_announced("metric")
    console.print("your own: --set evaluation.metric=my_metric.py:NAME, a function of a Tally", highlight=False)


def presets() -> None:
    """Example: equipoise presets

    List the presets, with their data.
    """
    known = modules_in("data/sources")
    rows = []
    for name, path in completion.tables("contract/presets").items():
        data = tomllib.loads(path.read_text(encoding="utf-8")).get("data", {}).get("name", "phantom")
        rows.append((name, data, "" if data in known else "this source is not built in yet"))
    console.print(plain_table(("preset", "data", ""), rows))


def sources() -> None:
    """Example: equipoise data list

    List the sources of data.
    """
    rows = [(name, constant(path, "TITLE")) for name, path in modules_in("data/sources").items()]
    console.print(plain_table(("source", "what it is"), rows))
    print_announced("source")
    console.print("your own: --data folder:DIR, manifest:FILE, my_source.py, package.module", highlight=False)


def runs(folder: Annotated[Path, typer.Argument(help="the folder with the runs' folders")] = RUNS) -> None:
    """Example: equipoise runs

    List the runs in a folder: what was run, how far it came, and its score.
    """
    from equipoise.engine.events import events_in

    if not folder.is_dir() and folder != RUNS:
        raise UserError(f"{folder} is no folder; name the folder that holds the runs' folders")
    found = sorted(path.parent for path in folder.rglob("events.jsonl"))
    rows = []
    for run in found:
        events = list(events_in((run / "events.jsonl").read_bytes()))
        start = next((event for event in events if event["event"] == "start"), {})
        if "config" not in start:  # what a hospital keeps of a run has none
            continue
        rounds = [event["round"] for event in events if event["event"] == "round"]
        done = max(rounds, default=0)
        state = "finished" if events[-1]["event"] == "end" else "stopped"
        scores = [e["metrics"].get("balanced_accuracy") for e in events if e["event"] == "final"
                  and e["scope"] == "mean" and e["view"] != "trained"]  # fmt: skip
        score = f"{max(scores):.1%}" if scores and None not in scores else "-"
        data = start["config"]["data"]["name"]
        rows.append((run.relative_to(folder), start["method"], data, f"{state} {done}", score))
    if not rows:
        console.print(f"{folder} holds no run; `equipoise run` writes one", highlight=False)
        return
    console.print(plain_table(("run", "method", "data", "rounds", "bal. acc."), rows))
