"""The engine between hospitals: the same generators, with each request sent to a site as a parcel.

Rounds are transactions. A message names the version of the site's state it starts from and the one it leads to; the
site computes from that base and answers a repeated message from its stored reply, so a server that died in the
middle of a round asks again and gets the same bits. Accepted replies are also journaled here and fed back first.
Nothing in this file knows how parcels travel: a `Post` does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol

from pydantic import Field, PositiveFloat

from equipoise.config import Table
from equipoise.engine.base import Engine, Outcomes
from equipoise.engine.contract import Method, Setting
from equipoise.engine.journal import Answer, Journal
from equipoise.engine.parcels import (
    Contents,
    MissingTensors,
    Parcel,
    UnreadableParcel,
    digest_of,
    open_parcel,
    prepare,
    read_counts,
    seal,
)
from equipoise.engine.protocol import Ask, PerSite, Reply, SiteFailure, Value, flatten
from equipoise.engine.site import EVALUATE, Outcome, Request
from equipoise.engine.states import Versions

#: the action that lets a site write out the selected models
PUBLISH = "publish"


class FlowerOptions(Table):
    """How a server deals with sites that it reaches over a network."""

    timeout: PositiveFloat = Field(3600.0, description="seconds that a site has to answer one message")
    half: bool = Field(False, description="round weights to half precision on the wire")
    norm_bound: PositiveFloat = Field(
        1000.0, description="an update this many times as long as the median of the others is refused"
    )


class Post(Protocol):
    """Brings parcels to sites and their replies back."""

    def exchange(self, parcels: Sequence[tuple[str, Parcel]], timeout: float) -> list[Parcel | SiteFailure]:
        """Deliver each parcel to its site; replies, or why there is none, in the same order."""

    def gather(self, sites: Sequence[str], enough: int, patience: float) -> list[str]:
        """Wait until enough of the sites are connected, or patience ends; gives those that are not."""


@dataclass(frozen=True)
class Roster:
    """Who takes part. `hosts` maps a place that is no site (a common test set) to the sites that hold its images."""

    run: str
    sites: tuple[str, ...]
    hosts: Mapping[str, tuple[str, ...]]


class RemoteVersions(Versions):
    """Versions that lie on the sites' own disks; the server knows their names."""

    def __init__(self) -> None:
        super().__init__()
        self._retained: dict[str, set[str]] = {}

    def collect(self, manifests: Iterable[Mapping[str, str]]) -> None:
        """Remember what retained checkpoints refer to: sites may delete the rest."""
        self._retained = {}
        for manifest in manifests:
            for site, version in manifest.items():
                self._retained.setdefault(site, set()).add(version)

    def wanted(self, site: str) -> list[str]:
        """The versions that a site must keep."""
        present = {version for version in (self.committed.get(site), self.pending.get(site)) if version}
        return sorted(self._retained.get(site, set()) | present)


class FlowerEngine(Engine):
    """Drives hospitals through a post."""

    states: RemoteVersions

    def __init__(
        self, method: Method, setting: Setting, folder: Path, post: Post, roster: Roster, options: FlowerOptions
    ):
        super().__init__(method, setting, [*roster.sites, *roster.hosts], RemoteVersions())
        self.options = options
        self.post = post
        self.roster = roster
        self.journal = Journal(folder / "journal")
        self.place: _Hospitals = _Hospitals(self, post)

    def begin(self, round_number: int, attempt: int) -> None:
        """Start a round anew; replies of this round that were journaled before a crash stay."""
        super().begin(round_number, attempt)
        self.journal.keep_only(round_number)
        if attempt:  # too few sites answered: give them time to come back
            self.post.gather(self.roster.sites, self.setting.config.train.min_sites, self.options.timeout)

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        if not any(problem):
            self.journal.close()

    def evaluate(
        self, message: Mapping[str, Value | PerSite], requests: Sequence[Request], round_number: int
    ) -> Generator[None, None, list[Outcome]]:
        """Measure models at sites; raw scores of single patients are never asked for."""
        without = [replace(request, scores=False) for request in requests]
        return (yield from super().evaluate(message, without, round_number))

    def publish(
        self, folder: Path, message: Mapping[str, Value | PerSite], sites: Sequence[str]
    ) -> Generator[None, None, None]:
        """Write out the global model here; each site writes its own and a copy of the global one on its disk."""
        yield from super().publish(folder, message, sites)
        ask = Ask(PUBLISH, sites, **message)
        yield from self.place.run([Request(PUBLISH, site, self._round) for site in sites], ask, version="")

    def _unmeasured(self, request: Request, failure: SiteFailure) -> Outcome:
        self.unmeasured[request.site] = str(failure)
        return Outcome()

    def _sound(self, replies: list[Reply], ask: Ask) -> list[Reply]:
        """Also leave out updates that are absurdly long beside those of the other sites."""
        sound = super()._sound(replies, ask)
        lengths = {reply.site: _length(reply.payload, ask.message(reply.site)) for reply in sound}
        accepted = []
        for reply in sound:
            others = [length for site, length in lengths.items() if site != reply.site]
            usual = median(others) if others else 0.0
            if usual > 0 and lengths[reply.site] > self.options.norm_bound * usual:
                times = lengths[reply.site] / usual
                self._fail(reply.site, f"{ask.action}: its update is {times:.0f} times as long as the others'")
            else:
                accepted.append(reply)
        return accepted


