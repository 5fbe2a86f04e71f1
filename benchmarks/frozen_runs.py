"""Runs of the frozen studies one after the other in one process, the most needed first; the same command goes on.

    python benchmarks/frozen_runs.py --out RUNS [--until 20:00]     # UTC
    python benchmarks/frozen_runs.py --out RUNS --plan              # counts finished runs by stage

It reads each federation once, keeps no models, and writes no reports. `frozen_scores.py RUNS` reads its runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import frozen
from equipoise.contract.config import Config
from equipoise.core.storage import write_text
from equipoise.engine import runs
from equipoise.nets import features
from equipoise.studies.checks import is_finished
from equipoise.studies.grid import Cell, cell_config, grid
from equipoise.studies.runner import run_grid
from equipoise.studies.study_file import Row, StudyConfig

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "prepared images and features of the four federations"
CORE, COMPONENTS, LOSSES, EVERY = frozen.TABLES
CLOSED, CLAIMED = "Closed forms", "Rivals in claims"
#: rows of all methods that a paper claims to beat
RIVALS = ("fml", "fedetf")
ALL = tuple(frozen.TUNING)
#: in their order: rows, seeds, studies; seed 0 of all methods tunes them
STAGES: tuple[tuple[str, tuple[int, ...], tuple[str, ...]], ...] = (
    (CORE, (1,), ("dermoscopy",)),
    (CLOSED, (1, 2, 3, 4, 5), ALL),
    (CORE, (1,), ("isic",)),
    (CORE, (2, 3), ("dermoscopy",)),
    (CLAIMED, (0, 1, 2, 3), ("dermoscopy",)),
    (CORE, (2,), ("isic",)),
    (CORE, (1, 2), ("pbc",)),
    (COMPONENTS, (1, 2, 3), ("dermoscopy",)),
    (CORE, (1,), ("authors",)),
    (CORE, (3,), ("pbc",)),
    (CORE, (4, 5), ("dermoscopy",)),
    (CORE, (1, 2, 3), ("isic", "ham10000")),
    (LOSSES, (1, 2, 3), ALL),
    (CORE, (4, 5), ("isic", "ham10000", "pbc")),
    (CLAIMED, (0, 1, 2, 3), ("pbc", "ham10000", "isic")),
    (CORE, (2, 3, 4, 5), ("authors",)),
    (COMPONENTS, (1, 2, 3), ALL),
    *((EVERY, (0, 1, 2, 3), (study,)) for study in ("dermoscopy", "pbc", "ham10000", "isic")),
    (COMPONENTS, (4, 5), ALL),
    (LOSSES, (4, 5), ALL),
)


def kept(function: Callable[..., Any], key: Callable[..., str]) -> Callable[..., Any]:
    """The function, which remembers its last few results."""
    results: dict[str, tuple[Any, Any]] = {}

    @wraps(function)
    def remembering(*given: Any, **named: Any) -> Any:
        name = key(*given, **named)
        if name not in results:
            results[name] = (function(*given, **named), given)  # what is given stays, and so does its identity
        if len(results) > 12:
            results.pop(next(iter(results)))
        return results[name][0]

    return remembering


def read_once() -> None:
    """Let runs on the same images share them."""
    runs.load_federation = kept(runs.load_federation, lambda data, seed, *_: f"{data.model_dump_json()} {seed}")
    features.with_features = kept(
        features.with_features,
        lambda federation, net, augment, *_: f"{id(federation)} {net.model_dump_json()} {augment.model_dump_json()}",
    )


def settings_for(study: str, out: Path) -> dict[str, Any]:
    """The chosen settings by row: published ones, and those chosen from this folder's own tuning."""
    return frozen.chosen_for(study, frozen.tuned(out))


def study_of(study: str, out: Path, tuning: bool = False) -> StudyConfig:
    """A study as its file would have it, with the settings known by now."""
    if tuning:
        table = frozen.tuning(study)
    else:
        table = {**frozen.head_of(study, f"frozen-{study}"), "row": frozen.rows_of(study, settings_for(study, out))}
    return StudyConfig.model_validate(frozen.nested(table))


def cells_of(table: str, seed: int, study: str, out: Path) -> Iterator[tuple[Cell, Config]]:
    """The runs of a study's table with one seed, each on every data set."""
    tuning = seed == 0
    config = study_of(study, out, tuning)
    if tuning:
        wanted = RIVALS if table == CLAIMED else frozen.beyond()
        names = [row.name for row in config.rows if row.name.rpartition(",")[0] in wanted]
    else:
        names = [row.name for row in config.rows if is_in(row, table)]
        if table in (CLAIMED, EVERY):  # a method waits until it is tuned
            names = [name for name in names if name in settings_for(study, out)]
    known = frozen.seedless(study) if seed > 1 else set()
    if not tuning and frozen.in_one_run({row.name: row.settings for row in config.rows}):
        known.add(frozen.COMMON)
    for cell in grid(config, out / config.name, [name for name in names if name not in known], [seed]):
        yield cell, cell_config(config, cell)


def is_in(row: Row, stage: str) -> bool:
    """Whether a stage runs this row."""
    names = {CLOSED: row.method in frozen.CLOSED, CLAIMED: row.name in RIVALS}
    return names.get(stage, stage in row.tables)


class Told:
    """Prints each run that ends, with the CPU seconds that it took."""

    def started(self, cell: Cell, config: Config) -> Told:
        self.began = time.process_time()
        return self

    def ended(self, cell: Cell, how: str) -> None:
        shutil.rmtree(cell.folder / "models", ignore_errors=True)
        print(f"{datetime.now(UTC):%H:%M} {cell.label}: {how}, {time.process_time() - self.began:.1f} s", flush=True)

    def event(self, event: str, **fields: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", help="a time of today, in UTC, after which no run begins")
    parser.add_argument("--plan", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    read_once()
    for table, seeds, studies in STAGES:
        for seed in seeds:
            for study in studies:
                cells = [*cells_of(table, seed, study, asked.out)]
                left = [pair for pair in cells if not is_finished(pair[0].folder)]
                if asked.plan:
                    print(f"{table}, seed {seed}, {study}: {len(cells) - len(left)} of {len(cells)}")
                    continue
                for pair in left:
                    if asked.until and f"{datetime.now(UTC):%H:%M}" >= asked.until:
                        return
                    for label, problem in run_grid([pair], Told()).failed.items():
                        print(f"{label}: {problem}", flush=True)
                if seed == 0:
                    write_text(asked.out / frozen.TUNED, json.dumps(frozen.choose(asked.out), indent=1) + "\n")


if __name__ == "__main__":
    main()
