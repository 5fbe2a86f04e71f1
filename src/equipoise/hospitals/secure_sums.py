"""Secure sums between hospitals, the server's part: it routes keys and shares, adds masked numbers, and opens the sum.

Each sum needs four questions to the sites: fresh keys, shares of them, the action with its masked reply, and the shares
that open the sum. The engine asks for replies as ever, and gets sums.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from equipoise.contract.protocol import Ask, SiteFailure
from equipoise.contract.tables import LEAST_SUMMED
from equipoise.engine.engine import Outcomes
from equipoise.engine.slot import Outcome, Request
from equipoise.engine.summing import measured_by, together
from equipoise.hospitals.exchange import Hospitals
from equipoise.hospitals.journal import Answer
from equipoise.hospitals.pairwise_masks import own_mask, pair_mask, public_half, secret_of, threshold
from equipoise.hospitals.parcels import Parcel, UnreadableParcel, prepare, seal
from equipoise.hospitals.replies import words_of
from equipoise.hospitals.sum_desk import KEYS, OPEN, SHARES
from equipoise.sums import length, read_layout

#: entries of a masked reply
MASKED, COLUMNS = "masked", "columns"


@dataclass(frozen=True)
class Opened:
    """A sum: its columns in words, the numbers (n,), and the sites that are in it."""

    words: str
    total: Tensor
    sites: tuple[str, ...]


class NotOpened(Exception):
    """A sum that cannot be had; each of its sites is out of the round."""


class SummingHospitals(Hospitals):
    """Performs requests at sites so that only sums come back."""

    #: the sums of the last requests, by the place whose images were measured
    opened: dict[str, Opened]
    _asked: dict[str, dict[str, Any]]

    def run(self, requests: Sequence[Request], ask: Ask, version: str) -> Outcomes:
        """Perform all requests. Of a site's own, the numbers are in `opened` and the outcome is empty."""
        self.opened, self._asked = {}, {}
        summed = [request for request in requests if request.site in self.roster.sites]
        found: dict[int, Outcome | SiteFailure] = {}
        for members in together(summed):
            outcomes = self._summed(members, ask, version)
            found |= {id(request): outcome for request, outcome in zip(members, outcomes)}
        others = [request for request in requests if request.site not in self.roster.sites]
        told = yield from super().run(others, ask, "")
        found |= {id(request): outcome for request, outcome in zip(others, told)}
        return [found[id(request)] for request in requests]

    def _more(self, request: Request) -> dict[str, Any]:
        return {"sum": self._asked[request.site]} if request.site in self._asked else {}

    def _summed(self, members: Sequence[Request], ask: Ask, version: str) -> list[Outcome | SiteFailure]:
        """The outcomes of requests whose replies are added up; opens their sum."""
        number = f"{version or members[0].action}-{secrets.token_hex(16)}"
        lost: dict[str, SiteFailure] = {}
        sites = [request.site for request in members]
        try:
            keys = self._say(KEYS, sites, lost, {site: {"number": number} for site in sites})
            _enough(keys)
            asked = {site: {"number": number, "keys": keys} for site in keys}
            shares = {site: told["shares"] for site, told in self._say(SHARES, list(keys), lost, asked).items()}
            _enough(shares, threshold(len(keys)))
            outcomes, masked = self._masked(members, ask, version, number, shares, lost)
            self.opened[members[0].data] = self._open(number, keys, list(shares), masked, lost)
        except NotOpened as problem:
            return [lost.get(site) or SiteFailure(str(problem)) for site in sites]
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            return [SiteFailure(f"the secure sum failed: {words_of(problem)}")] * len(members)
        if version:
            for site in self.opened[members[0].data].sites:
                if outcomes[site].kept:
                    self.states.note(site, version)
        return [lost[site] if site in lost else outcomes[site].outcome for site in sites]

    def _masked(
        self,
        members: Sequence[Request],
        ask: Ask,
        version: str,
        number: str,
        shares: Mapping[str, Mapping[str, str]],
        lost: dict[str, SiteFailure],
    ) -> tuple[dict[str, Answer], dict[str, tuple[str, Tensor]]]:
        """Let sites perform the action, and gather their masked numbers with the columns in words."""
        places, sites = sorted(measured_by(members)), list(shares)
        self._asked = {
            site: {
                "number": number,
                "sites": len(members),
                "measured": places,
                "shares": {other: shares[other][site] for other in sites if other != site},
            }
            for site in sites
        }
        messages = self._messages([request for request in members if request.site in shares], ask, version)
        self._asked = {}
        answers, found = dict[str, Answer](), dict[str, tuple[str, Tensor]]()
        for message, answer in zip(messages, self._exchange(messages, "")):
            site = message.request.site
            if isinstance(answer, SiteFailure):
                lost[site] = answer
                continue
            payload = answer.outcome.payload
            words, numbers = payload.get(COLUMNS), payload.get(MASKED)
            fits = isinstance(words, str) and isinstance(numbers, Tensor) and numbers.dtype == torch.int64
            if not fits or tuple(numbers.shape) != (length(read_layout(words)),):  # type: ignore[union-attr, arg-type]
                lost[site] = SiteFailure("its part of the secure sum is none")
                continue
            answer.outcome.payload = {}
            answers[site], found[site] = answer, (words, numbers)  # type: ignore[assignment]
        usual = Counter(words for words, _ in found.values()).most_common(1)
        for site, (words, _) in list(found.items()):
            if words != usual[0][0]:
                lost[site] = SiteFailure("its part of the secure sum has other columns than most")
                del found[site]
        _enough(found, threshold(len(shares)))
        return answers, found

    def _open(
        self,
        number: str,
        keys: Mapping[str, Mapping[str, str]],
        sites: Sequence[str],
        masked: Mapping[str, tuple[str, Tensor]],
        lost: dict[str, SiteFailure],
    ) -> Opened:
        """Take the masks off the sum of the sites that answered."""
        survivors = sorted(masked)
        asked = {site: {"number": number, "survivors": survivors} for site in survivors}
        mute: dict[str, SiteFailure] = {}
        told = self._say(OPEN, survivors, mute, asked)
        places = {site: place for place, site in enumerate(sorted(keys))}
        least = threshold(len(keys))
        if len(told) < least:
            why = "".join(f"; {site}: {failure}" for site, failure in [*mute.items()][:1])
            raise NotOpened(f"{len(told)} of {least} sites gave the shares that open the secure sum{why}")
        givers = sorted(told)[:least]
        size = len(next(iter(masked.values()))[1])
        total = torch.zeros(size, dtype=torch.int64)
        for _, numbers in masked.values():
            total += numbers
        for site in sites:
            secret = secret_of({places[giver]: bytes.fromhex(told[giver]["shares"][site]) for giver in givers})
            if site in masked:
                total -= own_mask(secret, number, size)
                continue
            if public_half(secret).hex() != keys[site]["mask"]:
                raise NotOpened(f"the shares of the key of '{site}' do not belong together")
            for other in survivors:  # what each survivor added for its pair with the lost site
                public = bytes.fromhex(keys[other]["mask"])
                total += pair_mask(secret, public, site, other, number, size)
        return Opened(next(iter(masked.values()))[0], total, tuple(site for site in sites if site in masked))

    def _say(
        self, action: str, sites: Sequence[str], lost: dict[str, SiteFailure], asked: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Ask sites about a sum; their answers, in order. Sites without one are lost."""
        parcels = [
            (site, seal(prepare({}), action=action, run=self.roster.run, site=site, config=self._config,
                        described={site: self.roster.described[site]} if site in self.roster.described else {},
                        sum=asked[site]))
            for site in sites
        ]  # fmt: skip
        found = {}
        for (site, parcel), reply in zip(parcels, self._send(parcels)):
            if isinstance(reply, SiteFailure):
                lost[site] = reply
                continue
            self._count(site, reply.size, parcel.size)
            try:
                found[site] = _said(reply)
            except (UnreadableParcel, SiteFailure) as problem:
                lost[site] = problem if isinstance(problem, SiteFailure) else SiteFailure(str(problem))
        return found


def _said(reply: Parcel) -> dict[str, Any]:
    header = reply.header
    if "error" in header:
        raise SiteFailure(words_of(header["error"]))
    if not isinstance(header.get("sum"), dict):
        raise SiteFailure("its answer about a secure sum cannot be read")
    found: dict[str, Any] = header["sum"]
    return found


def _enough(found: Mapping[str, object], least: int = 0) -> None:
    """Give a sum up that too few sites take part in."""
    wanted = max(LEAST_SUMMED, least)
    if len(found) < wanted:
        raise NotOpened(f"{len(found)} sites answered, and this secure sum needs {wanted}")
