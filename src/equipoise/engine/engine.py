"""What every engine does around its sites: asks become requests, a round is kept in the books, unsound replies go.

An engine adds the place where requests are performed: this process, worker processes, a GPU, hospitals on Flower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from equipoise.contract.method import Method, Setting
from equipoise.contract.notes import Values, added
from equipoise.contract.protocol import (
    Ask,
    Diverged,
    Payload,
    PerSite,
    Replies,
    Reply,
    SiteFailure,
    Sums,
    Tensors,
    Value,
    check_payload,
    first_unfinite,
    payload_bytes,
    signature,
)
from equipoise.contract.tables import LEAST_SUMMED
from equipoise.engine.payload_files import write_payload
from equipoise.engine.slot import EVALUATE, Outcome, Request
from equipoise.engine.states import Versions
from equipoise.engine.summing import ALL_SITES, Summer, measured_by, numbers_in, together
from equipoise.sums import TooLarge, sum_of

Outcomes = Generator[None, None, list[Outcome | SiteFailure]]


class Place(Protocol):
    """Where requests are performed."""

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        """Perform all requests; outcomes in the order of the requests. `version` names the sites' next state."""

    def close(self) -> None:
        """Let go of processes and memory."""


class Engine:
    """Drives the sites of a federation, wherever they are. `sites` are their names, in order."""

    place: Place
    #: whether the sites' images are on this machine, so that predictions of single images may be kept
    sees_images = False

    def __init__(self, method: Method, setting: Setting, sites: Sequence[str], states: Versions):
        self.method = method
        self.client = method.client_class(setting.config)
        self.views = self.client.views
        self.setting = setting
        self.states = states
        #: why sites are out of the present round, and those of them whose reply or state held NaN or infinity
        self.failed: dict[str, str] = {}
        self.diverged: set[str] = set()
        #: what a round can do without and a site did not do (measuring, writing models), told as warnings later:
        #: {(site, what): why}
        self.undone: dict[tuple[str, str], str] = {}
        self.facts: dict[str, dict[str, float]] = {}
        self.measures: dict[str, dict[str, Tensors]] = {}
        #: bytes of each entry of a site's replies
        self.entries: dict[str, Counter[str]] = {}
        #: how methods act at each site in the present round, by name
        self.notes: dict[str, dict[str, Values]] = {}
        self._round, self._attempt, self._index = 0, 0, 0
        self._order = {name: position for position, name in enumerate(sites)}
        #: with secure sums: what turns replies into sums
        self.summer = Summer(setting, self.client) if setting.config.privacy.secure_sums else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.place.close()

    # ---- a round --------------------------------------------------------------------------------

    def begin(self, round_number: int, attempt: int) -> None:
        """Start a round anew: nothing is pending, no site has failed."""
        self._round, self._attempt, self._index = round_number, attempt, 0
        self.states.rollback()
        self.failed, self.facts, self.measures, self.entries, self.notes = {}, {}, {}, {}, {}
        self.diverged = set()

    @property
    def elsewhere(self) -> bool:
        """Whether sites work in other processes, so that this one can do something else meanwhile."""
        return False

    @property
    def asked(self) -> int:
        """How many asks of the present round have been answered."""
        return self._index

    @property
    def tells_scores(self) -> bool:
        """Whether predictions of single images may be kept."""
        return self.sees_images and self.summer is None and self.setting.config.privacy.limit <= 1

    def commit(self) -> None:
        """The round is complete; what sites keep becomes their state."""
        self.states.commit()

    def entry_bytes(self) -> dict[str, float]:
        """What sites have sent in this round, by entry: the mean over sites, in bytes."""
        total = sum(self.entries.values(), Counter[str]())
        return {name: size / len(self.entries) for name, size in total.items()}

    def ask(self, ask: Ask) -> Generator[None, None, Replies]:
        """Let the asked sites perform the action; returns the sound replies in site order, yields between steps."""
        self._check(ask)
        measure = self._parts_after_training() if ask.action == "train" else ()
        view = "personal" if "personal" in self.views else "global"
        requests = [
            Request(
                action=ask.action,
                site=site,
                round=self._round,
                index=self._index,
                measure=measure,
                views=(view,),
            )
            for site in sorted(ask.sites, key=self._rank)
            if site not in self.failed
        ]
        version = f"{self._round:05d}-{self._attempt}-{self._index}"
        replies: list[Reply] = []
        outcomes = yield from self.place.run(requests, ask, version)
        for request, outcome in zip(requests, outcomes):
            if isinstance(outcome, SiteFailure):
                if isinstance(outcome, Diverged):
                    self.diverged.add(request.site)
                self._fail(request.site, str(outcome))
                continue
            replies.append(Reply(request.site, outcome.payload))
            self._note(request.site, outcome, ask)
        self._index += 1
        sound = self._sound(replies, ask)
        if self.summer is None:
            return Replies(sound, dict(self.failed))
        return self._added(sound, ask, {f"{view}.{part}" for part in measure})

    def evaluate(
        self, message: Mapping[str, Value | PerSite], requests: Sequence[Request], round_number: int
    ) -> Generator[None, None, list[tuple[Request, Outcome]]]:
        """Measure the models of a round at sites; nothing that sites keep changes.

        Gives each request with its outcome; with secure sums those of all sites together.
        """
        known = shared_part(message)
        own = {name: value for name, value in message.items() if isinstance(value, PerSite)}
        sites = {request.site for request in requests}
        filled = {
            name: PerSite({site: value.values.get(site, next(iter(value.values.values()))) for site in sites})
            for name, value in own.items()
        }
        ask = Ask(EVALUATE, sorted(sites, key=self._rank), **known, **filled)
        asked = [replace(request, action=EVALUATE, round=max(round_number, 1)) for request in requests]
        if not self.tells_scores:
            asked = [replace(request, scores=False) for request in asked]
        outcomes = yield from self.place.run(asked, ask, version="")
        found = [
            (request, self._unmeasured(request, outcome) if isinstance(outcome, SiteFailure) else outcome)
            for request, outcome in zip(asked, outcomes)
        ]
        return found if self.summer is None else self._measured_together(found)

    def publish(
        self, folder: Path, message: Mapping[str, Value | PerSite], sites: Sequence[str], whole: bool = False
    ) -> Generator[None, None, None]:
        """Write out the models of the present state: the server's in `folder`, personal ones where they belong.

        Personal models are complete with `whole`, and need the server's beside them without.
        """
        write_payload(folder / "global.safetensors", shared_part(message))
        yield from ()

    # ---- secure sums ------------------------------------------------------------------------------

    def is_site(self, name: str) -> bool:
        """Whether a name is a site's, and not that of a common set or a cohort."""
        raise NotImplementedError

    def _added(self, replies: list[Reply], ask: Ask, measured: Collection[str]) -> Sums:
        """The sum of sound replies, with what was measured; each site has checked its own."""
        assert self.summer is not None
        parts: dict[str, tuple[str, Tensor]] = {}
        for reply in replies:
            counts = self.measures.pop(reply.site, {})
            try:
                self.summer.check(reply.payload, ask.message(reply.site))
                parts[reply.site] = self.summer.part(ask.action, reply.payload, counts, measured, len(ask.sites))
            except TooLarge as problem:
                self._fail(reply.site, f"{ask.action}: {problem}")
        return self._opened(ask.action, [*parts], [*parts.values()])

    def _opened(self, action: str, sites: Sequence[str], parts: Sequence[tuple[str, Tensor]]) -> Sums:
        """The sum of some parts as replies; of fewer than three sites nothing is opened."""
        assert self.summer is not None
        if len(parts) < LEAST_SUMMED:
            return Sums({}, sites, dict(self.failed))
        words, total = parts[0][0], sum_of([vector for _, vector in parts])
        whole, measures = self.summer.whole(action, words, total, len(parts))
        self.measures.setdefault(ALL_SITES, {}).update(measures)
        return Sums(whole, sites, dict(self.failed))

    def _measured_together(self, found: Sequence[tuple[Request, Outcome]]) -> list[tuple[Request, Outcome]]:
        """Measurements at places that are no site, and the sum of all others' in place of each."""
        assert self.summer is not None
        told = [(request, outcome) for request, outcome in found if not self.is_site(request.site)]
        for members in together([request for request, _ in found if self.is_site(request.site)]):
            outcomes = [outcome for request, outcome in found if request in members]
            places = measured_by(members)
            parts = [self.summer.part(EVALUATE, {}, o.measures, places, len(members)) for o in outcomes]
            told.append(self._counted(members, [vector for _, vector in parts], parts[0][0] if parts else ""))
        return told

    def _counted(self, members: Sequence[Request], vectors: Sequence[Tensor], words: str) -> tuple[Request, Outcome]:
        """The counts of some sites together, as one request with its outcome."""
        assert self.summer is not None
        request = replace(members[0], site=ALL_SITES)
        if len(vectors) < LEAST_SUMMED:
            self.undone[ALL_SITES, "measure the models"] = (
                f"{len(vectors)} answered, and a secure sum needs {LEAST_SUMMED}"
            )
            return request, Outcome()
        _, measures = self.summer.whole(EVALUATE, words, sum_of(vectors), len(vectors))
        return request, Outcome(measures=measures)

    # ---- what comes back --------------------------------------------------------------------------

    def _rank(self, site: str) -> int:
        return self._order[site]

    def _parts_after_training(self) -> tuple[str, ...]:
        """The parts that sites measure their models on before these are averaged."""
        config = self.setting.config
        wanted = {
            "valid": config.evaluation.trained,
            "test": config.evaluation.trained_test and config.may_report(self._round),
        }
        return tuple(part for part, asked in wanted.items() if asked)

    def _check(self, ask: Ask) -> None:
        unknown = set(ask.sites) - self._order.keys()
        if unknown:
            raise ValueError(f"the server asks unknown sites: {', '.join(sorted(unknown))}")
        if not callable(getattr(self.client, ask.action, None)):
            raise ValueError(f"{self.client.__name__} has no action '{ask.action}'")
        for site in ask.sites:
            check_payload(ask.message(site), f"Ask('{ask.action}')")

    def _unmeasured(self, request: Request, failure: SiteFailure) -> Outcome:
        """What stands for a measurement that a site did not deliver."""
        raise RuntimeError(f"evaluation failed: {failure}")

    def _note(self, site: str, outcome: Outcome, ask: Ask) -> None:
        facts = self.facts.setdefault(site, {"sent": 0, "received": 0, "seconds": 0})
        sizes = {name: payload_bytes({name: value}) for name, value in outcome.payload.items()}
        if self.summer is not None:  # whole numbers of 64 bits travel
            sizes = {name: numbers_in(value) * 8 for name, value in outcome.payload.items()}
        if outcome.notes and self.tells_scores:
            added(self.notes.setdefault(site, {}), outcome.notes)
        sent = outcome.facts.pop("sent", None) or sum(sizes.values())
        facts["sent"] += sent
        facts["received"] += outcome.facts.pop("received", None) or payload_bytes(ask.message(site))
        facts["seconds"] += outcome.facts.pop("seconds", 0.0)
        if self.summer is None:  # else a site tells nothing of its training
            _add_training(facts, outcome.facts)
        shrunk = sent / max(sum(sizes.values()), 1)  # by half precision on the way
        self.entries.setdefault(site, Counter()).update({name: round(size * shrunk) for name, size in sizes.items()})
        self.measures.setdefault(site, {}).update(outcome.measures)

    def _fail(self, site: str, why: str) -> None:
        self.failed[site] = why
        self.facts.pop(site, None)
        self.entries.pop(site, None)
        self.notes.pop(site, None)
        self.measures.pop(site, None)
        self.states.rollback([site])

    def _sound(self, replies: list[Reply], ask: Ask) -> list[Reply]:
        """Leave out replies that are not declared, not finite or not shaped as asked: their sites are out."""
        replies = self._without(replies, ask, {reply.site: self._own_problem(reply, ask) for reply in replies})
        signatures = {reply.site: signature(reply.payload) for reply in replies}
        expected = _expected(signatures, ask)
        return self._without(replies, ask, {site: _difference(own, expected) for site, own in signatures.items()})

    def _own_problem(self, reply: Reply, ask: Ask) -> str | None:
        """What is wrong with a reply, judged without the others."""
        undeclared = reply.payload.keys() - self.client.discloses.get(ask.action, {}).keys()
        if undeclared:
            return f"'{min(undeclared)}' is not on the method's disclosure sheet"
        if entry := first_unfinite(reply.payload):
            self.diverged.add(reply.site)
            return f"'{entry}' holds NaN or infinity"
        return None

    def _without(self, replies: list[Reply], ask: Ask, problems: Mapping[str, str | None]) -> list[Reply]:
        """The replies without a problem; the sites of the others are out of the round."""
        for site, problem in problems.items():
            if problem is not None:
                self._fail(site, f"{ask.action}: {problem}")
        return [reply for reply in replies if problems[reply.site] is None]


