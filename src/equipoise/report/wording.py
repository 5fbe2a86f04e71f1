"""Numbers in words: per cent, times, bytes, ranges of rounds."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from equipoise.bootstrap import Interval

#: what stands in a cell whose number is not known
UNKNOWN = "–"


def percent(value: float | None) -> str:
    """A fraction in per cent with two decimals, a dash when unknown."""
    return UNKNOWN if value is None or pd.isna(value) else f"{100 * value:.2f}"


def bounds_told(found: Interval) -> str:
    """A score and its bounds in per cent."""
    if found.value != found.value:
        return UNKNOWN
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def duration(seconds: float) -> str:
    """Seconds in the units a person would use."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def byte_unit(size: float) -> tuple[float, str]:
    """The decimal unit in which `size` bytes is a small number: (bytes per unit, name)."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next((unit for unit in units if size >= unit[0]), (1.0, "bytes"))


def traffic(size: float) -> str:
    """Bytes in a decimal unit."""
    divisor, unit = byte_unit(size)
    return f"{size / divisor:.2f} {unit}" if divisor > 1 else f"{size:.0f} bytes"


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers with neighbours joined: 1, 3–5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("–".join(map(str, span)) for span in spans)
