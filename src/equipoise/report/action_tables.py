"""How a method acted, as a table of a run's report: each noted number in the first, a middle and the last round."""

from __future__ import annotations

import pandas as pd

from equipoise.evidence.actions import action_frame
from equipoise.report.record import RunRecord
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.wording import UNKNOWN

#: lines that people read
MOST_LINES = 60
NOTE = (
    "Means over the epochs and sub-clusters of a round. `Result.actions()` gives every number. What each number is "
    "stands in docs/evidence.md."
)


def action_sheet(run: RunRecord) -> Sheet | None:
    """The numbers that components noted, by site and class; None where there are none."""
    rounds = [*run.actions]
    shown = list(dict.fromkeys((rounds[0], rounds[len(rounds) // 2], rounds[-1]))) if rounds else []
    told = action_frame(run.lines(run.actions[number] for number in shown), run.start.classes)
    if told.empty:
        return None
    names = ["component", "name", "site", "class"]
    if len(told.groupby(names)) > MOST_LINES:
        names = ["component", "name", "site"]
    if len(told.groupby(names)) > MOST_LINES:
        names = ["component", "name"]
    table = told.pivot_table("value", names, "round", "mean", sort=False).reindex(columns=shown)
    index = table.index.to_frame(index=False) if len(names) > 1 else pd.DataFrame({names[0]: table.index})
    titles = {"component": "Component", "name": "Number", "site": "Site", "class": "Class"}
    cells = {
        f"Round {number}": [UNKNOWN if pd.isna(value) else f"{value:.3g}" for value in table[number]]
        for number in shown
    }
    return sheet("How the method acted.", {titles[name]: index[name].tolist() for name in names}, cells, notes=[NOTE])
