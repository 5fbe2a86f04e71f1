"""Parcels over Flower's grid: sites found by their keys, replies polled often, silence and errors told as failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flwr.app import Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from equipoise.contract.protocol import SiteFailure
from equipoise.engine.disclosure import DESCRIBE
from equipoise.hospitals.brisk import until
from equipoise.hospitals.parcels import Parcel, UnreadableParcel, prepare, seal
from equipoise.hospitals.records import RecordMaker, from_records
from equipoise.hospitals.security import check_reply

#: seconds between two looks for replies; Flower's own `send_and_receive` waits three
INTERVAL = 0.3
#: replies that are fetched at the same time
LANES = 4
#: seconds that a site which is not connected has to come back before a message passes it by
GRACE = 20.0
#: what Flower answers in the name of a node that is gone, though it may still list it as connected
UNREACHED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


class Unreachable(SiteFailure):
    """A site that a message did not reach, or that did not answer in time; it may come back."""


class GridPost:
    """Brings parcels to the nodes of a Flower run.

    Args:
        keys: {site: public keys of its node}; empty where nodes have no keys and say themselves who they are
        sign: signs parcels in the coordinator's name
    """

    def __init__(
        self, grid: Grid, keys: Mapping[str, Sequence[bytes]], sign: Callable[[Parcel], Parcel] = lambda parcel: parcel
    ):
        self.grid = grid
        self.keys = dict(keys)
        self.sign = sign
        self._claimed: dict[int, str] = {}
        self._away: set[str] = set()

    def online(self) -> dict[str, int]:
        """The connected sites and their nodes."""
        nodes = [node for node in self.grid.get_nodes() if node.status in ("", "online")]  # type: ignore[attr-defined]
        if self.keys:
            names = {key: site for site, own in self.keys.items() for key in own}
            return {names[node.public_key]: node.node_id for node in nodes if node.public_key in names}
        strangers = [node.node_id for node in nodes if node.node_id not in self._claimed]
        for node_id, reply in zip(strangers, self._deliver([(n, _question({})) for n in strangers], 60.0)):
            if isinstance(reply, Parcel) and "description" in reply.header:
                self._claimed[node_id] = reply.header["description"]["site"]
        # A site that was restarted without a key is a new node: the newest counts.
        return {self._claimed[node.node_id]: node.node_id for node in nodes if node.node_id in self._claimed}

    def describe(self, sites: Sequence[str], **fields: Any) -> list[Parcel | SiteFailure]:
        """Ask sites what data they have."""
        return self.exchange([(site, _question(fields)) for site in sites], 120.0)

    def exchange(self, parcels: Sequence[tuple[str, Parcel]], timeout: float) -> list[Parcel | SiteFailure]:
        """Deliver each parcel to its site; replies, or why there is none, in the same order."""
        online = self._present({site for site, _ in parcels})
        asked = [(site, self.sign(parcel)) for site, parcel in parcels if site in online]
        delivered = self._deliver([(online[site], parcel) for site, parcel in asked], timeout)
        replies = iter([self._checked(site, parcel, reply) for (site, parcel), reply in zip(asked, delivered)])
        return [next(replies) if site in online else Unreachable("it is not connected") for site, _ in parcels]

    def _checked(self, site: str, question: Parcel, reply: Parcel | SiteFailure) -> Parcel | SiteFailure:
        """A reply, if the site itself has signed it; a member could have pushed it in the site's name."""
        if isinstance(reply, Parcel) and self.keys:
            try:
                check_reply(self.keys[site], reply, question)
            except UnreadableParcel as problem:
                return SiteFailure(f"its reply is refused: {problem}")
        return reply

    def gather(self, sites: Sequence[str], enough: int, patience: float) -> list[str]:
        """Wait until enough of the sites are connected, or patience ends; gives those that are not."""
        deadline = time.monotonic() + patience
        while True:
            online = self.online()
            missing = [site for site in sites if site not in online]
            if len(sites) - len(missing) >= enough or time.monotonic() > deadline:
                return missing
            time.sleep(0.5)

    def _present(self, sites: set[str]) -> dict[str, int]:
        """The nodes of connected sites; a site that has just gone is given a moment, one long gone is not."""
        wanted = sorted(sites - self._away)
        self._away = set(self.gather(wanted, len(wanted), GRACE)) | (self._away & sites)
        online = self.online()
        self._away -= online.keys()
        return online

    def _deliver(self, parcels: Sequence[tuple[int, Parcel]], timeout: float) -> list[Parcel | SiteFailure]:
        """Push messages one by one, so that none is too large, and look for the replies until time is up."""
        waiting: dict[str, int] = {}
        results: list[Parcel | SiteFailure] = [Unreachable("Flower did not take the message")] * len(parcels)
        maker = RecordMaker()
        for position, (node_id, parcel) in enumerate(parcels):
            message = Message(maker.make(parcel), node_id, "query", ttl=timeout)
            for message_id in self.grid.push_messages([message]):
                if message_id:
                    waiting[message_id] = position
                    results[position] = Unreachable(f"no answer within {timeout:.0f} s")
        deadline = time.monotonic() + timeout
        time_is_up = False
        while waiting and not time_is_up:
            # A site that announces a reply and then dawdles may use up all time: the others get a last look.
            time_is_up = time.monotonic() >= deadline
            for reply in self._pull(list(waiting), deadline):
                position_of = waiting.pop(reply.metadata.reply_to_message_id, None)
                if position_of is not None:
                    results[position_of] = _read(reply)
            if waiting and not time_is_up:
                time.sleep(INTERVAL)
        return results

    def _pull(self, asked: Sequence[str], deadline: float) -> list[Message]:
        """The replies that are there. They come in lanes, so that a slow one holds up those of its lane alone."""

        def pull(lane: Sequence[str]) -> list[Message]:
            with until(deadline):
                return list(self.grid.pull_messages(lane))

        lanes = [lane for lane in (asked[first::LANES] for first in range(LANES)) if lane]
        if len(lanes) == 1:
            return pull(lanes[0])
        with ThreadPoolExecutor(len(lanes), "pull") as pool:
            return [reply for replies in pool.map(pull, lanes) for reply in replies]


def _read(reply: Message) -> Parcel | SiteFailure:
    if reply.has_error():
        kind = Unreachable if reply.error.code in UNREACHED else SiteFailure
        return kind(reply.error.reason or f"Flower reports error {reply.error.code}")
    try:
        return from_records(reply.content)
    except UnreadableParcel as problem:
        return SiteFailure(f"its reply cannot be read: {problem}")


def _question(fields: Mapping[str, Any]) -> Parcel:
    return seal(prepare({}), action=DESCRIBE, **fields)
