"""The checks themselves: each trains a few rounds on tiny data, and raises AssertionError for what is not kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from equipoise.checks.limits import check_least, check_masks, check_private, check_sums
from equipoise.checks.subjects import Skipped, Subject
from equipoise.checks.traces import all_state, assert_finite, assert_same_bits, events, server_state
from equipoise.checks.trouble import Stop, StopAt, faulty, watched, with_client
from equipoise.contract.protocol import Ask, Replies
from equipoise.core.errors import first_line
from equipoise.engine.local_engine import LocalEngine
from equipoise.methods import get_method


def check_run(subject: Subject, folder: Path) -> None:
    """A run ends, with finite weights."""
    assert_finite(subject.run(folder / "plain"))


def check_resume(subject: Subject, folder: Path) -> None:
    """A run that was stopped goes on with the same bits."""
    more = ("train.rounds=3", "train.participation=0.7")
    straight = subject.run(folder / "straight", *more)
    with suppress(Stop):
        subject.run(folder / "halted", *more, observers=(StopAt(3),))
    subject.run(folder / "halted", *more, resume=True)
    assert_same_bits(all_state(straight), all_state(folder / "halted"))
    for kind in ("evaluation", "final"):
        assert events(straight, kind) == events(folder / "halted", kind), f"the scores ({kind}) differ after a resume"


def check_workers(subject: Subject, folder: Path) -> None:
    """Two worker processes give the bits of one."""
    one = subject.run(folder / "one")
    two = subject.run(folder / "two", "compute.workers=2")
    assert_same_bits(all_state(one), all_state(two))


def overheard(subject: Subject, folder: Path, *more: str) -> dict[str, set[str]]:
    """The entries of all replies to each action in a run of one round, in which no reply is refused."""
    heard: dict[str, set[str]] = {}

    class Listening(LocalEngine):
        """Notes what sites reply."""

        def ask(self, ask: Ask) -> Generator[None, None, Replies]:
            replies = yield from super().ask(ask)
            for reply in replies:
                heard.setdefault(ask.action, set()).update(reply.payload)
            return replies

    subject.run(folder, *more, "train.rounds=1", engine=Listening)
    refused = events(folder, "round")[0]["missing"]
    assert not refused, "; ".join(f"{site}: {why}" for site, why in refused.items())
    return heard


def check_replies(subject: Subject, folder: Path) -> None:
    """Sites reply with all that the disclosure sheet names, and nothing else."""
    heard = overheard(subject, folder / "replies")
    sheet = subject.sheet()
    told = {action: set(entries) for action, entries in sheet.items() if entries}
    assert heard == told, f"sites replied {heard}, but `discloses` names {told}"
    silent = [f"{action}.{entry}" for action, entries in sheet.items() for entry, text in entries.items() if not text]
    assert not silent, f"`discloses` does not say what {', '.join(silent)} is"


def check_trouble(fault: str, subject: Subject, folder: Path) -> None:
    """A site that is lost, or sends NaN, is left out of its round, and the run goes on."""
    if not subject.sheet():
        raise Skipped("its sites send nothing")
    site = subject.federation().training_sites()[-1].name
    method = with_client(get_method(subject.config().method), partial(faulty, fault=fault, site=site))
    subject.run(folder / fault, method=method)
    first, second = events(folder / fault, "round")
    assert list(first["missing"]) == [site] and not second["missing"], f"left out of round 1: {list(first['missing'])}"
    assert_finite(folder / fault)


def check_hooks(subject: Subject, folder: Path) -> None:
    """Hooks of the step read no value on the host, so that a GPU can replay them."""
    seen: set[str] = set()
    method = with_client(get_method(subject.config().method), partial(watched, seen=seen))
    subject.run(folder / "hooks", "train.rounds=1", method=method)
    assert not seen, f"{', '.join(sorted(seen))}; use tensor operations of fixed shape, such as torch.where"


def check_flower(subject: Subject, folder: Path) -> None:
    """A round between processes on Flower gives the bits of a local one."""
    if find_spec("flwr") is None:
        raise Skipped("install the extra flower")
    if get_method(subject.config().method).pooled:
        raise Skipped("it pools all images")
    from equipoise.hospitals.coordinator import conduct, running_superlink
    from equipoise.hospitals.deployment_files import ServerFile
    from equipoise.hospitals.pilot import check_running, lay_out, running_sites

    config = subject.config("train.rounds=1", "privacy.least=0")
    server, files = lay_out(folder / "consortium", config)
    known = ServerFile.read(server)
    with running_superlink(known, False) as superlink, running_sites(files) as children:
        conduct(config, known, folder / "flower", superlink, while_waiting=lambda: check_running(children))
    local = subject.run(folder / "local", "train.rounds=1", "privacy.least=0")
    assert_same_bits(server_state(local), server_state(folder / "flower"))


#: what is checked, in words
CHECKS: dict[str, Callable[[Subject, Path], None]] = {
    "a run ends with finite weights": check_run,
    "a resumed run has the same bits": check_resume,
    "two workers give the same bits": check_workers,
    "sites send what the disclosure sheet names": check_replies,
    "a lost site is survived": partial(check_trouble, "lost"),
    "a site that sends NaN is left out": partial(check_trouble, "nan"),
    "hooks read nothing on the host": check_hooks,
    "nothing of few images leaves a site under privacy.least": check_least,
    "secure sums give the same model": check_sums,
    "differential privacy holds with it": check_private,
    "images with masks are segmented": check_masks,
    "a round on Flower gives the bits of a local one": check_flower,
}


@dataclass(frozen=True)
class Finding:
    """What came of a check: whether the plug-in keeps it, and why not, or why the check was left out."""

    title: str
    kept: bool
    told: str = ""


def findings(subject: Subject, folder: Path, titles: Collection[str] = CHECKS) -> Iterator[Finding]:
    """The findings of some checks, or all, one after the other."""
    for title in titles:
        try:
            CHECKS[title](subject, folder / title.replace(" ", "-"))
            yield Finding(title, True)
        except Skipped as why:
            yield Finding(title, True, f"left out: {why}")
        except AssertionError as problem:
            yield Finding(title, False, first_line(problem))
        except Exception as problem:  # any exception of a plug-in is a finding
            yield Finding(title, False, f"{type(problem).__name__}: {first_line(problem)}")
