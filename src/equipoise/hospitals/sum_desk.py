"""A site's part in secure sums: fresh keys for each sum, its masked numbers, and the shares that open the sum.

A mask is never used twice. What a site has said of a sum lies on its disk before it leaves. A repeated question gets
the same answer, and another question about the same sum is refused: the next attempt brings new keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from torch import Tensor

from equipoise.contract.tables import LEAST_SUMMED
from equipoise.core.storage import write_text
from equipoise.engine.payload_files import safe_name
from equipoise.hospitals.pairwise_masks import (
    SECRET_BYTES,
    SHARE_BYTES,
    new_key,
    opened,
    own_mask,
    pair_mask,
    public_half,
    sealed,
    shares_of,
    threshold,
)
from equipoise.hospitals.security import signed_by

KEYS, SHARES, OPEN = "sum-keys", "sum-shares", "sum-open"
#: what a server asks of a site about a sum, besides the action itself
SUM_ACTIONS = (KEYS, SHARES, OPEN)
#: sums that a site remembers
REMEMBERED = 32


class RefusedSum(Exception):
    """A sum that this site takes no part in; the text goes back to the server."""


@dataclass(frozen=True)
class Identity:
    """How sites know each other.

    Attributes:
        alone: whether the site takes part in runs with secure sums alone
        sign: signs with the site's key; None without keys, on one machine
        peers: the public keys of another site, by its name; none of one that is not known
    """

    alone: bool = False
    sign: Callable[[bytes], bytes] | None = None
    peers: Callable[[str], Sequence[ec.EllipticCurvePublicKey]] = lambda site: ()


class SumDesk:
    """Answers what the server asks about sums.

    Args:
        folder: where the site keeps its secrets of sums
        run: the run that they belong to
    """

    def __init__(self, site: str, folder: Path, run: str, identity: Identity):
        self.site, self.folder, self.run, self.identity = site, folder, run, identity

    def answer(self, action: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one of `SUM_ACTIONS`."""
        number = str(asked["number"])
        if action == KEYS:
            return self.keys(number)
        if action == SHARES:
            return {"shares": self.shares(number, asked["keys"])}
        return {"shares": self.open(number, asked["survivors"])}

    def keys(self, number: str) -> dict[str, str]:
        """The public halves of fresh keys: one for masks, one for messages to other sites. Signed with the site's."""
        known = self._read(number)
        if known is None:
            known = {"mask": new_key().hex(), "talk": new_key().hex(), "own": new_key().hex()}
            self._forget_old()
            self._write(number, known)
        halves = {name: public_half(bytes.fromhex(known[name])).hex() for name in ("mask", "talk")}
        sign = self.identity.sign
        return halves | {"signature": sign(self._claim(number, self.site, halves)).hex() if sign else ""}

    def shares(self, number: str, keys: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """For each other site the shares of this site's secrets, which only that one reads."""
        known = self._known(number)
        keys = {site: dict(own) for site, own in sorted(keys.items())}
        if "keys" not in known:
            self._check_keys(number, keys)
            sites, least = list(keys), threshold(len(keys))
            pairs = zip(*(shares_of(bytes.fromhex(known[name]), least, len(sites)) for name in ("mask", "own")))
            mine = {site: mask + own for site, (mask, own) in zip(sites, pairs)}
            talk = bytes.fromhex(known["talk"])
            told = {
                site: sealed(talk, bytes.fromhex(keys[site]["talk"]), self.site, site, number, share).hex()
                for site, share in mine.items()
                if site != self.site
            }
            known |= {"keys": keys, "told": told, "held": {self.site: mine[self.site].hex()}}
            self._write(number, known)
        elif known["keys"] != keys:
            raise RefusedSum("the server names other keys for this sum than before")
        told_before: dict[str, str] = known["told"]
        return told_before

    def masked(self, number: str, identity: str, shares: Mapping[str, str], vector: Tensor, work: str = "") -> Tensor:
        """The site's numbers under masks, once for each sum.

        Args:
            identity: of the question; a lost reply is not made again
            work: what the numbers follow from; equal work, in a round that is repeated, has equal numbers
            shares: what the other sites of the sum sent to this one
        """
        known = self._known(number)
        keys: dict[str, dict[str, str]] = known.get("keys", {})
        sites = sorted({*shares, self.site})
        if not set(sites) <= keys.keys() or len(sites) < max(LEAST_SUMMED, threshold(len(keys))):
            raise RefusedSum(f"a sum over {len(sites)} of {len(keys)} sites is none that this site takes part in")
        if "used" in known:
            raise RefusedSum("the masks of this sum were used, and its reply is lost; the next attempt uses new masks")
        talk = bytes.fromhex(known["talk"])
        try:
            for site, text in shares.items():
                public = bytes.fromhex(keys[site]["talk"])
                share = opened(talk, public, site, self.site, number, bytes.fromhex(text))
                known["held"][site] = share.hex()
        except (InvalidTag, ValueError):
            raise RefusedSum("the shares of another site are damaged") from None
        self._write(number, known | {"used": identity, "sites": sites, "work": work})
        total = vector + own_mask(bytes.fromhex(known["own"]), number, len(vector))
        private = bytes.fromhex(known["mask"])
        for site in sites:
            if site != self.site:
                total += pair_mask(private, bytes.fromhex(keys[site]["mask"]), self.site, site, number, len(vector))
        return total

    def open(self, number: str, survivors: Sequence[str]) -> dict[str, str]:
        """Of each site whose numbers came a share of its mask's seed, of each lost one a share of its key.

        For one set of survivors alone: both shares of one site would show its numbers.
        """
        known = self._known(number)
        survivors = sorted(set(survivors))
        sites = known.get("sites", [])
        if self.site not in survivors or not set(survivors) <= set(sites):
            raise RefusedSum("the server opens this sum for sites that are not in it")
        if len(survivors) < max(LEAST_SUMMED, threshold(len(known["keys"]))):
            raise RefusedSum(f"a sum over {len(survivors)} of {len(known['keys'])} sites is not opened")
        if known.setdefault("survivors", survivors) != survivors:
            raise RefusedSum("this sum was opened for other sites before")
        self._open_once(known.get("work", ""), survivors)
        self._write(number, known)
        held = {site: bytes.fromhex(known["held"][site]) for site in sites}
        return {
            site: (share[SHARE_BYTES:] if site in survivors else share[:SHARE_BYTES]).hex()
            for site, share in held.items()
        }

    def _open_once(self, work: str, survivors: list[str]) -> None:
        """Refuse to add the same numbers up over other sites than before: the difference shows single sites."""
        path = self.folder / "opened" / f"{safe_name(work)}.json"
        before = json.loads(path.read_text(encoding="utf-8")) if work and path.exists() else survivors
        if before != survivors:
            raise RefusedSum(
                f"these numbers were added up over {', '.join(before)} before, and a sum over other sites would show "
                "what single ones sent. Resume when all of these sites are connected"
            )
        if work and not path.exists():
            write_text(path, json.dumps(survivors))

    def _check_keys(self, number: str, keys: Mapping[str, Mapping[str, str]]) -> None:
        """Refuse keys of too few sites, other keys than this site's, and keys that no site of the consortium signed."""
        if len(keys) < LEAST_SUMMED:
            raise RefusedSum(f"a secure sum needs {LEAST_SUMMED} sites, and the server names {len(keys)}")
        mine = self.keys(number)
        for site, own in keys.items():
            halves = {name: str(own[name]) for name in ("mask", "talk")}
            if any(len(bytes.fromhex(half)) != SECRET_BYTES for half in halves.values()):
                raise RefusedSum(f"the keys of '{site}' are none")
            if site == self.site:
                if halves != {name: mine[name] for name in halves}:
                    raise RefusedSum("the server names other keys of this site than its own")
            elif self.identity.sign is not None:
                known = self.identity.peers(site)
                if not known:
                    raise RefusedSum(f"this site's folder `peers` has no public key of '{site}'")
                signature = bytes.fromhex(str(own["signature"]))
                if not any(signed_by(key, signature, self._claim(number, site, halves)) for key in known):
                    raise RefusedSum(f"'{site}' did not sign the keys that the server names as its")

    def _claim(self, number: str, site: str, halves: Mapping[str, str]) -> bytes:
        """What a site signs: whose keys these are, and of which sum."""
        return b"equipoise sum 1\0" + json.dumps([self.run, number, site, sorted(halves.items())]).encode()

    def _path(self, number: str) -> Path:
        return self.folder / f"{safe_name(number)}.json"

    def _known(self, number: str) -> dict[str, Any]:
        known = self._read(number)
        if known is None:
            raise RefusedSum("this site has no keys for this sum; the next attempt makes new ones")
        return known

    def _read(self, number: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._path(number).read_text(encoding="utf-8"))
            return found
        except (FileNotFoundError, ValueError):
            return None

    def _write(self, number: str, known: Mapping[str, Any]) -> None:
        """On the disk before anything of it leaves."""
        write_text(self._path(number), json.dumps(known))
        self._path(number).chmod(0o600)

    def _forget_old(self) -> None:
        files = sorted(self.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[: max(len(files) - REMEMBERED, 0)]:
            path.unlink()
