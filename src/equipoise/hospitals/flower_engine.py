"""The engine between hospitals: the same generators, with each request sent to a site as a parcel.

Rounds are transactions. A message names the version of the site's state that it starts from and the one it leads to.
The site answers a repeated message from its stored reply. So a server that died in a round asks again and gets the same
bits. Accepted replies are also journaled here and fed back first.
Nothing in this file knows how parcels travel: a `Post` does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from equipoise.contract.disclosed import rule_of
from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import Ask, PerSite, Reply, SiteFailure, Sums, Value
from equipoise.core.errors import UserError
from equipoise.engine.engine import Engine
from equipoise.engine.slot import EVALUATE, Outcome, Request
from equipoise.engine.summing import ALL_SITES, length_of_update, numbers_in, together
from equipoise.hospitals.bounds import absurd, chance, share_of, size_of
from equipoise.hospitals.exchange import PUBLISH, FlowerOptions, Hospitals, Post, RemoteVersions, Roster
from equipoise.hospitals.journal import Journal
from equipoise.hospitals.replies import plausible, words_of
from equipoise.hospitals.secure_sums import SummingHospitals


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
        if why := setting.options.only_simulated():
            raise UserError(f"{why}; leave it out between hospitals, or simulate")
        super().__init__(method, setting, [*roster.sites, *roster.hosts], RemoteVersions())
        self.options = options
        self.post = post
        self.roster = roster
        self.journal = Journal(folder / "journal", keep_updates)
        kind = Hospitals if self.summer is None else SummingHospitals
        self.place: Hospitals = kind(setting, options, post, roster, self.states, self.journal)

    @property
    def elsewhere(self) -> bool:
        """Whether sites work in other processes."""
        return True

    def is_site(self, name: str) -> bool:
        """Whether a name is a site's, and not that of a common set or a cohort."""
        return name in self.roster.sites

    def begin(self, round_number: int, attempt: int) -> None:
        """Start a round anew; replies of this round that were journaled before a crash stay."""
        super().begin(round_number, attempt)
        self.journal.keep_only(round_number)
        if attempt:  # too few sites answered: give them time to come back; the start needs them all
            enough = self.setting.config.least_answers if round_number else len(self.roster.sites)
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
        answers = yield from super().evaluate(message, without, round_number)
        asked = [request for request, _ in answers]
        return [*zip(asked, self._plausible(asked, [outcome for _, outcome in answers]))]

    def _added(self, replies: list[Reply], ask: Ask, measured: Collection[str]) -> Sums:
        """The sum of masked replies, which has been opened."""
        assert self.summer is not None and isinstance(self.place, SummingHospitals)
        opened = self.place.opened.get("")
        if opened is None:
            return Sums({}, [reply.site for reply in replies], dict(self.failed))
        whole, measures = self.summer.whole(ask.action, opened.words, opened.total, len(opened.sites))
        self.measures.setdefault(ALL_SITES, {}).update(measures)
        sizes = {name: numbers_in(value) * 8 for name, value in whole.items()}
        for site in opened.sites:
            self.entries.setdefault(site, Counter()).update(sizes)
        return Sums(whole, opened.sites, dict(self.failed))

    def _measured_together(self, found: Sequence[tuple[Request, Outcome]]) -> list[tuple[Request, Outcome]]:
        assert self.summer is not None and isinstance(self.place, SummingHospitals)
        told = [(request, outcome) for request, outcome in found if not self.is_site(request.site)]
        for members in together([request for request, _ in found if self.is_site(request.site)]):
            request, opened = replace(members[0], site=ALL_SITES), self.place.opened.get(members[0].data)
            if opened is None:
                self.undone[ALL_SITES, "measure the models"] = "too few sites answered for a secure sum"
                told.append((request, Outcome()))
                continue
            _, measures = self.summer.whole(EVALUATE, opened.words, opened.total, len(opened.sites))
            told.append((request, Outcome(measures=measures)))
        return told

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

    def _plausible(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes, without the measurements of sites whose loss is absurd beside the others'."""
        losses: dict[str, dict[int, float]] = {}
        for place, outcome in enumerate(outcomes):
            for key, counts in outcome.measures.items():
                losses.setdefault(key, {})[place] = loss_of(counts)
        found = list(outcomes)
        for key, by_place in losses.items():
            named = {str(place): loss for place, loss in by_place.items()}
            absurd_ones = self._absurd(named, self.options.loss_bound, chance(self.setting.num_classes))
            for name, how in absurd_ones.items():
                why = SiteFailure(f"its loss of '{key}' is {how}")
                found[int(name)] = self._unmeasured(requests[int(name)], why)
        return found

    def _sound(self, replies: list[Reply], ask: Ask) -> list[Reply]:
        """Also leave out replies that are absurd beside those of the others: updates, losses, what else is reported."""
        sound = super()._sound(replies, ask)
        lengths = {reply.site: length_of_update(reply.payload, ask.message(reply.site)) for reply in sound}
        sound = self._without_absurd(sound, ask, "its update", lengths, self.options.norm_bound, in_proportion=True)
        for what, values, least in self._reported(sound, ask):
            sound = self._without_absurd(sound, ask, what, values, self.options.loss_bound, least)
        return sound

    def _reported(self, replies: list[Reply], ask: Ask) -> list[tuple[str, dict[str, float], float]]:
        """What sites report besides the tensors that they were sent: each quantity by site, and what is least usual."""
        guessed, sites = chance(self.setting.num_classes), [reply.site for reply in replies]
        facts = {site: self.facts[site]["loss"] for site in sites if "loss" in self.facts.get(site, {})}
        quantities = [("its training loss", facts, guessed)]
        for key in sorted({key for site in sites for key in self.measures.get(site, {})}):
            measured = {site: self.measures[site][key] for site in sites if key in self.measures.get(site, {})}
            losses = {site: loss_of(counts) for site, counts in measured.items()}
            quantities.append((f"its loss of '{key}'", losses, guessed))
        for entry, text in self.client.discloses.get(ask.action, {}).items():
            sizes = {
                r.site: size for r in replies if (size := _size(entry, r.payload, ask.message(r.site))) is not None
            }
            per_image = {site: size / max(self.roster.examples.get(site, 1), 1) for site, size in sizes.items()}
            if rule_of(text) == "images":
                continue  # hospitals differ in size, and they have described theirs
            adds_up = rule_of(text) in ("by_class", "total") and "loss" in entry
            quantities.append((f"'{entry}'", per_image, guessed) if adds_up else (f"'{entry}'", sizes, 0.0))
        return quantities

    def _without_absurd(
        self,
        replies: list[Reply],
        ask: Ask,
        what: str,
        values: Mapping[str, float],
        multiple: float,
        least: float = 0.0,
        in_proportion: bool = False,
    ) -> list[Reply]:
        present = {reply.site: values[reply.site] for reply in replies if reply.site in values}
        found = self._absurd(present, multiple, least, in_proportion)
        return self._without(replies, ask, {r.site: _told(what, found.get(r.site)) for r in replies})

    def _absurd(
        self, values: Mapping[str, float], multiple: float, least: float = 0.0, in_proportion: bool = False
    ) -> dict[str, str]:
        """Sites whose value is out of proportion; NaN, which a model that diverged has, is no lie."""
        known = {site: value for site, value in values.items() if not math.isnan(value)}
        scaled = in_proportion and self.setting.config.train.steps is None
        share = {site: share_of(self.roster.examples, site, [*known]) if scaled else 1.0 for site in known}
        return absurd(known, {site: multiple * share[site] for site in known}, least)

    def _own_problem(self, reply: Reply, ask: Ask) -> str | None:
        """Also whether a site claims other numbers of training images than it described: averages are weighted by
        them."""
        counts = self.roster.counts.get(reply.site, {}).get("train")
        told = self.roster.examples.get(reply.site)
        for entry, text in self.client.discloses.get(ask.action, {}).items():
            claimed, rule = reply.payload.get(entry), rule_of(text)
            if claimed is None:
                continue
            if isinstance(claimed, int | float) and not plausible(claimed):
                return f"'{entry}' is {words_of(claimed)}, which no work comes to"
            if rule == "steps" and not (isinstance(claimed, int | float) and 1 <= claimed <= self._most_steps(told)):
                return f"'{entry}' is {words_of(claimed)}, which its training does not come to"
            if rule == "images" and told is not None and (type(claimed) is not int or claimed != told):
                return f"it claims {words_of(claimed)} training images, but has {told}"
            if rule == "counts" and counts is not None and not _same_counts(claimed, counts):
                return f"'{entry}' is {words_of(claimed)}, but it described {list(counts)}"
            if rule in ("share", "shares") and not (isinstance(claimed, int | float) and 0 <= claimed <= 1):
                return f"'{entry}' is {words_of(claimed)}, which is no share"
        return super()._own_problem(reply, ask)

    def _most_steps(self, images: int | None) -> float:
        """How long the local training of so many images can be in steps, with the momentum of those before."""
        train, limit = self.setting.config.train, self.setting.config.privacy.limit
        untold = max(limit - 1, 0) * self.setting.num_classes  # images of classes that privacy.least holds back
        in_epoch = math.inf if images is None else math.ceil((images + untold) / train.batch_size) + 1
        steps = train.steps or train.epochs * in_epoch
        return steps / (1 - min(train.optimiser.momentum, 0.999))


def loss_of(counts: Mapping[str, Tensor]) -> float:
    """The mean loss of an image."""
    return abs(float(counts["loss"])) / max(int(counts["confusion"].sum()), 1)


def _told(what: str, how: str | None) -> str | None:
    return None if how is None else f"{what} is {how}"


def _same_counts(claimed: Value, counts: Sequence[int]) -> bool:
    """Whether a tensor holds these numbers of images."""
    return isinstance(claimed, Tensor) and claimed.shape == (len(counts),) and claimed.tolist() == list(counts)


def _size(entry: str, payload: Mapping[str, Value], message: Mapping[str, Value]) -> float | None:
    """How large an entry of a reply is; None for one that was sent, which counts as an update."""
    return None if entry in message or entry not in payload else size_of(payload[entry])
