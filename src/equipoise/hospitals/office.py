"""A hospital's side of the conversation: one handler for every action, with the site's state on its own disk.

The site obeys a message only if the coordinator signed it, the policy allows the method's replies, and the message's
starting state is here. The site writes the reply and the next state before the reply leaves, so a repeated message gets
the same bits. It later deletes versions that the server never commits.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.contract.config import Config
from equipoise.contract.config_files import parse_config
from equipoise.contract.disclosed import rule_of
from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import Diverged, Payload, SiteFailure
from equipoise.core.errors import UserError
from equipoise.core.storage import write_text
from equipoise.core.version import __version__
from equipoise.data import DataConfig
from equipoise.data.federation import Federation, Site
from equipoise.data.preparation import PREPARATION
from equipoise.engine.disclosure import DESCRIBE
from equipoise.engine.image_scores import ImageScores
from equipoise.engine.local_engine import all_sites, new_slot
from equipoise.engine.payload_files import DAMAGE, read_payload, safe_name, write_payload
from equipoise.engine.private import check_private, noisy_description, scores_noise, smallest_noise
from equipoise.engine.runs import with_encoder
from equipoise.engine.slot import EVALUATE, Outcome, Request, Slot, exhaust
from equipoise.engine.states import KEPT, read_state, write_state
from equipoise.engine.summing import Summer
from equipoise.engine.training import SiteData
from equipoise.hospitals.allowed_plugins import check_plugins
from equipoise.hospitals.compression import compress, residuals_of, with_residuals, without_residuals
from equipoise.hospitals.descriptions import describe
from equipoise.hospitals.exchange import PUBLISH
from equipoise.hospitals.own_predictions import keep, taken_out, told, with_single
from equipoise.hospitals.parcels import (
    Contents,
    MissingTensors,
    Parcel,
    UnreadableParcel,
    digest_of,
    open_parcel,
    prepare,
    seal,
    write_counts,
)
from equipoise.hospitals.policy import Policy, check_policy, facts_that_may_leave
from equipoise.hospitals.secure_sums import COLUMNS, MASKED
from equipoise.hospitals.security import write_secret
from equipoise.hospitals.spending import Overspent, Spending
from equipoise.hospitals.sum_desk import SUM_ACTIONS, Identity, RefusedSum, SumDesk
from equipoise.methods import get_method, option_tables
from equipoise.sums import TooLarge

log = logging.getLogger(__name__)

#: what a message asks to start from; the noise of privacy.epsilon depends on it
OCCASION = "run", "config", "base", "entries", "plain"


class Refused(Exception):
    """A message that this site does not obey; the text goes back to the server."""


class StateLost(Refused):
    """The site cannot go on from what it keeps, in this round and in every further one."""


@dataclass(frozen=True)
class Workplace:
    """A method set up for one config."""

    config: Config
    method: Method
    setting: Setting
    slot: Slot
    places: Mapping[str, Site]


class Office:
    """Answers the parcels of one site.

    Args:
        site: the site's name
        federation: what the site's data folder or manifest holds; only the site of this name is ever trained on
        folder: where the site keeps states, stored replies and models
        verify: raises UnreadableParcel unless the coordinator signed the parcel
        data: how the site's images were prepared, which those that its models meet later must be, too
        least: the site refuses runs whose `privacy.least` is lower
        plugins: names of plug-ins that a run may use here
        epsilon: the site refuses runs beyond this sum of `privacy.epsilon` over all runs; None: no limit
        identity: by what other sites know this one in secure sums, and this one them
    """

    def __init__(
        self,
        site: str,
        federation: Federation,
        folder: Path,
        policy: Policy,
        device: str = "cpu",
        verify: Callable[[Parcel], None] = lambda parcel: None,
        data: DataConfig | None = None,
        least: int = 0,
        plugins: Sequence[str] = (),
        identity: Identity | None = None,
        epsilon: float | None = None,
    ):
        self.site = site
        self.federation = federation
        self.least = least
        self.identity = identity or Identity()
        self.folder = folder
        self.spending = Spending(folder, epsilon)
        self.policy = policy
        self.device = device
        self.plugins = plugins
        self.verify = verify
        self.prepared = {name: getattr(data, name) for name in PREPARATION} if data else {}
        self._descriptions: dict[int, dict[str, Any]] = {}
        self._held: dict[str, Tensor] = {}
        #: predictions of this site's images by the run's folder that they are kept in
        self._single: tuple[Path, list[ImageScores]] = Path(), []
        self._workplace: tuple[str, Workplace] | None = None

    def answer(self, parcel: Parcel) -> Parcel:
        """The reply to a parcel; an error here becomes a sentence without details of local files."""
        try:
            return self._answer(parcel)
        except MissingTensors:
            return _reply(lacks=True)
        except Diverged as problem:
            log.warning("not kept: %s", problem)
            return _reply(error=str(problem), diverged=True)
        except StateLost as problem:
            log.error("cannot go on: %s", problem)
            return _reply(error=str(problem), lost=True)
        except (Refused, RefusedSum, Overspent, SiteFailure, UnreadableParcel) as problem:
            log.warning("refused: %s", problem)
            return _reply(error=str(problem))
        except OSError as problem:
            log.exception("an error kept the site from answering a message")
            what = os.strerror(problem.errno) if problem.errno else type(problem).__name__
            return _reply(error=f"{what} at the site; its log says more")
        except Exception as problem:
            log.exception("an error kept the site from answering a message")
            return _reply(error=f"{type(problem).__name__} at the site; its log says more")

    def _answer(self, parcel: Parcel) -> Parcel:
        self.verify(parcel)
        message, held = open_parcel(parcel, self._held)
        header = parcel.header
        if header["action"] not in SUM_ACTIONS:  # those bring no tensors, and are no reason to forget any
            self._held = held
        if header["action"] == DESCRIBE:
            return self._describe(header)
        work = self._work(header["config"])
        self._allow(work.config, type(work.slot.client))
        self.spending.admit(work.config, header["run"])
        own = digest_of(self.described(work.config))
        if header["described"].get(self.site, own) != own:
            raise Refused("this site's data has changed since the run began")
        if header.get("data") == self.site:  # neither masks nor the account of epsilon would know of it
            raise Refused("the models of another place are not measured on this site's own images")
        records = Records(self.folder / safe_name(header["run"]))
        if header["action"] == PUBLISH:
            return self._publish(work, records, header, message)
        if header["action"] in SUM_ACTIONS:
            return _reply(sum=self._desk(records, header).answer(header["action"], header["sum"]))
        if work.config.privacy.secure_sums and header["site"] == self.site and "sum" not in header:
            raise Refused("with privacy.secure_sums this site sends its numbers only under masks")
        stored = records.reply(header) if header["version"] else None
        if stored is None:
            stored = self._perform(work, records, header, message)
        log.info("answered '%s' of round %s", header["action"], header["round"])
        return stored

    def _describe(self, header: Mapping[str, Any]) -> Parcel:
        description = self._description(self.least)
        if "config" in header:
            config = _parse(header["config"], self.plugins)
            self._allow(config, _client(config))
            self.spending.admit(config, "")
            description = self.described(config)
        return _reply(description=description, version=__version__)

    def described(self, config: Config) -> dict[str, Any]:
        """The site's description; under differential privacy its numbers of images carry noise."""
        description = self._description(config.privacy.limit)
        if config.privacy.epsilon is None:
            return description
        return description | noisy_description(config, self.site, description["counts"], self._noise_key)

    def _description(self, least: int) -> dict[str, Any]:
        """The site's description of its data, without numbers below this limit."""
        if least not in self._descriptions:
            self._descriptions[least] = describe(self.site, self.federation, least)
        return self._descriptions[least]

    @cached_property
    def _noise_key(self) -> bytes:
        """The secret that noise is made of; it stays with the site, so that the server cannot take noise away."""
        path = self.folder / "noise.key"
        if not path.exists():
            write_secret(path, secrets.token_hex(32).encode())
        return bytes.fromhex(path.read_text(encoding="ascii"))

    def _allow(self, config: Config, client: type) -> None:
        """Refuse a method that sends what the policy does not allow, or reports lower numbers of images than the site
        allows."""
        try:
            check_policy(self.policy, config.composition, client)
        except UserError as problem:
            raise Refused(str(problem)) from None
        if self.identity.alone and not config.privacy.secure_sums:
            raise Refused("this site refuses runs without privacy.secure_sums = true")
        if config.privacy.epsilon is None and config.privacy.least < self.least:
            raise Refused(
                f"this site reports no number below {self.least} images: set privacy.least to {self.least} at the "
                "server, or let the site lower `least` in its site.toml"
            )
        if config.privacy.epsilon is not None and 2 * smallest_noise(config) < self.least:
            raise Refused(
                f"this site reports no number below {self.least} images, and in this run noise on numbers of images "
                f"has a standard deviation of {smallest_noise(config):.2g} only: set privacy.epsilon lower, or "
                "privacy.counts_noise higher, or let the site lower `least` in its site.toml"
            )

    def _work(self, text: str) -> Workplace:
        """The workplace for a config; it stays while the config does."""
        if self._workplace is None or self._workplace[0] != text:
            config = _parse(text, self.plugins)
            torch.set_num_threads(config.compute.threads)
            method = get_method(config.method)
            try:
                config, federation = with_encoder(config, self.federation, self.device)
                setting = Setting.of(config, method, federation, self.device)
                check_private(config, method, setting)
                slot = new_slot(method, setting)
            except UserError as problem:  # about a setting, or a file that the server's config names
                raise Refused(str(problem)) from None
            if slot.private is not None:
                slot.private.key = self._noise_key
            self._workplace = (text, Workplace(config, method, setting, slot, self._places(federation)))
        return self._workplace[1]

    def _perform(self, work: Workplace, records: Records, header: Mapping[str, Any], message: Payload) -> Parcel:
        action, version = header["action"], header["version"]
        if action not in (EVALUATE, "train", *work.slot.client.discloses):
            raise Refused(f"'{work.config.method}' has no action '{action}'")
        before = records.state(header["base"]) if header["base"] else None
        request = Request(
            action=action,
            site=header["site"],
            round=int(header["round"]),
            index=int(header["index"]),
            measure=tuple(header["measure"]),
            views=tuple(header["views"]),
            data=header["data"],
        )
        if work.slot.private is not None:
            # Equal work gets equal noise: a repeated round reveals nothing more. Another model gets other noise.
            work.slot.private.occasion = occasion_of(header)
            self._account(work, header, request, work.slot.private.occasion)
        elsewhere = self._data(work, request.data) if request.data else None
        asked = with_single(request, work.setting.task.dense)
        kept = without_residuals(before)
        outcome = exhaust(work.slot.perform(asked, message, kept, self._data(work, request.site), elsewhere))
        if asked is not request:
            self._keep(records.folder, taken_out(outcome, request, request.round))
        outcome.facts = facts_that_may_leave(self.policy, outcome.facts)
        if "sum" in header:
            outcome = self._masked(work, records, header, message, outcome)
        contents, state = None, outcome.kept
        if version and "sum" not in header and header.get("wire", "fp32") != "fp32":
            residuals = residuals_of(before, action)
            contents, errors = compress(outcome.payload, message, header["wire"], residuals)
            state = with_residuals(outcome.kept, before, action, errors)
        if version:
            records.tidy(header)
            if state is not None:
                write_state(records.state_path(version), state, durable=True)
        reply = _outcome_parcel(outcome, header, bool(version) and state is not None, contents)
        if header.get("omit"):  # the server has what it sent
            reply = reply.without(self._held)
        if version:
            records.write_reply(header, reply)
        return reply

    def _account(self, work: Workplace, header: Mapping[str, Any], request: Request, occasion: str) -> None:
        """Count what this answer tells of images, up to what the run's epsilon covers."""
        fields = {"action": request.action, "site": request.site, "round": request.round, "index": request.index}
        which, place = digest_of({"of": occasion, **fields}), request.data or request.site
        told = work.slot.client.discloses.get(request.action, {}).values()
        # Numbers of images alone carry the noise of the description, and tell nothing more.
        trains = request.action != EVALUATE and not all(rule_of(text) in ("images", "counts") for text in told)
        answers = {"training": [which]} if trains else {}
        most = {"training": work.config.train.rounds}
        for part in request.measure:
            kind = part if place == self.site else f"{place}/{part}"
            answers[kind] = [f"{which} {view}" for view in request.views]
            most[kind] = scores_noise(work.config)[0] - 1  # the description was one
        self.spending.release(work.config, header["run"], answers, most)

    def _desk(self, records: Records, header: Mapping[str, Any]) -> SumDesk:
        return SumDesk(self.site, records.folder / "sums", header["run"], self.identity)

    def _masked(
        self, work: Workplace, records: Records, header: Mapping[str, Any], message: Payload, outcome: Outcome
    ) -> Outcome:
        """The outcome with its numbers under masks; of its work the site tells how long it took."""
        asked = header["sum"]
        summer = Summer(work.setting, type(work.slot.client))
        try:
            summer.check(outcome.payload, message)
            words, vector = summer.part(
                header["action"], outcome.payload, outcome.measures, asked["measured"], int(asked["sites"])
            )
        except TooLarge as problem:
            raise Refused(f"{header['action']}: {problem}") from None
        masked = self._desk(records, header).masked(
            str(asked["number"]), header["identity"], dict(asked["shares"]), vector, _work_of(header)
        )
        seconds = {name: value for name, value in outcome.facts.items() if name == "seconds"}
        return Outcome({MASKED: masked, COLUMNS: words}, outcome.kept, {}, seconds)

    def _keep(self, folder: Path, found: list[ImageScores]) -> None:
        """Keep predictions of single images on this site's disk, and say how sure its own scores are."""
        if found:
            known = self._single[1] if self._single[0] == folder else []
            self._single = folder, keep(folder, known, found, self.federation)
            log.info("own scores: %s", told(folder))

    def _places(self, federation: Federation) -> dict[str, Site]:
        """The places whose images models may see: another hospital's images are none of our business."""
        places = all_sites(federation).items()
        return {name: place for name, place in places if name == self.site or place not in federation.sites}

    def _data(self, work: Workplace, place: str) -> SiteData:
        if place not in work.places:
            raise Refused(f"this is '{self.site}'; it has no images of '{place}'")
        return SiteData(work.places[place], work.setting.task, work.setting.device)

    def _publish(self, work: Workplace, records: Records, header: Mapping[str, Any], message: Payload) -> Parcel:
        """Write out the selected models, the global one and this site's own, so that `equipoise predict` finds them."""
        if header["site"] != self.site:
            raise Refused(f"this is '{self.site}', not '{header['site']}'")
        models = records.folder / "models"
        data = work.config.data.model_copy(update=self.prepared)
        write_text(records.folder / "config.toml", work.config.model_copy(update={"data": data}).to_toml())
        shape = {"classes": self.federation.classes, "image_size": self.federation.image_size}
        start = {"event": "start", **shape, "channels": self.federation.channels}
        write_text(records.folder / "events.jsonl", json.dumps(start) + "\n")
        write_payload(models / "global.safetensors", message)
        if "personal" in work.slot.client.views:
            own = without_residuals(records.state(header["base"])) if header["base"] else None
            kept: Payload = {KEPT: own} if own is not None else {}
            write_payload(models / "personal" / f"{safe_name(self.site)}.safetensors", message | kept)
        shutil.rmtree(records.folder / "replies", ignore_errors=True)  # all rounds are over
        return _outcome_parcel(Outcome(), header, kept=False)


