"""An audit of a finished run: shadow runs of the same config show how well its models tell who was trained on.

Each shadow run trains on as many images of each site as the run did, drawn from all of the site's images. What was
trained so far lies in the folder `audit` of the run, so that an audit goes on where it was stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.core.storage import write_text
from equipoise.core.streams import stream
from equipoise.data import load_federation
from equipoise.data.federation import Federation, Site, Split
from equipoise.data.splits import PARTS
from equipoise.engine.events import events_in
from equipoise.engine.loop import Run
from equipoise.engine.payload_files import arrays_in
from equipoise.engine.prediction import Predictor, load_predictor
from equipoise.engine.runs import choose_device, config_of
from equipoise.membership import FALSE_POSITIVES, Attack, attacked, confidence, likelihood_ratios
from equipoise.methods import get_method

#: images that a model sees at a time
BATCH = 256
#: of a run's folder
FOLDER, FILE = "audit", "audit.json"
LEAST_SHADOWS = 4


def audit(
    folder: Path, shadows: int = 16, seed: int = 1, watch: Callable[[int], None] = lambda trained: None
) -> dict[str, Any]:
    """Attack a finished run's models, write `audit.json` into its folder, and give what it holds.

    Args:
        shadows: shadow runs; the more, the stronger the attack
        watch: called with the number of shadow runs so far
    """
    if shadows < LEAST_SHADOWS:
        raise UserError(f"{shadows} shadow runs say little; train {LEAST_SHADOWS} or more with --shadows")
    config = config_of(folder)
    federation = load_federation(config.data, config.seed)
    _check(config, federation)
    attack = _Attack(folder, config, federation, seed)
    target = attack.confidences(folder)
    told = []
    for number in range(shadows):
        told.append(attack.shadow(number))
        watch(number + 1)
    scores = likelihood_ratios(target, np.stack([row for row, _ in told]), np.stack([row for _, row in told]))
    found = {
        "run": config.run_name,
        "attack": "LiRA (Carlini et al. 2022)",
        "shadows": shadows,
        "seed": seed,
        "round": attack.round,
        "view": attack.view,
        "false_positives": FALSE_POSITIVES,
        "groups": [*attack.told(scores)],
    }
    write_text(folder / FILE, json.dumps(found, indent=2) + "\n")
    return found


def read_audit(folder: Path) -> dict[str, Any] | None:
    """What an audit of a run found; None where there was none."""
    path = folder / FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _check(config: Config, federation: Federation) -> None:
    if federation.task != "classification":
        raise UserError(f"an audit attacks models that classify; this run's task is {federation.task}")
    if get_method(config.method).pooled:
        raise UserError("an audit attacks models of a federation, and this run trained on pooled images")


class _Attack:
    """The images of a federation in one order, and what models say of them."""

    def __init__(self, folder: Path, config: Config, federation: Federation, seed: int):
        self.folder, self.config, self.federation, self.seed = folder, config, federation, seed
        self.sites = federation.training_sites()
        self.round = _reported_round(folder)
        views = get_method(config.method).client_class(config).views
        self.view = "global" if "global" in views else "personal"
        self.pools = [_joined(site) for site in self.sites]
        self.labels = np.concatenate([pool.labels for pool in self.pools])
        self.site_of = np.repeat(np.arange(len(self.sites)), [len(pool) for pool in self.pools])
        trained = [np.arange(len(pool)) < len(site.splits["train"]) for pool, site in zip(self.pools, self.sites)]
        self.member = np.concatenate(trained)
        if self.member.all():
            raise UserError("the run's sites have no validation or test images, with which an audit compares")

    def shadow(self, number: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Confidences (n,) of a shadow model, and the images (n,) that it was trained on."""
        path = self.folder / FOLDER / f"shadow-{self.seed}-{number}.npz"
        drawn = [self._drawn(place, number) for place in range(len(self.sites))]
        inside = np.concatenate(drawn)
        if path.is_file():
            with arrays_in(path, "delete it, and the audit trains this shadow run anew") as file:
                return file["confidence"], inside
        sites = tuple(
            Site(site.name, {"train": _part(pool, chosen), "valid": _part(pool, ~chosen)})
            for site, pool, chosen in zip(self.sites, self.pools, drawn)
        )
        federation = replace(self.federation, sites=sites, common=None, cohorts=())
        run = path.with_suffix("")
        shutil.rmtree(run, ignore_errors=True)
        device = choose_device(self.config.compute.device)
        Run(self._config(number), get_method(self.config.method), federation, run, device=device).execute()
        found = self.confidences(run)
        np.savez_compressed(path, confidence=found)
        shutil.rmtree(run)
        return found, inside

    def _config(self, number: int) -> Config:
        """As many rounds as the reported model was trained, another seed, and no choice among rounds."""
        rounds = max(self.round, 1)
        evaluation = self.config.evaluation.model_copy(
            update={"rule": "last", "every": rounds, "trained": False, "trained_test": False, "first_round": 1}
        )
        seed = stream(self.seed, "shadow", number) % 2**31
        return self.config.with_rounds(rounds).model_copy(update={"evaluation": evaluation, "seed": seed})

    def _drawn(self, place: int, number: int) -> NDArray[np.bool_]:
        """The images of a site's pool that a shadow model trains on: as many of each class as the run did."""
        pool, site = self.pools[place], self.sites[place]
        random = np.random.default_rng(stream(self.seed, "drawn", number, site.name))
        chosen = np.zeros(len(pool), dtype=bool)
        wanted = np.bincount(site.splits["train"].labels, minlength=len(self.federation.classes))
        for label, count in enumerate(wanted):
            chosen[random.permutation(np.flatnonzero(pool.labels == label))[:count]] = True
        return chosen

    @torch.no_grad()
    def confidences(self, run: Path) -> NDArray[Any]:
        """Confidences (n,) of a run's models for all images, each by the model that its site uses."""
        common = load_predictor(run) if self.view == "global" else None
        rows = []
        for site, pool in zip(self.sites, self.pools):
            predictor = common or load_predictor(run, site.name)
            rows += [*_probabilities(predictor, pool)]
        return confidence(np.concatenate(rows), self.labels)

    def told(self, scores: NDArray[Any]) -> Iterator[dict[str, Any]]:
        """The attack on all images, on each class from the rarest on, and on each site."""
        yield {"scope": "all", "name": "all images", **_plain(attacked(scores, self.member))}
        trained = np.bincount(self.labels[self.member], minlength=len(self.federation.classes))
        for label in np.argsort(trained, kind="stable"):
            chosen = self.labels == label
            attack = attacked(scores[chosen], self.member[chosen])
            yield {"scope": "class", "name": self.federation.classes[label], **_plain(attack)}
        for place, site in enumerate(self.sites):
            chosen = self.site_of == place
            yield {"scope": "site", "name": site.name, **_plain(attacked(scores[chosen], self.member[chosen]))}


