"""Single runs of studies side by side in one process, without tables or figures (which take time):

python benchmarks/side_by_side.py OUT SECONDS TOGETHER STUDY/ROW:SEED ...

The runs lie where `equipoise study STUDY --out OUT` looks for them; the same command goes on where time was up.
Settings, such as compute.device=cuda, are read from the variable SETTINGS, separated by spaces.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from equipoise.contract.config import Config
from equipoise.report.record import TOLD, read_run
from equipoise.studies.grid import Cell, cell_config, grid
from equipoise.studies.runner import run_grid
from equipoise.studies.study_file import load_study

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a study"

BEGAN = time.monotonic()
FIRST_ROUNDS = 3


def say(cell: Cell, text: str) -> None:
    """A line with the time since the start."""
    print(f"{time.monotonic() - BEGAN:6.0f} s  {cell.label}: {text}", flush=True)


class Watched:
    """Tells validation scores of a run's first rounds, for comparison with earlier runs."""

    def __init__(self, cell: Cell):
        self.cell = cell

    def event(self, event: str, **fields: Any) -> None:
        if event == "evaluation" and fields["part"] == "valid" and fields["round"] <= FIRST_ROUNDS:
            say(self.cell, f"round {fields['round']}, {fields['site']}: macro F1 {fields['metrics']['macro_f1']:.4f}")


class Lines:
    """Prints what becomes of the runs."""

    def started(self, cell: Cell, config: Config) -> Watched:
        say(cell, f"begins or goes on, {config.train.rounds} rounds in all")
        return Watched(cell)

    def ended(self, cell: Cell, how: str) -> None:
        say(cell, how)
        if how == "finished":
            finals = read_run(cell.folder).finals
            for _, known in finals[finals["scope"] == "mean"].drop(columns=[*TOLD]).iterrows():
                say(cell, ", ".join(f"{name} {100 * value:.2f}" for name, value in known.dropna().items()))


def planned(out: Path, wanted: str) -> tuple[Cell, Config]:
    """The run that STUDY/ROW:SEED names."""
    name, _, rest = wanted.partition("/")
    row, _, seed = rest.rpartition(":")
    study = load_study(name)
    (cell,) = grid(study, out / study.name, [row], [int(seed)])
    return cell, cell_config(study, cell, os.environ.get("SETTINGS", "").split())


if __name__ == "__main__":
    out, seconds, together, *runs = sys.argv[1:]
    outcome = run_grid([planned(Path(out), run) for run in runs], Lines(), int(together), float(seconds))
    outcome.complain()
    print("not finished:", ", ".join(outcome.stopped) or "none")
