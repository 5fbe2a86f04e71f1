"""Measuring models: the global model and each site's personal one apart, per site, mean over sites, and pooled."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from equipoise.contract.composed_client import adapts
from equipoise.contract.method import Server
from equipoise.contract.protocol import Payload, Tensors
from equipoise.core.errors import UserError
from equipoise.data.federation import Federation, Site
from equipoise.engine.engine import Engine
from equipoise.engine.image_scores import COHORT, ImageScores
from equipoise.engine.reported import TRAINED, added_over_sites, mean_over_rounds, mean_over_sites
from equipoise.engine.slot import EVALUATE, Outcome, Request
from equipoise.engine.summing import ALL_SITES
from equipoise.engine.volume_scores import VolumeScores, volumes_in
from equipoise.tasks import Task
from equipoise.tasks.classification import Classification

#: what is kept of single images: classes, probabilities and predicted classes
IMAGES = ("labels", "scores", "predictions")
Reports = Callable[[str, str], bool]
"""Whether a view at a site (or other place) reports the round in question."""


@dataclass
class Score:
    """The measured counts of one model on one part of one site's images, and the metrics from these counts."""

    site: str
    view: str
    part: str
    counts: Tensors
    summary: dict[str, Any]
    place: str = ""
    images: Tensors = field(default_factory=dict)
    """What the model predicts for each image at the place, where rounds that are averaged keep it."""

    @classmethod
    def of(
        cls, task: Task, site: str, view: str, part: str, counts: Tensors, place: str = "", images: bool = False
    ) -> Score:
        """Summarise counts; `images`: keep single predictions apart from what is counted."""
        own = {name: counts[name] for name in IMAGES if name in counts} if images else {}
        counted = {name: value for name, value in counts.items() if name not in own}
        return cls(site, view, part, counted, task.summary(counted), place, own)

    def metric(self, name: str) -> float | None:
        """One number of the summary."""
        return self.summary["metrics"].get(name)


