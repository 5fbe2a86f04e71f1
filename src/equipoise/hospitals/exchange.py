"""How requests become parcels to hospitals, and parcels become outcomes: what the engine between hospitals works with.

A message carries only tensors that its receiver lacks. A reply is checked before its use, and bytes are counted per
site.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field, PositiveFloat

from equipoise.contract.method import Setting
from equipoise.contract.protocol import Ask, Diverged, PerSite, SiteFailure, Tensors, payload_bytes
from equipoise.core.errors import UserError
from equipoise.core.table import Table
from equipoise.engine.engine import Outcomes
from equipoise.engine.slot import EVALUATE, Outcome, Request
from equipoise.engine.states import Versions
from equipoise.hospitals.journal import Answer, Journal
from equipoise.hospitals.parcels import (
    Contents,
    MissingTensors,
    Packer,
    Parcel,
    UnreadableParcel,
    digest_of,
    open_parcel,
    seal,
)
from equipoise.hospitals.replies import read_noted, words_of

#: the action that lets a site write out the selected models
PUBLISH = "publish"
#: bytes of a reply on the server's disk, by those that travelled: tensors of equal numbers travel once
MOST_UNPACKED = 16


class FlowerOptions(Table):
    """How a server deals with sites that it reaches over a network."""

    timeout: PositiveFloat = Field(3600.0, description="seconds that a site has to answer one message")
    half: bool = Field(False, description="round weights to half precision on the wire, both ways, without feedback")
    wire: Literal["fp32", "fp16", "int8"] = Field(
        "fp32",
        description="precision of weights on the wire; `fp32`: full. Otherwise models go out in 16 bits and updates "
        "return in 16 or 8. A site adds the rounding error to its next update",
    )
    norm_bound: PositiveFloat = Field(
        10.0,
        description="the server refuses an update longer than this multiple of the other updates' median. The limit "
        "grows for sites with more training images, since they take more steps",
    )
    loss_bound: PositiveFloat = Field(
        100.0,
        description="the server refuses a loss, sum or prototype above this multiple of the others' median. A loss "
        "counts as at least that of guessing",
    )


class Post(Protocol):
    """Brings parcels to sites and their replies back."""

    def exchange(self, parcels: Sequence[tuple[str, Parcel]], timeout: float) -> list[Parcel | SiteFailure]:
        """Deliver each parcel to its site; replies, or why there is none, in the same order."""

    def gather(self, sites: Sequence[str], enough: int, patience: float) -> list[str]:
        """Wait until enough of the sites are connected, or patience ends; gives those that are not."""


@dataclass(frozen=True)
class Roster:
    """Who takes part.

    Attributes:
        hosts: for each place that is no site (a common test set), the sites that hold its images
        examples: the training images that each site said it has
        counts: the images of each class that each place has by part; empty: no site said
        described: a digest of all that each site said of its data; a site whose data has changed since then refuses
    """

    run: str
    sites: tuple[str, ...]
    hosts: Mapping[str, tuple[str, ...]]
    examples: Mapping[str, int] = field(default_factory=dict)
    described: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)


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


class Hospitals:
    """Performs requests by sending them to sites."""

    def __init__(
        self,
        setting: Setting,
        options: FlowerOptions,
        post: Post,
        roster: Roster,
        states: RemoteVersions,
        journal: Journal,
    ):
        self.options, self.post, self.roster, self.states, self.journal = options, post, roster, states, journal
        self._held: dict[str, frozenset[str]] = {}
        self._untold: dict[str, dict[str, int]] = {}
        self._task = setting.task
        self._least = setting.config.privacy.limit
        self._config = setting.config.to_toml()
        privacy = setting.config.privacy
        #: whether counts carry noise or masks, so that they cannot be compared with what a site described
        self._hidden = privacy.epsilon is not None or privacy.secure_sums

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        """Perform all requests; what the journal has is not asked again."""
        messages = self._messages(requests, ask, version)
        found = [self.journal.find(version, m.request.site, m.identity) if version else None for m in messages]
        asked = [message for message, known in zip(messages, found) if known is None]
        answers = iter(self._exchange(asked, version))
        outcomes: list[Outcome | SiteFailure] = []
        for request, known in zip(requests, found):
            answer = known if known is not None else next(answers)
            if isinstance(answer, Answer) and answer.kept:
                self.states.note(request.site, version)
            outcomes.append(answer.outcome if isinstance(answer, Answer) else answer)
        yield
        return outcomes

    def close(self) -> None:
        """Nothing to end: sites serve other runs after this one."""

    def _messages(self, requests: Sequence[Request], ask: Ask, version: str) -> list[_Message]:
        per_site = any(isinstance(value, PerSite) for value in ask.payload.values())
        packer = Packer(self.options.half or self.options.wire != "fp32")
        shared: Contents | None = None
        messages = []
        for request in requests:
            if shared is None or per_site:
                shared = packer.prepare(ask.message(request.site))
            messages.append(self._message(request, shared, version))
        return messages

    def _message(self, request: Request, contents: Contents, version: str) -> _Message:
        fields = {
            "run": self.roster.run,
            "site": request.site,
            "action": request.action,
            "round": request.round,
            "index": request.index,
            "version": version,
            "base": self.states.current(request.site) or "",
            "measure": list(request.measure),
            "views": list(request.views),
            "data": request.data,
            "half": self.options.half,
            "config": self._config,
            **({} if self.options.wire == "fp32" else {"wire": self.options.wire}),
            **self._more(request),
        }
        identity = digest_of({**fields, "entries": contents.entries, "plain": contents.plain})
        hosts = self.roster.hosts.get(request.site, (request.site,))
        described = {host: self.roster.described[host] for host in hosts if host in self.roster.described}
        keep = self.states.wanted(request.site)
        parcel = seal(contents, identity=identity, keep=keep, described=described, omit=True, **fields)
        return _Message(request, identity, hosts, parcel, contents.exact)

    def _more(self, request: Request) -> dict[str, Any]:
        """Further fields of a message."""
        return {}

    def _exchange(self, messages: Sequence[_Message], version: str) -> list[Answer | SiteFailure]:
        """Every message's answer; if several sites hold the images, the next one follows when one fails."""
        answers: list[Answer | SiteFailure] = [SiteFailure("no site holds its images")] * len(messages)
        waiting = list(range(len(messages)))
        for turn in range(max((len(message.hosts) for message in messages), default=0)):
            waiting = [
                position
                for position in waiting
                if isinstance(answers[position], SiteFailure) and turn < len(messages[position].hosts)
            ]
            asked = [(messages[position].hosts[turn], messages[position]) for position in waiting]
            for position, answer in zip(waiting, self._ask(asked, version)):
                answers[position] = answer
        return answers

    def _ask(self, asked: Sequence[tuple[str, _Message]], version: str) -> list[Answer | SiteFailure]:
        parcels = self._trimmed(asked)
        replies = self._send(parcels)
        down = [parcel.size for _, parcel in parcels]
        again = [position for position, reply in enumerate(replies) if _lacks_tensors(reply)]
        whole = [(asked[position][0], asked[position][1].parcel) for position in again]
        for position, reply in zip(again, self._send(whole)):  # a site that was restarted holds nothing from before
            replies[position] = reply
            down[position] += asked[position][1].parcel.size
        return [
            reply if isinstance(reply, SiteFailure) else self._accept(host, message, reply, size, version)
            for (host, message), reply, size in zip(asked, replies, down)
        ]

    def _trimmed(self, asked: Sequence[tuple[str, _Message]]) -> list[tuple[str, Parcel]]:
        """The parcels without what their receivers hold; a site takes its messages in the order of sending."""
        held, parcels = dict(self._held), []
        for host, message in asked:
            parcels.append((host, message.parcel.without(held.get(host, ()))))
            held[host] = frozenset(message.parcel.tensors)
        return parcels

    def _send(self, parcels: Sequence[tuple[str, Parcel]]) -> list[Parcel | SiteFailure]:
        return self.post.exchange(parcels, self.options.timeout) if parcels else []

    def _accept(self, host: str, message: _Message, reply: Parcel, down: int, version: str) -> Answer | SiteFailure:
        """Read a reply; one that cannot be read, or answers something else, is a failure of its site."""
        request = message.request
        try:
            header = reply.header
            if header.get("lost") is True:
                raise UserError(
                    f"{host} cannot go on: {words_of(header.get('error'))}. Without it every further round would leave "
                    f"{host} out. Put its folder back from a copy there and repeat the command with --resume, or start "
                    "a new run"
                )
            if "error" in header:
                raise (Diverged if header.get("diverged") is True else SiteFailure)(words_of(header["error"]))
            payload, _ = open_parcel(reply, message.parcel.tensors, message.exact)
            if payload_bytes(payload) > MOST_UNPACKED * (reply.size + message.parcel.size):
                raise UnreadableParcel(f"it unpacks to {payload_bytes(payload)} bytes, far more than have travelled")
            if header.get("identity") != message.identity:
                raise SiteFailure("it answered another message than the one it was sent")
            described = None if self._hidden else self.roster.counts.get(request.data or request.site)
            noted = read_noted(header, message.measured, self._task, described, self._least)
        except (UnreadableParcel, MissingTensors) as problem:
            self._count(host, reply.size, down)
            return SiteFailure(f"its reply cannot be read: {problem}")
        except SiteFailure as failure:
            self._count(host, reply.size, down)
            return failure
        self._held[host] = frozenset(message.parcel.tensors)
        self._count(host, reply.size, down)
        if request.round and request.action not in (EVALUATE, PUBLISH):
            noted["facts"] = {**noted["facts"], **self._untold.pop(host)}
        if not version:
            return Answer.of(payload, noted)
        return self.journal.write(version, request.site, message.identity, payload, noted)

    def _count(self, host: str, up: int, down: int) -> None:
        """Note bytes that travelled. They count with the host's next accepted reply in a round. So bytes of the start,
        of an evaluation and of refused replies count in the following round."""
        before = self._untold.get(host, {"sent": 0, "received": 0})
        self._untold[host] = {"sent": before["sent"] + up, "received": before["received"] + down}


@dataclass(frozen=True)
class _Message:
    request: Request
    identity: str
    hosts: tuple[str, ...]
    parcel: Parcel
    exact: Tensors
    """What the parcel tells, before any rounding."""

    @property
    def measured(self) -> set[str]:
        """What the site measures, as `view.part`."""
        return {f"{view}.{part}" for view in self.request.views for part in self.request.measure}


def _lacks_tensors(reply: Parcel | SiteFailure) -> bool:
    try:
        return isinstance(reply, Parcel) and bool(reply.header.get("lacks"))
    except UnreadableParcel:
        return False
