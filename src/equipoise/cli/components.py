"""Commands about components: `equipoise components` and `equipoise components show NAME`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from equipoise.cli import completion
from equipoise.cli.completion import BASES
from equipoise.cli.listing import print_announced
from equipoise.cli.screen import ExampleGroup, console, first_sentence, plain_table
from equipoise.core.definitions import modules_in, summary

components_app = typer.Typer(
    cls=ExampleGroup,
    help="Example: equipoise components show margins\n\nThe ideas that go on any method: list them, or show one.",
)


@components_app.callback(invoke_without_command=True)
def components(context: typer.Context) -> None:
    """Example: equipoise components

    The ideas that go on any method: list them, or show one with what it needs.
    """
    if context.invoked_subcommand:
        return
    found = {name: summary(path) for name, path in modules_in("components").items() if name not in BASES}
    console.print(
        plain_table(("component", "what it does"), [(name, first_sentence(text)) for name, text in found.items()])
    )
    print_announced("component")
    console.print("on a method: equipoise run --method fedbn --with margins,npr", highlight=False)


@components_app.command()
def show(
    name: Annotated[str, typer.Argument(help="a component, such as margins", autocompletion=completion.components)],
) -> None:
    """Example: equipoise components show margins

    Show a component: its seat, its needs, what it takes away, what leaves a site, its options, its paper.
    """
    from equipoise.cli.settings import kind_in_words
    from equipoise.components import describe, get_component
    from equipoise.contract.component import variations
    from equipoise.contract.composed import Names
    from equipoise.contract.words import SEATS, WORDS

    kind = get_component(name)
    usual = kind()
    told = describe(name)
    console.print(f"[bold]{escape(name)}[/]  {escape(told)}", highlight=False)
    facts = {
        "paper": kind.paper,
        "seat": ", ".join(SEATS[seat] for seat in sorted(usual.holds())) or "none: it stands beside others",
        "stays at the sites": ", ".join(kind.stays),
        "needs": "; ".join(WORDS.get(word, word) for word in sorted(usual.needs())),
        "gives": ", ".join(sorted(usual.gives())),
        "takes away": "; ".join(WORDS.get(word, word) for word in sorted(usual.lacks())),
    }
    for fact, text in facts.items():
        if text:
            console.print(f"  {fact}: {escape(text)}", highlight=False)
    names, seen = Names((), {}), set()
    for component in variations(kind):
        for action, entries in component.discloses().items():
            for entry, text in entries.items():
                joins = action in ("train", "epoch")
                where = f"{action}: {names(component, entry)}" if joins else f"{names(component, action)}: {entry}"
                if where not in seen:
                    seen.add(where)
                    console.print(f"  leaves a site in {escape(where)}: {escape(text)}", highlight=False)
    if not seen:
        console.print("  leaves a site: nothing more than the method sends")
    for key, field in kind.model_fields.items():
        words = kind_in_words(field.annotation, field.metadata)
        default = field.get_default(call_default_factory=True)
        console.print(
            f"  {escape(name)}.{key} = {escape(str(default))}  ({escape(words)}): {escape(field.description or '')}",
            highlight=False,
        )
