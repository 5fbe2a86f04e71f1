"""A study, as the logs of its runs tell of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from equipoise.core.errors import UserError
from equipoise.report import plotting as plot
from equipoise.report.plotting import Panel
from equipoise.report.wording import UNKNOWN, duration, percent
from equipoise.watch.contents import LOG, MOST_LINES, Page, shown, stamp_of, table
from equipoise.watch.followed_run import MAIN, RunFollowed


class StudyFollowed:
    """A study by the logs of its runs; only logs that changed are read on."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs: dict[Path, tuple[Any, RunFollowed]] = {}

    def _logs(self) -> dict[Path, Any]:
        return {log.parent: stamp_of(log) for log in sorted((self.folder / "runs").rglob(LOG))}

    def signature(self) -> Any:
        return self._logs()

    def page(self) -> Page:
        for run, stamp in self._logs().items():
            known = self.runs.get(run, (None, RunFollowed(run)))
            if known[0] != stamp:
                known[1].page()
            self.runs[run] = (stamp, known[1])
        runs = {run: followed for run, (_, followed) in self.runs.items() if followed.start}
        planned = self.planned()
        done = [followed for followed in runs.values() if followed.ended]
        live = {run: followed for run, followed in runs.items() if not followed.ended and not followed.quiet()}
        left = sum(own.pace() * (own.planned - own.last) for own in live.values()) / max(len(live), 1)
        whole = f" of {planned}" if planned else ""
        facts = [
            ["Runs finished", f"{len(done)}{whole}", "of the first grid" if planned else ""],
            ["Running", str(len(live)), f"their end in about {duration(left)}" if live else ""],
            ["Stopped", str(len(runs) - len(done) - len(live)), ""],
        ]
        rows = [self._row(run, own) for run, own in runs.items()][:MOST_LINES]
        heads = ["Run", "State", "Round", f"{MAIN.title} (%), validation", "Time a round", "Left out"]
        texts = {text: None for own in runs.values() for text in own.warnings}
        return {
            "kicker": "Study",
            "title": self.folder.name,
            "status": "running" if live else "no run is being written",
            "facts": facts,
            "figures": self._figures(runs),
            "tables": {"runs": table("The runs of the study.", heads, rows, 2)},
            "warnings": [*texts],
        }

    def planned(self) -> int:
        from equipoise.studies.grid import grid
        from equipoise.studies.study_file import load_study

        file = self.folder / "study.toml"
        try:
            return len(grid(load_study(str(file) if file.is_file() else self.folder.name), self.folder))
        except (UserError, OSError):
            return 0

    def _row(self, run: Path, own: RunFollowed) -> list[str]:
        view = own.view()
        now = [scores[own.newest(view)] for scores in own.scores.get(view, {}).values() if own.newest(view) in scores]
        missing = sum(len(done.get("missing", ())) for done in own.rounds.values())
        score = percent(sum(now) / len(now)) if now else UNKNOWN
        name = str(run.relative_to(self.folder / "runs"))
        return [name, own.status(), f"{own.last} of {own.planned}", score, duration(own.pace()), str(missing)]

    def _figures(self, runs: dict[Path, RunFollowed]) -> dict[str, Any]:
        means = {}
        for run, own in runs.items():
            curves = pd.DataFrame(own.scores.get(own.view(), {})).sort_index()
            if not curves.empty:
                means[run.name] = curves.mean(axis=1)
        if not means:
            return {}
        order = sorted(means, key=lambda name: -means[name].iloc[-1])
        colours = dict(zip(order, plot.PALETTE))
        traces = [
            plot.curve(means[name], name, colours.get(name, plot.FAINT), 100, 1.8, key=name in colours)
            for name in reversed(order[: plot.MOST_LINES])
        ]
        title = f"{MAIN.title} on validation images (%), mean over sites"
        return {"scores": shown(Panel(traces, plot.round_axis(), {}, title, 340))}
