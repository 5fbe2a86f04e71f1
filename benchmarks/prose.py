"""Long sentences and odd turns of phrase in README, docs and src: `python benchmarks/prose.py`, a part of `make check`.

    python benchmarks/prose.py            # fails where one of the groups is above a limit, and shows its worst places
    python benchmarks/prose.py --worst 20 PATH...

It counts Markdown paragraphs and list items; in Python, docstrings, comments, and strings of some words. Code, tables,
headings and addresses do not count.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "texts to read: it measures no speed"

ROOT = Path(__file__).resolve().parents[1]
#: what `make check` measures together; templates of `docs/blocks` stand, filled in, in the pages
GROUPS = {
    "README": ["README.md"],
    "docs": ["docs"],
    "src": ["src"],
    "other pages": ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"],
}
LEFT_OUT = {ROOT / "docs" / "blocks"}

WORDS = 25  # of a sentence, at most
LEAST = 4  # words of what counts as a sentence
LONG_SHARE = 5.0  # per cent of sentences above WORDS, at most
TURNS_SHARE = 0.3  # odd turns of phrase per 100 sentences, at most

TURNS = (
    r"(?:is|are|was|were|be|been) (?:told|said|asked|answered|held to|spoken of)",
    r"says so|in vain|but for|one and the same|nobody|whoever|whatever",
    r"in (?:its|their) stead|of (?:its|their|our|one's) own",
    r"as (?:it|they) (?:is|are|was|were)|what (?:it|they) (?:is|are)",
    r"what is (?:lacking|lent|told|said|asked|missing|left)|comes? of|told (?:of|at once|in words)",
)
TURN = re.compile(r"\b(?:" + "|".join(TURNS) + r")\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][\w'-]*")
END = re.compile(r"(?<=[.!?])[*_)\"]*\s+(?=[A-Z*_`\"(\[])")
ITEM = re.compile(r"(?:[-*+]|\d+\.)\s+")
NAMED = re.compile(r"[\w.*`, ]{1,40}:\s")  # an argument or attribute, and what it means
NOT_PROSE = ("|", "#", ">", "![", "<", "{%", "!!!")


@dataclass
class Found:
    """What was counted, and the places that are hard to read."""

    sentences: int = 0
    long: list[tuple[int, Path, str]] = field(default_factory=list)
    turns: list[tuple[str, Path, str]] = field(default_factory=list)

    @property
    def shares(self) -> tuple[float, float]:
        """Long sentences in per cent, odd turns of phrase per 100 sentences."""
        return 100 * len(self.long) / max(self.sentences, 1), 100 * len(self.turns) / max(self.sentences, 1)

    @property
    def fine(self) -> bool:
        long, turns = self.shares
        return long <= LONG_SHARE and turns <= TURNS_SHARE


def paragraphs(text: str, python: bool = False) -> Iterator[str]:
    """The paragraphs and list items of a text; in Python's docstrings also the lines of `Args:`."""
    block: list[str] = []
    fenced = False
    for line in (*text.splitlines(), ""):
        stripped = line.strip()
        fence = stripped.startswith("```")
        fenced ^= fence
        skipped = fence or fenced or not stripped or stripped.startswith(NOT_PROSE)
        skipped = skipped or (line.startswith("    ") and not block and not python)
        item = ITEM.match(stripped)
        if skipped or item or (python and NAMED.match(stripped)):
            yield " ".join(block)
            block = []
        if not skipped:
            block.append(stripped[item.end() :] if item else stripped)
    yield " ".join(block)


def sentences(text: str, python: bool = False) -> Iterator[str]:
    """The sentences of a text, with X in place of code and the words of links without their addresses."""
    for block in paragraphs(text, python):
        plain = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", block))
        yield from END.split(plain)


def texts(path: Path) -> Iterator[str]:
    """The texts of a page, or the docstrings, longer strings and comments of a Python file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield source
        return
    nodes = list(ast.walk(ast.parse(source)))
    inside = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if node in inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") >= LEAST:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#: ")


def files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (each for each in inside if each.suffix in (".md", ".py") and not LEFT_OUT & {*each.parents})


def measure(paths: Sequence[Path]) -> Found:
    """Count the sentences of files and folders; a sentence that a file repeats counts once."""
    found = Found()
    for path in files(paths):
        python = path.suffix == ".py"
        for sentence in dict.fromkeys(each for text in texts(path) for each in sentences(text, python)):
            if (words := len(WORD.findall(sentence))) < LEAST:
                continue
            found.sentences += 1
            found.turns += [(turn.group(), path, sentence) for turn in TURN.finditer(sentence)]
            if words > WORDS:
                found.long.append((words, path, sentence))
    found.long.sort(key=lambda each: -each[0])
    return found


def report(name: str, found: Found, worst: int) -> str:
    """A line of totals, and the worst places."""
    long, turns = found.shares
    lines = [
        f"{name}: {found.sentences} sentences, {long:.1f} % above {WORDS} words (at most {LONG_SHARE:.0f}), "
        f"{turns:.2f} odd turns of phrase per 100 (at most {TURNS_SHARE})"
    ]
    lines += [f"  {words} words  {path}: {sentence[:160]}" for words, path, sentence in found.long[:worst]]
    lines += [f"  '{turn}'  {path}: {sentence[:140]}" for turn, path, sentence in found.turns[:worst]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="default: all pages and sources")
    parser.add_argument("--worst", type=int, default=0, help="show so many places, also below the limits")
    given = parser.parse_args(arguments)
    groups = {" ".join(map(str, given.paths)): given.paths} if given.paths else {}
    groups = groups or {name: [ROOT / path for path in paths] for name, paths in GROUPS.items()}
    results = {name: measure(paths) for name, paths in groups.items()}
    for name, found in results.items():
        print(report(name, found, given.worst or (0 if found.fine else 20)))
    return int(not all(found.fine for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
