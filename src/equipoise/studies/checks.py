"""Checks of a run before it enters a study's tables. It has to be finished and whole, with the study's settings, on
images that allow a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from equipoise.contract.config import Config
from equipoise.core.errors import UserError, first_few
from equipoise.data import load_federation
from equipoise.engine.events import first_event, last_kind
from equipoise.engine.loop import Run
from equipoise.engine.runs import refuse_idle_parts
from equipoise.report.log_lines import Start
from equipoise.studies.grid import Cell, deviations, known_cells, no_common_set
from equipoise.studies.same_data import DataSeen
from equipoise.studies.study_file import PART_TITLES, StudyConfig

#: what to do about a run whose files are damaged
REMEDY = "delete the folder, and the study runs it again"


class DamagedRun(UserError):
    """A finished run whose files cannot be used."""


def is_finished(folder: Path) -> bool:
    """Whether a run came to its end."""
    return last_kind(folder / "events.jsonl") == "end"


def check_log(folder: Path) -> None:
    """Refuse to train anew a run that has its models and no log of how they came about."""
    if (folder / "models").exists() and not (folder / "checkpoints").exists() and not is_finished(folder):
        raise DamagedRun(
            f"{folder / 'events.jsonl'} is missing or damaged, though the run was finished; get a copy, or {REMEDY}"
        )


def check_finished(cell: Cell, config: Config) -> None:
    """Refuse a finished run that was made with other settings."""
    try:
        start = first_event(cell.folder / "events.jsonl")
    except UserError as problem:
        raise DamagedRun(f"{problem}; {REMEDY}") from None
    if not isinstance(start.get("config"), dict):
        raise DamagedRun(f"{cell.folder} does not say how it was made; {REMEDY}")
    other = deviations(config, start["config"])
    if other:
        changes = "; ".join(f"{key} = {found!r}, now {planned!r}" for key, (found, planned) in list(other.items())[:4])
        raise UserError(
            f"{cell.folder} holds a finished run with other settings ({changes}); delete it, or choose another --out"
        )


def check_common_sets(study: StudyConfig, planned: Sequence[tuple[Cell, Config]]) -> None:
    """Refuse, before anything is trained, data without the common test set that the study's scope needs."""
    to_run = [(cell, config) for cell, config in planned if not is_finished(cell.folder)]
    for cell, config in {(cell.data and cell.data.name): (cell, config) for cell, config in to_run}.values():
        if load_federation(config.data, cell.seed).common is None:
            raise no_common_set(study, cell.label, "test")


def refuse_idle_rows(planned: Sequence[tuple[Cell, Config]]) -> None:
    """Refuse rows whose method's or component's defining part cannot act; runs that have begun go on."""
    for cell, config in planned:
        if not (cell.folder / "events.jsonl").exists():
            try:
                refuse_idle_parts(config)
            except UserError as problem:
                raise UserError(f"{cell.row.name}: {problem}") from None


class Checks:
    """Checks of a run before it trains, so that its scores can enter the study's tables."""

    def __init__(self, study: StudyConfig, folder: Path):
        self.study = study
        self.folder = folder
        self._seen: dict[Path, tuple[str, DataSeen]] = {}

    def __call__(self, run: Run) -> None:
        """Refuse data without images to judge by, and other images than finished runs have seen."""
        self._check_judged(run)
        self._check_same_data(run)

    def _check_judged(self, run: Run) -> None:
        federation, part = run.federation, self.study.part
        judges = [*federation.sites, *([federation.common] if federation.common else [])]
        if not any(len(place.splits.get(part, ())) for place in judges):
            advice = 'give some, or write part = "valid"' if part == "test" else "give some"
            raise UserError(f"there are no {PART_TITLES[part]} images, which the tables are about; {advice}")

    def _check_same_data(self, run: Run) -> None:
        config = run.config.model_dump(mode="json")
        seen = DataSeen.of(Start(run=run.config.run_name, method=run.config.method, config=config, **run.data_told))
        self._look()
        others = [
            name
            for folder, (name, other) in self._seen.items()
            if folder != run.folder and seen.conflicts(other) and is_finished(folder)
        ]
        if others:
            raise UserError(
                f"the data has changed since {first_few(others)} ran: they would not compare; delete these runs, or "
                "choose another --out"
            )

    def _look(self) -> None:
        """Read the study's runs that have finished since the last look; other functions report damage."""
        for cell in known_cells(self.study, self.folder, beyond=self._seen):
            if is_finished(cell.folder):
                with suppress(OSError, UserError, ValueError, KeyError, TypeError):
                    start = Start.model_validate(first_event(cell.folder / "events.jsonl"))
                    self._seen[cell.folder] = cell.label, DataSeen.of(start)