def shared_part(message: Mapping[str, Value | PerSite]) -> Payload:
    """The entries of a message that are the same for every site."""
    return {name: value for name, value in message.items() if not isinstance(value, PerSite)}


#: in place of a shape: sites differ without a majority
DISPUTED = "disputed"

#: what a site tells of its training in one ask
TRAINING = {"loss", "examples", "steps"}


def _add_training(facts: dict[str, float], more: Mapping[str, float]) -> None:
    """Add the training of one more ask to a site's facts of a round; the loss is the mean over all examples."""
    if not (more.keys() >= TRAINING and more["examples"] > 0):  # no training, or a site elsewhere that tells less
        return
    before = facts.get("examples", 0)
    examples = before + more["examples"]
    loss = (facts["loss"] * before + more["loss"] * more["examples"]) / examples if before else more["loss"]
    facts.update(loss=loss, examples=examples, steps=facts.get("steps", 0) + more["steps"])


def _expected(signatures: Mapping[str, dict[str, Any]], ask: Ask) -> dict[str, Any]:
    """What a reply should look like. Entries that were sent come back in the same shape. All others are like those of
    most sites, among those that do not contradict the message.

    An entry on which no more than half of them agree (two sites that differ, say) is in dispute.
    """
    if not signatures:
        return {}
    sent = signature(ask.message(next(iter(signatures))))
    faithful = [own for own in signatures.values() if all(own[name] == sent[name] for name in own.keys() & sent.keys())]
    expected = dict[str, Any]()
    for name in {name for own in faithful for name in own}:
        shape, votes = Counter(own.get(name) for own in faithful).most_common(1)[0]
        if 2 * votes <= len(faithful):
            expected[name] = DISPUTED
        elif shape is not None:
            expected[name] = shape
    return expected if faithful else sent


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    for name in expected.keys() | found.keys():
        if name not in found:
            return f"'{name}' is missing"
        if name not in expected:
            return f"'{name}' was not expected"
        if expected[name] == DISPUTED:
            return f"'{name}' is {found[name]} here and something else elsewhere, and most sites agree on neither"
        if found[name] != expected[name]:
            return f"'{name}' is {found[name]}, expected {expected[name]}"
    return None
