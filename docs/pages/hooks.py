"""What `make docs` adds to docs/: the pages at the repository's root, the notebooks, the API, and cards.

Each method and component has a card. Links between files of the repository become links between pages.
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
#: {file at the repository's root: its page}
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
#: what terminals take for colours
COLOURS = re.compile("\x1b\\[[0-9;]*m")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:|data:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file in docs/."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(File.generated(config, f"examples/{notebook.stem}.md", content=executed(notebook)))
    files.append(File.generated(config, "api.md", content=api()))
    for page, text in cards():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages; other files are named, not linked."""
    own = page.file.src_uri
    home = next((ROOT / name for name, title in ROOT_PAGES.items() if title == own), ROOT / "docs" / own).parent

    def turned(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        path = Path(os.path.normpath(home / target))
        if not path.exists():
            return link[0]  # a page that is made here, or a dead link, which mkdocs names
        place = path.relative_to(ROOT).as_posix()
        found = ROOT_PAGES.get(place, place.removeprefix("docs/"))
        if files.get_file_from_path(found):
            return f"{picture}[{text}]({os.path.relpath(found, Path(own).parent)}{anchor or ''})"
        address = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["equipoise"][
            "repository"
        ]
        return f"[{text}]({address}/blob/main/{place})" if address else text

    return LINK.sub(turned, markdown)


def executed(notebook: Path) -> str:
    """A notebook as Markdown, with what its cells print now."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import MarkdownExporter

    read = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as scratch:
        NotebookClient(read, resources={"metadata": {"path": scratch}}).execute()
    text, resources = MarkdownExporter(exclude_output_prompt=True).from_notebook_node(read)
    for name, picture in resources["outputs"].items():
        text = text.replace(f"({name})", f"(data:image/png;base64,{base64.b64encode(picture).decode()})")
    return COLOURS.sub("", text)


def api() -> str:
    """The public names of the package, from their docstrings."""
    import equipoise

    names = [name for name in equipoise.__all__ if not name.startswith("_")]
    parts = [f"::: equipoise.{name}\n    options: {{ heading_level: 2 }}" for name in names]
    return "\n\n".join(["# Python", "All names that `import equipoise` offers.", *parts])


def cards() -> Iterator[tuple[str, str]]:
    """A page for each method and each component, and two pages that list them."""
    from equipoise.components import component_names
    from equipoise.methods import method_names

    for folder, title, names, card in (
        ("methods", "Every method", method_names(), method_card),
        ("components", "Every component", component_names(), component_card),
    ):
        pages = {name: card(name) for name in names}
        lines = [f"- [{name}]({name}.md): {first_sentence(text)}" for name, text in pages.items()]
        yield f"cards/{folder}/index.md", "\n".join([f"# {title}", "", *lines])
        for name, text in pages.items():
            yield f"cards/{folder}/{name}.md", text


def first_sentence(text: str) -> str:
    """The first sentence below a card's heading."""
    return re.split(r"(?<!Eq)(?<!Eqs)\. ", text.split("\n")[2])[0].rstrip(".")


def method_card(name: str) -> str:
    """What a method is, its options, and all that leaves a site."""
    from equipoise.engine.disclosure import widest_sheet
    from equipoise.methods import get_method

    method = get_method(name)
    leaves = [(action, entry, text) for action, found in widest_sheet(method).items() for entry, text in found.items()]
    return card(name, method.summary, {"Paper": method.paper, "Changes": method.changes}, leaves, method.options)


def component_card(name: str) -> str:
    """What a component is, its seat and words, its options, and what leaves a site because of it."""
    from equipoise.components import describe, get_component
    from equipoise.contract.component import variations
    from equipoise.contract.words import SEATS, WORDS

    kind = get_component(name)
    usual = kind()
    facts = {
        "Paper": kind.paper,
        "Seat": ", ".join(SEATS[seat] for seat in sorted(usual.holds())),
        "Stays at the sites": ", ".join(kind.stays),
        "Needs": "; ".join(WORDS.get(word, word) for word in sorted(usual.needs())),
        "Takes away": "; ".join(WORDS.get(word, word) for word in sorted(usual.lacks())),
    }
    sheets = [component.discloses() for component in variations(kind)]
    leaves = dict.fromkeys(
        (action, entry, text) for sheet in sheets for action, found in sheet.items() for entry, text in found.items()
    )
    return card(name, describe(name), facts, list(leaves), kind)


def card(name: str, summary: str, facts: dict[str, str], leaves: list[tuple[str, str, str]], options: Any) -> str:
    """A page in Markdown."""
    lines = [f"# {name}", "", summary, "", *(f"- {fact}: {text}" for fact, text in facts.items() if text), ""]
    lines += ["## What leaves a site", ""]
    lines += table(("action", "entry", "what it is"), leaves) if leaves else ["Nothing more."]
    rows = [
        (f"`{key}`", f"`{field.get_default(call_default_factory=True)}`", field.description or "")
        for key, field in options.model_fields.items()
    ]
    return "\n".join(
        [*lines, *(["", "## Options", "", *table(("option", "default", "meaning"), rows)] if rows else [])]
    )


def table(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table in Markdown."""
    cells = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return [f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}", *(f"| {row} |" for row in cells)]
