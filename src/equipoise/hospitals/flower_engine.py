"""The engine between hospitals: the same generators, with each request sent to a site as a parcel.

Rounds are transactions. A message names the version of the site's state it starts from and the one it leads to; the
site computes from that base and answers a repeated message from its stored reply, so a server that died in the
middle of a round asks again and gets the same bits. Accepted replies are also journaled here and fed back first.
Nothing in this file knows how parcels travel: a `Post` does.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import Ask, PerSite, Reply, SiteFailure, Value, flatten
from equipoise.core.errors import UserError
from equipoise.engine.base import Engine
from equipoise.engine.slot import Outcome, Request
from equipoise.hospitals.exchange import PUBLISH, FlowerOptions, Hospitals, Post, RemoteVersions, Roster
from equipoise.hospitals.journal import Journal
from equipoise.hospitals.replies import words_of


class FlowerEngine(Engine):
    """Drives hospitals through a post."""

    states: RemoteVersions

    def __init__(
        self,
        method: Method,
        setting: Setting,
        folder: Path,
        post: Post,
        roster: Roster,
        options: FlowerOptions,
        keep_updates: bool = False,
    ):
        if setting.config.privacy.secure_sums:
            raise UserError("privacy.secure_sums is not there between hospitals yet: set it to false, or simulate")
        super().__init__(method, setting, [*roster.sites, *roster.hosts], RemoteVersions())
        self.options = options
        self.post = post
        self.roster = roster
        self.journal = Journal(folder / "journal", keep_updates)
        self.place: Hospitals = Hospitals(setting, options, post, roster, self.states, self.journal)

    def is_site(self, name: str) -> bool:
        """Whether a name is a site's, and not that of a common set or a cohort."""
        return name in self.roster.sites

    def begin(self, round_number: int, attempt: int) -> None:
        """Start a round anew; replies of this round that were journaled before a crash stay."""
        super().begin(round_number, attempt)
        self.journal.keep_only(round_number)
        if attempt:  # too few sites answered: give them time to come back; the start needs them all
            enough = self.setting.config.train.min_sites if round_number else len(self.roster.sites)
            self.post.gather(self.roster.sites, enough, self.options.timeout)

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)
        if not any(problem):
            self.journal.close()

    def evaluate(
        self, message: Mapping[str, Value | PerSite], requests: Sequence[Request], round_number: int
    ) -> Generator[None, None, list[tuple[Request, Outcome]]]:
        """Measure models at sites; raw scores of single patients are never asked for."""
        without = [replace(request, scores=False) for request in requests]
        return (yield from super().evaluate(message, without, round_number))

    def publish(
        self, folder: Path, message: Mapping[str, Value | PerSite], sites: Sequence[str], whole: bool = False
    ) -> Generator[None, None, None]:
        """Write out the global model here; each site writes its own, always whole, and a copy of the global one."""
        yield from super().publish(folder, message, sites)
        ask = Ask(PUBLISH, sites, **message)
        outcomes = yield from self.place.run([Request(PUBLISH, site, self._round) for site in sites], ask, version="")
        for site, outcome in zip(sites, outcomes):
            if isinstance(outcome, SiteFailure):
                self.undone[site, "write out the selected models"] = str(outcome)

    def _unmeasured(self, request: Request, failure: SiteFailure) -> Outcome:
        self.undone[request.site, "measure the models"] = str(failure)
        return Outcome()

    def _sound(self, replies: list[Reply], ask: Ask) -> list[Reply]:
        """Also leave out updates that are absurdly long beside those of the others."""
        sound = super()._sound(replies, ask)
        lengths = {reply.site: _length(reply.payload, ask.message(reply.site)) for reply in sound}
        return self._without(sound, ask, {site: self._overlong(site, lengths) for site in lengths})

    def _overlong(self, site: str, lengths: Mapping[str, float]) -> str | None:
        others = [length for other, length in lengths.items() if other != site]
        usual = median(others) if others else 0.0
        if usual > 0 and lengths[site] > self.options.norm_bound * usual:
            return f"its update is {lengths[site] / usual:.0f} times as long as the others'"
        return None

    def _own_problem(self, reply: Reply, ask: Ask) -> str | None:
        """Also whether a site claims as many training images as it said it has: averages are weighted by them."""
        told = self.roster.examples.get(reply.site)
        claimed = reply.payload.get("examples", told)
        if told is not None and (type(claimed) is not int or claimed != told):
            return f"it claims {words_of(claimed)} training images, but has {told}"
        return super()._own_problem(reply, ask)


def _length(payload: Mapping[str, Value], message: Mapping[str, Value]) -> float:
    """How far a site has moved the weights that it was sent, as a Euclidean length; counts and sums do not matter."""
    tensors, sent = flatten(payload)[0], flatten(message)[0]
    moved = [t.double() - sent[name].double() for name, t in tensors.items() if name in sent and t.is_floating_point()]
    return float(sum(change.square().sum() for change in moved)) ** 0.5
