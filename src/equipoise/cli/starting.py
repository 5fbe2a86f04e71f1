"""`equipoise init`: a config with every key, its meaning and its default, ready to be changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from equipoise.cli.screen import say
from equipoise.core.errors import UserError
from equipoise.core.storage import write_text


def init(
    file: Annotated[Path, typer.Argument(help="the new config")] = Path("equipoise.toml"),
    method: Annotated[str, typer.Option(help="see `equipoise methods`")] = "fedavg",
    data: Annotated[str, typer.Option(help="a source, folder:DIR or manifest:FILE")] = "phantom",
) -> None:
    """Example: equipoise init mine.toml --method prr --data folder:images

    Write a config with comments, in which all keys stand at their defaults.
    """
    from equipoise.core.definitions import modules_in
    from equipoise.core.suggestions import unknown

    if file.exists():
        raise UserError(f"{file} exists; delete it, or name another file")
    if method not in modules_in("methods"):
        raise unknown("method", method, modules_in("methods"))
    write_text(file, "\n".join(_lines(method, data)) + "\n")
    say(f"{file}: take the # from a line to change it, then: equipoise run {file}")


def _lines(method: str, data: str) -> Iterator[str]:
    """The config, table by table; keys without # are those that the command was given."""
    from equipoise.cli.settings import NOT_SET, sections
    from equipoise.core.definitions import modules_in

    chosen = {"method": method, "data.name": data}
    others = set(modules_in("methods")) - {method}
    for section in (section for section in sections() if section.name.partition(".")[0] not in others):
        yield f"# {section.about}" if not section.name else f"\n# {section.about}\n[{section.name}]"
        for key in section.keys:
            name = key.path.rpartition(".")[2]
            comment = f"  # {key.meaning} ({key.kind})"
            if key.path in chosen:
                yield f'{name} = "{chosen[key.path]}"{comment}'
            else:
                yield f"# {name} = {'' if key.default == NOT_SET else key.default}{comment}"