class Records:
    """What a site has on disk of one run: versions of its state, and the replies of the round in progress."""

    def __init__(self, folder: Path):
        self.folder = folder

    def state_path(self, version: str) -> Path:
        """Where a version of the state lies."""
        return self.folder / "states" / f"{safe_name(version)}.safetensors"

    def state(self, version: str) -> dict[str, Tensor]:
        """A version of the site's state."""
        try:
            return read_state(self.state_path(version))
        except FileNotFoundError:
            raise StateLost(f"the state {version} that this message starts from is not on this site's disk") from None
        except DAMAGE:
            raise StateLost(f"the state {version} on this site's disk is damaged") from None

    def reply(self, header: Mapping[str, Any]) -> Parcel | None:
        """The stored reply to this very message, if it and the state that goes with it are here, undamaged."""
        try:
            stored = read_payload(self._reply_path(header))
        except DAMAGE:
            return None
        text, tensors = str(stored["header"]), stored.get("tensors", {})
        assert isinstance(tensors, dict)
        if json.loads(text)["kept"] and not self.state_path(header["version"]).exists():
            return None
        return Parcel(text, tensors)

    def write_reply(self, header: Mapping[str, Any], reply: Parcel) -> None:
        """Store a reply until its round is over."""
        path = self._reply_path(header)
        if path.is_dir():
            _remove(path)
        write_payload(path, {"header": reply.text, "tensors": reply.tensors})

    def tidy(self, header: Mapping[str, Any]) -> None:
        """Delete what neither this round nor a checkpoint of the server needs."""
        now = f"{int(header['round']):05d}-"
        wanted = {safe_name(version) for version in (*header["keep"], header["base"])}
        for path in (self.folder / "states").glob("*"):  # also what a full disk left half-written
            if path.name.removesuffix(".safetensors") not in wanted and not path.name.startswith(now):
                _remove(path)
        for path in (self.folder / "replies").glob("*"):
            if not path.name.startswith(now):
                _remove(path)

    def _reply_path(self, header: Mapping[str, Any]) -> Path:
        return self.folder / "replies" / f"{safe_name(header['version'])}-{safe_name(header['identity'])}.safetensors"