def _length(payload: Mapping[str, Value], message: Mapping[str, Value]) -> float:
    """How far a site has moved the weights that it was sent, as a Euclidean length; counts and sums do not matter."""
    tensors, sent = flatten(payload)[0], flatten(message)[0]
    moved = [t.double() - sent[name].double() for name, t in tensors.items() if name in sent and t.is_floating_point()]
    return float(sum(change.square().sum() for change in moved)) ** 0.5


class _Hospitals:
    """Performs requests by sending them to sites."""

    def __init__(self, engine: FlowerEngine, post: Post):
        self.engine = engine
        self.post = post
        self._held: dict[str, frozenset[str]] = {}
        self._measuring: dict[str, list[int]] = {}
        self._config = engine.setting.config.to_toml()

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        """Perform all requests; what the journal has is not asked again."""
        messages = self._messages(requests, ask, version)
        journal = self.engine.journal
        found = [journal.find(version, m.request.site, m.identity) if version else None for m in messages]
        asked = [message for message, known in zip(messages, found) if known is None]
        answers = iter(self._exchange(asked, version))
        outcomes: list[Outcome | SiteFailure] = []
        for request, known in zip(requests, found):
            answer = known if known is not None else next(answers)
            if isinstance(answer, Answer) and answer.kept:
                self.engine.states.note(request.site, version)
            outcomes.append(answer.outcome if isinstance(answer, Answer) else answer)
        yield
        return outcomes

    def close(self) -> None:
        """Nothing to end: sites serve other runs after this one."""

    def _messages(self, requests: Sequence[Request], ask: Ask, version: str) -> list[_Message]:
        per_site = any(isinstance(value, PerSite) for value in ask.payload.values())
        shared: Contents | None = None
        messages = []
        for request in requests:
            if shared is None or per_site:
                shared = prepare(ask.message(request.site), self.engine.options.half)
            messages.append(self._message(request, shared, version))
        return messages

    def _message(self, request: Request, contents: Contents, version: str) -> _Message:
        engine, states = self.engine, self.engine.states
        fields = {
            "run": engine.roster.run,
            "site": request.site,
            "action": request.action,
            "round": request.round,
            "version": version,
            "base": states.current(request.site) or "",
            "measure": list(request.measure),
            "views": list(request.views),
            "data": request.data,
            "half": engine.options.half,
            "config": self._config,
        }
        identity = digest_of({**fields, "entries": contents.entries, "plain": contents.plain})
        hosts = engine.roster.hosts.get(request.site, (request.site,))
        parcel = seal(contents, identity=identity, keep=states.wanted(request.site), **fields)
        return _Message(request, identity, hosts[0], parcel)

    def _exchange(self, messages: Sequence[_Message], version: str) -> list[Answer | SiteFailure]:
        trimmed = [(m.host, m.parcel.without(self._held.get(m.host, ()))) for m in messages]
        replies = self._send(trimmed)
        again = [position for position, reply in enumerate(replies) if _lacks_tensors(reply)]
        if again:  # a site that was restarted holds nothing from before
            for position, reply in zip(again, self._send([(messages[p].host, messages[p].parcel) for p in again])):
                replies[position] = reply
        return [
            reply if isinstance(reply, SiteFailure) else self._accept(message, sent, reply, version)
            for message, (_, sent), reply in zip(messages, trimmed, replies)
        ]

    def _send(self, parcels: Sequence[tuple[str, Parcel]]) -> list[Parcel | SiteFailure]:
        return self.post.exchange(parcels, self.engine.options.timeout) if parcels else []

    def _accept(self, message: _Message, sent: Parcel, reply: Parcel, version: str) -> Answer | SiteFailure:
        """Read a reply; one that cannot be read, or answers something else, is a failure of its site."""
        try:
            header = reply.header
            if "error" in header:
                return SiteFailure(str(header["error"]))
            payload, _ = open_parcel(reply)
            if header.get("identity") != message.identity:
                return SiteFailure("it answered another message than the one it was sent")
            noted = {name: header[name] for name in ("kept", "measures", "facts")}
            read_counts(noted["measures"])
        except (UnreadableParcel, MissingTensors) as problem:
            return SiteFailure(f"its reply cannot be read: {problem}")
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            return SiteFailure(f"its reply is incomplete ({type(problem).__name__}: {problem})")
        self._held[message.host] = frozenset(message.parcel.tensors)
        noted["facts"] = self._with_traffic(message, noted["facts"], reply.size, sent.size)
        if not version:
            return Answer.of(payload, noted)
        return self.engine.journal.write(version, message.request.site, message.identity, payload, noted)

    def _with_traffic(self, message: _Message, facts: dict[str, float], up: int, down: int) -> dict[str, float]:
        """Facts with the bytes that travelled; those of an evaluation are counted with the site's next round."""
        if message.request.action in (EVALUATE, PUBLISH):
            counted = self._measuring.setdefault(message.host, [0, 0])
            counted[0], counted[1] = counted[0] + up, counted[1] + down
            return facts
        before = self._measuring.pop(message.host, [0, 0])
        return {**facts, "sent": up + before[0], "received": down + before[1]}


@dataclass(frozen=True)
class _Message:
    request: Request
    identity: str
    host: str
    parcel: Parcel


def _lacks_tensors(reply: Parcel | SiteFailure) -> bool:
    try:
        return isinstance(reply, Parcel) and bool(reply.header.get("lacks"))
    except UnreadableParcel:
        return False
