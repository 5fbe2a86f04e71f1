"""What a site has spent of differential privacy: the epsilons of all runs on its images add up, in a file of the site.

A run's epsilon holds for so many answers. The site counts them, so that no server gets more. Equal questions get equal
noise, and count once.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.contract.config import Config
from equipoise.core.storage import checked_text, read_checked, write_text
from equipoise.engine.private import scores_noise
from equipoise.hospitals.parcels import digest_of

#: the account, beside the folders of runs
ACCOUNT = "epsilon.json"
#: sums of decimal fractions may exceed their limit by this
ROUNDING = 1e-9


class Overspent(Exception):
    """A run or an answer that would cost more than is left; the text goes back to the server."""


class Spending:
    """The account of one site.

    Args:
        folder: where the account lies
        ceiling: the site refuses runs beyond this sum of epsilons, and runs without one; None: no limit
    """

    def __init__(self, folder: Path, ceiling: float | None = None):
        self.path, self.ceiling = folder / ACCOUNT, ceiling

    @property
    def spent(self) -> float:
        """The sum of the epsilons of all runs so far."""
        return sum(run["epsilon"] for run in self._runs())

    def admit(self, config: Config, run: str) -> None:
        """Enter a run with its epsilon, unless it is known. At its description a run has no name yet."""
        privacy = config.privacy
        if privacy.epsilon is None:
            if self.ceiling is not None:
                raise Overspent("this site refuses runs without privacy.epsilon: its site.toml limits their sum")
            return
        runs, own = self._runs(), _digest(config)
        if any((entry["run"], entry["config"]) == (run, own) for entry in runs if run):
            return
        # The noise of a description follows from these, so that equal ones are one release.
        told = digest_of({"privacy": privacy.model_dump(), "scores": scores_noise(config)})
        entry = next((entry for entry in runs if (entry["run"], entry["described"]) == ("", told)), None)
        if entry is None:
            before = sum(known["epsilon"] for known in runs)
            if self.ceiling is not None and before + privacy.epsilon > self.ceiling + ROUNDING:
                raise Overspent(
                    f"this run takes privacy.epsilon = {privacy.epsilon:g}, and this site has {before:g} of "
                    f"{self.ceiling:g} spent. Set privacy.epsilon lower, or let the site raise `epsilon` in its "
                    "site.toml"
                )
            day = datetime.datetime.now(datetime.UTC).date().isoformat()
            entry = {"epsilon": privacy.epsilon, "delta": privacy.delta, "since": day, "described": told}
            runs.append(entry)
        self._write(runs, entry, {"run": run, "config": own if run else ""})

    def release(self, config: Config, run: str, answers: Mapping[str, Sequence[str]], most: Mapping[str, int]) -> None:
        """Count answers of a run, unless they were given before.

        Args:
            answers: by kind, what makes each different from others
            most: how many different ones of a kind there may be
        """
        runs = self._runs()
        entry = next(entry for entry in runs if (entry["run"], entry["config"]) == (run, _digest(config)))
        given = dict(entry.get("answers", {}))
        for kind, those in answers.items():
            told = [*dict.fromkeys([*given.get(kind, ()), *those])]
            if len(told) > most[kind]:
                raise Overspent(
                    f"privacy.epsilon of this run covers {most[kind]} answers about {kind} images, and this is one more"
                )
            given[kind] = told
        self._write(runs, entry, {"answers": given})

    def _runs(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        try:
            runs: list[dict[str, Any]] = read_checked(self.path.read_bytes(), lambda content: True)["runs"]
            return runs
        except (ValueError, KeyError):
            raise Overspent(
                f"this site's account of epsilon is damaged; its {ACCOUNT} has to come from a copy"
            ) from None

    def _write(self, runs: list[dict[str, Any]], entry: dict[str, Any], now: Mapping[str, Any]) -> None:
        """Change an entry, on the disk before anything leaves."""
        if {**entry, **now} != entry:
            entry.update(now)
            write_text(self.path, checked_text({"runs": runs}))


def _digest(config: Config) -> str:
    return digest_of({"config": config.to_toml()})
