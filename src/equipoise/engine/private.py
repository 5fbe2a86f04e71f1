"""Differential privacy of a run: which runs can have it, how much noise keeps to `privacy.epsilon`, and what reports
state.

Two images are neighbours of a data set each with and without them. Every image is in one part of one site. So a site's
epsilon is the larger one of its training images and of its validation and test images.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

from equipoise.contract.config import Config
from equipoise.contract.method import Client, Method, Setting
from equipoise.contract.private_steps import Budget, Key, noisy_confusion, noisy_counts, source
from equipoise.contract.protocol import Tensors
from equipoise.contract.tables import PrivacyConfig
from equipoise.core.errors import UserError
from equipoise.core.extras import imported
from equipoise.data.federation import Federation
from equipoise.metrics import METRICS, metric_of

#: models of a site that a round measures at most: global, personal
VIEWS = 2
#: smallest noise, even if epsilon would allow less; below it, accounting takes long
LEAST_NOISE = 0.5
#: privacy losses are rounded up to multiples of this
INTERVAL = 1e-3
#: file of a run's folder that states what holds for each site
CERTIFICATE = "certificate.json"


def check_private(config: Config, method: Method, setting: Setting) -> None:
    """Refuse runs whose replies tell of training images by other ways than noisy gradients and counts."""
    if config.privacy.epsilon is None:
        return
    _check_counts_noise(config.privacy)
    parts = [(f"the method {config.method}", vars(method.client).get("image_by_image", False))]
    components = method.components_of(config)
    parts += [(f"the component {component.name}", component.image_by_image) for component in components]
    for title, private in parts:
        if not private:
            raise UserError(
                f"privacy.epsilon does not hold with {title}: it uses training images in more ways than by the "
                "gradient of each image's loss. Choose another, or leave privacy.epsilon out; docs/privacy.md lists "
                "those with which it holds"
            )
    if setting.task.name != "classification":
        raise UserError(
            f"privacy.epsilon keeps numbers of images private, and {setting.task.name} counts pixels; leave it out"
        )
    metric = metric_of(config.evaluation.metric)
    if metric.needs != "confusion" and config.evaluation.rule == "best":
        raise UserError(
            f"under privacy.epsilon only confusion matrices leave a site, and evaluation.metric = {metric.name!r} "
            f"needs more; set evaluation.metric = {METRICS[0].name!r}, or evaluation.rule = 'last'"
        )


def _check_counts_noise(privacy: PrivacyConfig) -> None:
    """Refuse numbers of images with so little noise that nothing of epsilon is left for training."""
    assert privacy.epsilon is not None
    alone = epsilon_of_releases(privacy.counts_noise, privacy.delta)
    if alone >= privacy.epsilon:
        raise UserError(
            f"privacy.counts_noise = {privacy.counts_noise:g} alone comes to epsilon = {alone:.2f}, and "
            f"privacy.epsilon is {privacy.epsilon:g}; set privacy.counts_noise higher"
        )


def budget_of(config: Config, images: int) -> Budget:
    """The noise that keeps a site with so many training images, by its noisy counts, to the epsilon of a config."""
    privacy, train = config.privacy, config.train
    assert privacy.epsilon is not None
    rate = min(train.batch_size / max(images, 1), 1.0)
    in_epoch = max(round(images / train.batch_size), 1)
    steps = train.rounds * (train.steps or train.epochs * in_epoch)
    noise = _noise_of_steps(privacy.epsilon, privacy.delta, rate, steps, privacy.counts_noise)
    releases, scores = scores_noise(config)
    return Budget(
        images=images,
        rate=rate,
        steps_of_epoch=in_epoch,
        steps=steps,
        noise=noise,
        counts_noise=privacy.counts_noise,
        releases=releases,
        scores_noise=scores,
        epsilon=epsilon_of_steps(noise, privacy.delta, rate, steps, privacy.counts_noise),
        scores_epsilon=epsilon_of_releases(scores, privacy.delta, releases),
    )


def scores_noise(config: Config) -> tuple[int, float]:
    """How often matrices of the same images may leave a site in a run, and the noise on each cell for that."""
    privacy, rounds, evaluation = config.privacy, config.train.rounds, config.evaluation
    assert privacy.epsilon is not None
    measured = math.ceil(rounds / evaluation.every) + 2  # the first and final ones, and the numbers of images
    releases = measured * VIEWS + rounds * (evaluation.trained or evaluation.trained_test)
    return releases, _noise_of_releases(privacy.epsilon, privacy.delta, releases)


def smallest_noise(config: Config) -> float:
    """The least standard deviation of the noise on any number of images that leaves a site."""
    return min(config.privacy.counts_noise, scores_noise(config)[1])


def epsilon_of_steps(noise: float, delta: float, rate: float, steps: int, counts_noise: float) -> float:
    """Epsilon of so many noisy steps over drawn images, and of one release of noisy counts."""
    dp = imported("dp_accounting", "privacy", "differential privacy")
    step = dp.GaussianDpEvent(noise)
    drawn = dp.SelfComposedDpEvent(step if rate >= 1 else dp.PoissonSampledDpEvent(rate, step), steps)
    return _epsilon(dp.ComposedDpEvent([drawn, dp.GaussianDpEvent(counts_noise)]), delta)


def epsilon_of_releases(noise: float, delta: float, number: int = 1) -> float:
    """Epsilon of so many noisy releases of numbers of the same images: together one with less noise."""
    dp = imported("dp_accounting", "privacy", "differential privacy")
    return _epsilon(dp.GaussianDpEvent(noise / math.sqrt(number)), delta)


def _epsilon(event: Any, delta: float) -> float:
    """Epsilon by distributions of privacy losses, rounded up to an interval."""
    pld = imported("dp_accounting.pld", "privacy", "differential privacy")
    accountant = pld.PLDAccountant(value_discretization_interval=INTERVAL)
    accountant.compose(event)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=4096)
def _noise_of_steps(epsilon: float, delta: float, rate: float, steps: int, counts_noise: float) -> float:
    return _smallest(lambda noise: epsilon_of_steps(noise, delta, rate, steps, counts_noise), epsilon)


@lru_cache(maxsize=4096)
def _noise_of_releases(epsilon: float, delta: float, number: int) -> float:
    return _smallest(lambda noise: epsilon_of_releases(noise, delta, number), epsilon)


def _smallest(epsilon_of: Callable[[float], float], epsilon: float) -> float:
    """The smallest noise, to one per cent, whose epsilon is not above the one asked for; never below LEAST_NOISE."""
    high = LEAST_NOISE
    while epsilon_of(high) > epsilon:
        high *= 2
    low = high / 2
    while high > LEAST_NOISE and high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if epsilon_of(middle) > epsilon else (low, middle)
    return high


# ---- at a site ---------------------------------------------------------------------------------------------------


class PrivateSite:
    """Sets up a client for one site's private training, and puts noise on what else leaves the site.

    Attributes:
        key: of the noise: the run's seed in a simulation, the site's secret at a hospital
        occasion: at a hospital, what a message asks to start from: two models never get the same noise
    """

    def __init__(self, setting: Setting):
        self.config = setting.config
        self.key: Key = setting.config.seed
        self.occasion = ""

    def begin(self, client: Client, site: str, number: int, index: int) -> None:
        """Before a site performs an ask: noise on its class counts, and what its steps may reveal."""
        private, counts = client.workplace.private, client.class_counts
        assert private is not None
        counts.copy_(noisy_counts(counts, self.config.privacy.counts_noise, self.key, site))
        private.budget = budget_of(self.config, int(counts.sum()))
        which = self.occasion, number, site, index
        private.noise = source(counts.device, self.key, "noise of steps", *which)
        private.draws = source("cpu", self.key, "draws of steps", *which) if self.occasion else None

    def measured(self, counts: Tensors, request: Any, view: str, part: str) -> Tensors:
        """Counts of a measurement with noise: of all counts only the confusion matrix leaves the site."""
        _, deviation = scores_noise(self.config)
        where = (self.occasion, request.site, request.data, request.round, request.action, view, part)
        return counts | {
            "confusion": noisy_confusion(counts["confusion"], deviation, self.key, *where),
            "calibration": torch.zeros_like(counts["calibration"]),
            "auc": torch.full_like(counts["auc"], -1.0),
            "loss": torch.full_like(counts["loss"], float("nan")),
        }


def noisy_description(config: Config, site: str, counts: dict[str, list[int]], key: Key) -> dict[str, Any]:
    """What a hospital tells of its numbers of images by part: each with the noise of its budget."""
    deviations = dict.fromkeys(counts, scores_noise(config)[1]) | {"train": config.privacy.counts_noise}
    names = {part: site if part == "train" else f"{site}/{part}" for part in counts}
    noisy = {
        part: noisy_counts(torch.tensor(own), deviations[part], key, names[part]).tolist()
        for part, own in counts.items()
    }
    fingerprint = hashlib.sha256(f"{key!r}/{counts}".encode()).hexdigest()[:16]
    return {"counts": noisy, "fingerprint": fingerprint, "warnings": []}  # warnings name exact numbers


# ---- what a run tells --------------------------------------------------------------------------------------------


def certificate(config: Config, federation: Federation, exact: bool) -> dict[str, Any]:
    """What holds of the images of each site, with the noise that it rests on.

    Args:
        exact: whether the federation's numbers of images are without noise, as in a simulation
    """
    budgets = {}
    for site in federation.training_sites():
        counts = torch.from_numpy(site.class_counts(len(federation.classes)))
        noisy = noisy_counts(counts, config.privacy.counts_noise, config.seed, site.name) if exact else counts
        budgets[site.name] = asdict(budget_of(config, int(noisy.sum())))
    return {
        "delta": config.privacy.delta,
        "clip": config.privacy.clip,
        "neighbours": "two sets of images that differ by one image, which only one of them has",
        "accountant": f"dp-accounting {metadata.version('dp-accounting')}, distributions of privacy losses",
        "sites": budgets,
    }