class Evaluator:
    """Asks sites to measure models and puts the answers together."""

    def __init__(self, engine: Engine, server: Server, federation: Federation):
        self.engine = engine
        self.server = server
        self.views = engine.views
        self.federation = federation
        self.task = server.setting.task
        self.least = server.setting.config.privacy.limit
        #: probabilities of single images, of the models that are reported
        self.image_scores: list[ImageScores] = []
        #: numbers of single patients' volumes, likewise
        self.volume_scores: list[VolumeScores] = []
        #: of sites' personal models at a site that was left out
        self._joint: dict[str, list[ImageScores]] = {}

    def deciding_view(self) -> str:
        """Whose validation score selects the round: personal models where there are any."""
        wanted = self.server.setting.config.evaluation.view
        if wanted == "auto":
            return "personal" if "personal" in self.views else "global"
        if wanted not in self.views:
            raise UserError(f"evaluation.view = {wanted!r}, but the method has only {' and '.join(self.views)} models")
        return wanted

    def round_scores(self, number: int, parts: Sequence[str]) -> Generator[None, None, list[Score]]:
        """Scores of a round's models, of the views that are due then, at every place that has images in the parts.

        Where test scores of rounds are averaged, they come with what models predict for each image.
        """
        keep = "test" in parts and self._averaged(number) and self._sees_images and not self.task.dense
        requests = self._requests(parts, False, self._due_views(number))
        asked = [replace(request, scores=keep) for request in requests]
        found = yield from self.engine.evaluate(self.server.message(), asked, number)
        return [*self._scores(found, images=True)]

    def _averaged(self, number: int) -> bool:
        """Whether this round is one of those whose mean is reported."""
        config = self.server.setting.config
        return config.evaluation.rule == "mean_last" and config.may_report(number)

    @property
    def _sees_images(self) -> bool:
        """Whether predictions of single images may leave their site."""
        return self.engine.tells_scores

    def _due_views(self, number: int) -> tuple[str, ...]:
        """The views that are measured when a round ends: all, except personal models that can wait for the final test.

        Models that sites have to make by fine-tuning may cost more than the round itself. If other models choose the
        round, they are made once, in the reported round. Round and site seed a site's adaptation, so the result is the
        same. The mean of the last rounds needs those of each, and without test images there is no final test.
        """
        fine_tuned = adapts(self.engine.client)
        tested = any("personal" in request.views for request in self._requests(("test",), False, self.views))
        if fine_tuned and tested and not self._averaged(number) and self.deciding_view() == "global":
            return ("global",)
        return self.views

    def unmeasured(self, view: str, parts: Sequence[str], scores: Sequence[Score]) -> list[str]:
        """The sites (or other places) that should have measured a view on validation images, but have not."""
        common = (self.federation.common,) if self.federation.common else ()
        judges = {place.name for place in (*self.federation.sites, *common) if self._has(place, ("valid",))}
        asked = [request for request in self._requests(parts, False, self.views) if view in request.views]
        due = [request.site for request in asked if (request.data or request.site) in judges]
        if self.engine.summer is not None:
            due = sorted({ALL_SITES if self.engine.is_site(place) else place for place in due})
        measured = {score.site for score in scores if score.view == view and score.part == "valid"}
        return [place for place in due if place not in measured]

    def _requests(self, parts: Sequence[str], scores: bool, views: Sequence[str]) -> list[Request]:
        """Who measures which of the views on which images; on a common set alone, each site its personal model too."""
        common = (self.federation.common,) if self.federation.common else ()
        trains = [site.name for site in self.federation.training_sites(self.least)]
        places = [site for site in (*self.federation.sites, *common) if self._has(site, parts)]
        requests = []
        for site in places:
            if site.name in trains:
                requests.append(_request(site.name, views, parts, scores))
            elif "global" in views:
                requests.append(_request(site.name, ("global",), parts, scores))
        if "personal" in views and not any(site.name in trains for site in places):
            shared = [site.name for site in common if self._has(site, parts)]
            requests += [_request(s, ("personal",), parts, scores, data=place) for place in shared for s in trains]
        return requests

    def _has(self, site: Site, parts: Sequence[str]) -> bool:
        """Whether a place has images in one of the parts that it may tell of."""
        return any(site.tells(part, len(self.federation.classes), self.least) for part in parts)

    def _measure(
        self, number: int, requests: Sequence[Request], known_as: str = ""
    ) -> Generator[None, None, list[Score]]:
        found = yield from self.engine.evaluate(self.server.message(), requests, number)
        self.image_scores += (replace(one, part=known_as or one.part) for one in _image_scores(number, found))
        self.volume_scores += volumes_in(number, found)
        return [*self._scores(found)]

    def _scores(self, answers: Sequence[tuple[Request, Outcome]], images: bool = False) -> Iterator[Score]:
        for request, outcome in answers:
            for key, counts in outcome.measures.items():
                view, _, part = key.partition(".")
                yield Score.of(self.task, request.site, view, part, counts, request.data or request.site, images)

    def trained_scores(self) -> list[Score]:
        """What sites measured right after the local training of the round that has just ended."""
        return [
            Score.of(self.task, site, TRAINED, key.partition(".")[2], counts)
            for site, measures in self.engine.measures.items()
            for key, counts in measures.items()
        ]

    def test_scores(self, number: int, reports: Reports) -> Generator[None, None, list[Score]]:
        """Test scores of a round's models, of the views and at the sites that report this round.

        Where sites are on this machine, the models' probabilities for each validation and test image are kept as well.
        """
        asked = self._requests(("test",), True, self.views)
        if self._sees_images:
            asked = _joined([*asked, *self._requests(("valid",), True, self.views)])
        due = [
            replace(request, views=views)
            for request in asked
            if (views := tuple(view for view in request.views if reports(view, request.site)))
        ]
        return [score for score in (yield from self._measure(number, due)) if score.part == "test"]

    def averaged_images(self, rounds: Sequence[int], kept: Sequence[Sequence[Score]]) -> list[ImageScores]:
        """Predictions of the rounds whose test scores are averaged, and of the last one for other images."""
        others = [found for found in self.image_scores if found.part != "test"]
        return others + [
            ImageScores(number, score.view, score.site, score.place, score.part, *_of_images(score.images))
            for number, scores in zip(rounds, kept)
            for score in scores
            if score.images
        ]

    def finals(self, rounds: Sequence[Sequence[Score]]) -> Iterator[dict[str, Any]]:
        """Results by view: per site, mean over sites and pooled, each as the mean over the rounds.

        Images are counted once: what the whole federation's matrix holds is the sum over sites of each one's mean.
        """
        order = {site.name: position for position, site in enumerate(self.federation.sites)}
        for view in (*self.views, TRAINED):
            chosen = [[score for score in scores if score.view == view] for scores in rounds]
            chosen = [sorted(scores, key=lambda s: order.get(s.site, len(order))) for scores in chosen if scores]
            if not chosen:
                continue
            sites: dict[str, list[dict[str, Any]]] = {}
            for score in (score for scores in chosen for score in scores):
                sites.setdefault(score.site, []).append(score.summary)
            per_site = {site: mean_over_rounds(summaries) for site, summaries in sites.items()}
            for site, summary in per_site.items():
                yield {"view": view, "scope": "site", "site": site, **summary}
            images = added_over_sites([*per_site.values()])
            means = mean_over_rounds([mean_over_sites([score.summary for score in scores]) for scores in chosen])
            yield {"view": view, "scope": "mean", "site": None, **means, **images, "extra": self._spread(per_site)}
            pooled = mean_over_rounds([self._pooled(scores) for scores in chosen])
            yield {"view": view, "scope": "pooled", "site": None, **pooled, **images}

    def _pooled(self, scores: Sequence[Score]) -> dict[str, Any]:
        """All sites' test images as one set; AUC only where raw scores are there (on one machine)."""
        counts = [score.counts for score in scores]
        if self.server.setting.config.privacy.epsilon is not None:  # single images count with noise alone
            counts = [{name: own[name] for name in own.keys() - {"scores", "labels"}} for own in counts]
        return self.task.summary(self.task.merge(counts))

    def _spread(self, per_site: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The worst site and the standard deviation over sites, by the first metric."""
        scores = {site: summary["metrics"][self.task.metrics[0].name] for site, summary in per_site.items()}
        values = {site: score for site, score in scores.items() if score is not None}
        if not values:
            return {}
        worst = min(values, key=lambda site: values[site])
        return {"worst_site": worst, "worst_site_value": values[worst], "spread": float(np.std(list(values.values())))}

    def cohorts(self, number: int, reports: Reports) -> Generator[None, None, list[dict[str, Any]]]:
        """Results on unseen cohorts: of the global model, and of personal ones.

        At a cohort that the data set knows, the first site's personal model predicts (PRR's Table X). At a site that
        was left out, which could take any, the mean of all sites' personal predictions does.
        """
        first, found = self.federation.training_sites(self.least)[0].name, []
        for cohort in self.federation.cohorts:
            for view in self.views:
                if view == "personal" and self._is_left_out(cohort.name):
                    found += yield from self._together(number, cohort.name, reports)
                    continue
                host, images = (cohort.name, "") if view == "global" else (first, cohort.name)
                if not reports(view, host):
                    continue
                request = _request(host, (view,), ("test",), self.engine.tells_scores, data=images)
                for score in (yield from self._measure(number, [request], COHORT)):
                    place = {"view": view, "scope": "cohort", "site": cohort.name, "round": number}
                    found.append({**place, **score.summary})
        return found

    def _is_left_out(self, cohort: str) -> bool:
        config = self.federation.config
        return config is not None and config.leave_out == cohort and self._sees_images and not self.task.dense

    def _together(self, number: int, cohort: str, reports: Reports) -> Generator[None, None, list[dict[str, Any]]]:
        """Personal models of all sites at a new one: their mean probabilities, once all are there."""
        sites = [site.name for site in self.federation.training_sites(self.least)]
        due = [_request(s, ("personal",), ("test",), True, data=cohort) for s in sites if reports("personal", s)]
        answers = yield from self.engine.evaluate(self.server.message(), due, number)
        own = self._joint.setdefault(cohort, [])
        own += [score for score in _image_scores(number, answers) if score.part == "test"]
        if not own or len(own) < len(sites):
            return []
        mean = np.mean([score.probabilities for score in own], axis=0)
        predicted = mean.argmax(1)
        joint = replace(own[-1], site=cohort, part=COHORT, probabilities=mean, predictions=predicted)
        self.image_scores.append(joint)
        assert isinstance(self.task, Classification)
        summary = self.task.summary(self.task.counts_of(joint.labels, predicted, mean))
        how = {"models": f"mean of the predictions of {len(own)} sites' personal models"}
        return [{"view": "personal", "scope": "cohort", "site": cohort, "round": number, **summary, "extra": how}]


def pack_scores(rounds: Sequence[Sequence[Score]]) -> Payload:
    """Scores of several rounds as a payload."""
    flat = [(index, score) for index, scores in enumerate(rounds) for score in scores]
    names = [
        [index, score.site, score.view, score.part, *([score.place] if score.images else [])] for index, score in flat
    ]
    counts: Payload = {str(i): {**score.counts, **score.images} for i, (_, score) in enumerate(flat)}
    return counts | {"names": json.dumps(names)}


def unpack_scores(payload: Payload, task: Task) -> list[list[Score]]:
    """The inverse of `pack_scores`."""
    rounds: dict[int, list[Score]] = {}
    for position, (index, site, view, part, *place) in enumerate(json.loads(str(payload["names"]))):
        counts = payload[str(position)]
        assert isinstance(counts, dict)
        score = Score.of(task, site, view, part, counts, "".join(place), bool(place))
        rounds.setdefault(index, []).append(score)
    return list(rounds.values())


def _image_scores(number: int, answers: Sequence[tuple[Request, Outcome]]) -> Iterator[ImageScores]:
    """The probabilities of single images among the answers to requests."""
    for request, outcome in answers:
        for key, counts in outcome.measures.items():
            if "scores" in counts:
                view, _, part = key.partition(".")
                place = request.data or request.site
                yield ImageScores(number, view, request.site, place, part, *_of_images(counts))


def _of_images(counts: Tensors) -> tuple[np.ndarray, ...]:
    return tuple(counts[name].numpy() for name in IMAGES)


def _joined(requests: Sequence[Request]) -> list[Request]:
    """Requests at one site and on the images of one place as one, which adapts a personal model once."""
    joined: dict[tuple[str, str], Request] = {}
    for request in requests:
        known = joined.get((request.site, request.data))
        parts = (*known.measure, *request.measure) if known else request.measure
        joined[request.site, request.data] = replace(request, measure=parts)
    return [*joined.values()]


def _request(site: str, views: Sequence[str], parts: Sequence[str], scores: bool, data: str = "") -> Request:
    return Request(EVALUATE, site, 0, measure=tuple(parts), views=tuple(views), scores=scores, data=data)