def _plain(attack: Attack) -> dict[str, Any]:
    numbers = {"auc": attack.auc, "found": attack.found}
    finite = {name: [None if np.isnan(value) else value for value in values] for name, values in numbers.items()}
    return {"members": attack.members, "others": attack.others, **finite}


def _joined(site: Site) -> Split:
    """All images of a site, those that were trained on first."""
    parts = [site.splits[part] for part in PARTS if part in site.splits]
    return Split(parts[0].store, np.concatenate([p.rows for p in parts]), np.concatenate([p.labels for p in parts]))


def _part(pool: Split, chosen: NDArray[np.bool_]) -> Split:
    return Split(pool.store, pool.rows[chosen], pool.labels[chosen])


def _probabilities(predictor: Predictor, pool: Split) -> Iterator[NDArray[Any]]:
    for positions in torch.arange(len(pool)).split(BATCH):
        yield predictor(pool.images(positions)).double().numpy()


def _reported_round(folder: Path) -> int:
    """The round whose models the run reports."""
    selections = [event for event in events_in((folder / "events.jsonl").read_bytes()) if event["event"] == "selection"]
    if not selections:
        raise UserError(f"{folder} holds no finished run; go on with `equipoise resume`, then audit it")
    chosen = selections[-1]
    rounds = [chosen.get("round", 0), *chosen.get("rounds", ())]
    return int(max(*rounds, *(own["round"] for own in chosen.get("sites", {}).values()), 0))