def _remove(path: Path) -> None:
    """Delete a record, or the folder that something has put in its place: else the site would be out for good."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _parse(text: str, allowed: Sequence[str]) -> Config:
    raw = tomllib.loads(text)
    try:
        check_plugins(raw, allowed)
        return parse_config(raw, option_tables(raw), "the server's config")
    except UserError as problem:
        raise Refused(str(problem)) from None


def occasion_of(header: Mapping[str, Any]) -> str:
    """Identifies what a message asks to start from."""
    return digest_of({name: header[name] for name in OCCASION})


def _work_of(header: Mapping[str, Any]) -> str:
    """Identifies what a message asks for: equal messages of a repeated round have equal answers."""
    fields = {name: header[name] for name in ("action", "round", "index", "measure", "views", "data")}
    return digest_of({**fields, "of": occasion_of(header)})


def _client(config: Config) -> type:
    return get_method(config.method).client_class(config)


def _reply(**fields: Any) -> Parcel:
    return seal(prepare({}), **fields)


def _outcome_parcel(
    outcome: Outcome, header: Mapping[str, Any], kept: bool, contents: Contents | None = None
) -> Parcel:
    return seal(
        contents or prepare(outcome.payload, half=bool(header["half"])),
        identity=header["identity"],
        kept=kept,
        measures=write_counts(outcome.measures),
        facts=outcome.facts,
    )
