"""What is followed: a run or a federation by its log, a study by its runs, a hospital's site by its record of messages.

Each gives the contents of the page as plain values, and does no work while nothing changes.
"""

from __future__ import annotations

from pathlib import Path

from equipoise.core.errors import UserError, parse_toml
from equipoise.hospitals.ledger import LEDGER
from equipoise.watch.contents import LOG, Followed
from equipoise.watch.followed_run import RunFollowed
from equipoise.watch.followed_site import SiteFollowed
from equipoise.watch.followed_study import StudyFollowed


def follow(path: Path) -> Followed:
    """What lies at a path: a run's folder, a study's, a site's state, or a folder of runs (its newest run).

    Raises:
        UserError: when it is none of these
    """
    if path.suffix == ".toml" and path.is_file():
        path = _state_of(path)
    if (path / LEDGER).is_file():
        return SiteFollowed(path)
    if (path / LOG).is_file() or (path / "consortium.json").is_file():
        return RunFollowed(path)
    if (path / "runs").is_dir() or (path / "summary.json").is_file():
        return StudyFollowed(path)
    newest = max(path.glob(f"*/{LOG}"), key=lambda log: log.stat().st_mtime, default=None)
    if newest is None:
        raise UserError(
            f"{path} holds no run, study or site to watch. Name a folder that `equipoise run`, `study`, `server` or "
            "`site` writes."
        )
    return RunFollowed(newest.parent)


def _state_of(file: Path) -> Path:
    """The state folder that a site's file names."""
    raw = parse_toml(file.read_bytes(), str(file))
    if "superlink" not in raw:
        raise UserError(f"{file} is not the file of a site. To watch a server, name the folder of its run.")
    return file.parent / str(raw.get("state", "state"))
