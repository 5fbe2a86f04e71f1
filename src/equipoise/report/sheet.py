"""A table as readers see it, for any content, and its LaTeX and Markdown forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from equipoise.report.latex import latex_text


@dataclass(frozen=True)
class Sheet:
    """Texts in lines and columns. The index of `cells`, of one or more levels, names the lines."""

    caption: str
    cells: pd.DataFrame
    best: pd.DataFrame | None = None
    """Where a cell is the best of its column; None: nowhere."""
    notes: Sequence[str] = ()
    """What stands beneath."""
    groups: Mapping[int, str] = field(default_factory=dict)
    """What stands over the line of a number and those after it."""

    @property
    def heads(self) -> list[str]:
        """What stands over the names and the columns."""
        return [*map(str, self.cells.index.names), *map(str, self.cells.columns)]

    @property
    def lines(self) -> Iterator[tuple[tuple[str, ...], list[tuple[str, bool]]]]:
        """The names of each line, and its cells with whether they are the best of their column."""
        best = self.cells.isna() if self.best is None else self.best
        for name, texts, marks in zip(self.cells.index, self.cells.to_numpy(), best.to_numpy()):
            yield name if isinstance(name, tuple) else (name,), list(zip(texts, map(bool, marks)))


def sheet(caption: str, names: Mapping[str, Any], columns: Mapping[str, Any], **more: Any) -> Sheet:
    """A sheet from the names of its lines and its columns, both by what stands over them."""
    index = pd.MultiIndex.from_arrays([*names.values()], names=[*names])
    cells = pd.DataFrame({head: list(texts) for head, texts in columns.items()}, index=index, dtype=object)
    return Sheet(caption, cells, **more)


def tabular(shown: Sheet) -> str:
    r"""A `tabular` for `\usepackage{booktabs}`, the best of a column in bold."""
    rows = [
        [*map(latex_text, names), *(rf"\textbf{{{latex_text(t)}}}" if best else latex_text(t) for t, best in cells)]
        for names, cells in shown.lines
    ]
    levels = shown.cells.index.nlevels
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{'l' * levels}{'r' * shown.cells.shape[1]}}}",
            r"\toprule",
            " & ".join(map(latex_text, shown.heads)) + r" \\",
            r"\midrule",
            *(" & ".join(row) + r" \\" for row in rows),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def latex(shown: Sheet, label: str) -> str:
    """A whole `table` with its caption and notes."""
    note = [rf"\par {latex_text(' '.join(shown.notes))}"] if shown.notes else []
    return "\n".join(
        [
            r"\begin{table}",
            r"\footnotesize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{latex_text(shown.caption)}}}\label{{tab:{label}}}",
            tabular(shown),
            *note,
            r"\end{table}",
            "",
        ]
    )


def markdown(shown: Sheet) -> str:
    """The caption, the table and its notes; names cannot end a cell or begin HTML."""
    levels = shown.cells.index.nlevels
    heads = [head.lower() if place < levels else head for place, head in enumerate(shown.heads)]
    rules = ["---"] * levels + ["---:"] * shown.cells.shape[1]
    rows = [heads, rules, *([*names, *(text for text, _ in cells)] for names, cells in shown.lines)]
    signs = str.maketrans({"|": r"\|", "<": "&lt;", "\n": " "})
    table = "\n".join(f"| {' | '.join(text.translate(signs) for text in row)} |" for row in rows)
    return "\n\n".join([shown.caption, table, *([" ".join(shown.notes)] if shown.notes else [])])
