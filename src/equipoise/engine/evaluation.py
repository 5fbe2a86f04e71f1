"""Measuring models: the global model and each site's personal one apart, per site, mean over sites, and pooled."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from equipoise import metrics
from equipoise.data.federation import Federation, Site
from equipoise.engine.base import Engine
from equipoise.engine.contract import Server
from equipoise.engine.protocol import Payload, Tensors
from equipoise.engine.site import EVALUATE, Request
from equipoise.errors import UserError
from equipoise.tasks import Task


@dataclass
class Score:
    """The measured counts of one model on one part of one site's images, and what comes of them."""

    site: str
    view: str
    part: str
    counts: Tensors
    summary: dict[str, Any]

    @classmethod
    def of(cls, task: Task, site: str, view: str, part: str, counts: Tensors) -> Score:
        """Summarise counts."""
        return cls(site, view, part, counts, task.summary(counts))

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

    def deciding_view(self) -> str:
        """Whose validation score selects the round: personal models where there are any."""
        wanted = self.server.setting.config.evaluation.view
        if wanted == "auto":
            return "personal" if "personal" in self.views else "global"
        if wanted not in self.views:
            raise UserError(f"evaluation.view = {wanted!r}, but the method has only {' and '.join(self.views)} models")
        return wanted

    def round_scores(
        self, number: int, parts: Sequence[str], scores: bool = False
    ) -> Generator[None, None, list[Score]]:
        """Scores of every view of a round's models at every place that has images in the parts."""
        return (yield from self._measure(number, self._requests(parts, scores)))

    def _requests(self, parts: Sequence[str], scores: bool) -> list[Request]:
        common = (self.federation.common,) if self.federation.common else ()
        trains = [site.name for site in self.federation.training_sites()]
        places = [site for site in (*self.federation.sites, *common) if _has(site, parts)]
        requests = []
        for site in places:
            if site.name in trains:
                requests.append(_request(site.name, self.views, parts, scores))
            elif "global" in self.views:
                requests.append(_request(site.name, ("global",), parts, scores))
        if "personal" in self.views and common and not any(site.name in trains for site in places):
            requests += [_request(s, ("personal",), parts, scores, data=common[0].name) for s in trains]
        return requests

    def _measure(self, number: int, requests: Sequence[Request]) -> Generator[None, None, list[Score]]:
        outcomes = yield from self.engine.evaluate(self.server.message(), requests, number)
        return [
            Score.of(self.task, request.site, key.partition(".")[0], key.partition(".")[2], counts)
            for request, outcome in zip(requests, outcomes)
            for key, counts in outcome.measures.items()
        ]

    def final(self, number: int, tail: Sequence[Sequence[Score]] | None) -> Generator[None, None, list[dict[str, Any]]]:
        """Test scores of the selected round's models: per site, mean over sites, pooled, and unseen cohorts."""
        rounds = tail or [(yield from self.round_scores(number, ("test",), scores=True))]
        cohorts = yield from self._cohorts(number)
        return [*self._finals(rounds), *cohorts]

    def _finals(self, rounds: Sequence[Sequence[Score]]) -> Iterator[dict[str, Any]]:
        for view in self.views:
            sites: dict[str, list[Score]] = {}
            for scores in rounds:
                for score in scores:
                    if score.view == view:
                        sites.setdefault(score.site, []).append(score)
            if not sites:
                continue
            per_site = {site: mean_scores(scores) for site, scores in sites.items()}
            for site, summary in per_site.items():
                yield {"view": view, "scope": "site", "site": site, **summary}
            means = [mean_scores([s for s in scores if s.view == view]) for scores in rounds]
            yield {"view": view, "scope": "mean", "site": None, **_mean_summaries(means), "extra": _spread(per_site)}
            pooled = [self._pooled([s for s in scores if s.view == view]) for scores in rounds]
            yield {"view": view, "scope": "pooled", "site": None, **_mean_summaries(pooled)}

    def _pooled(self, scores: Sequence[Score]) -> dict[str, Any]:
        """All sites' test images as one set; AUC only where raw scores are there (on one machine)."""
        counts = self.task.merge([score.counts for score in scores])
        if all("scores" in score.counts for score in scores):
            labels = np.concatenate([s.counts["labels"].numpy() for s in scores])
            probabilities = np.concatenate([s.counts["scores"].numpy() for s in scores])
            counts["auc"] = torch.from_numpy(np.nan_to_num(metrics.per_class_auc(labels, probabilities), nan=-1.0))
        return self.task.summary(counts)

    def _cohorts(self, number: int) -> Generator[None, None, list[dict[str, Any]]]:
        """Unseen cohorts: the global model, and the first site's personal one (PRR's Table X)."""
        first, found = self.federation.training_sites()[0].name, []
        for cohort in self.federation.cohorts:
            for view in self.views:
                place = (cohort.name, "") if view == "global" else (first, cohort.name)
                request = _request(place[0], (view,), ("test",), False, data=place[1])
                for score in (yield from self._measure(number, [request])):
                    found.append({"view": view, "scope": "cohort", "site": cohort.name, **score.summary})
        return found


def pack_scores(rounds: Sequence[Sequence[Score]]) -> Payload:
    """Scores of several rounds as a payload."""
    flat = [(index, score) for index, scores in enumerate(rounds) for score in scores]
    names = [[index, score.site, score.view, score.part] for index, score in flat]
    counts: Payload = {str(i): score.counts for i, (_, score) in enumerate(flat)}
    return counts | {"names": json.dumps(names)}


def unpack_scores(payload: Payload, task: Task) -> list[list[Score]]:
    """The inverse of `pack_scores`."""
    rounds: dict[int, list[Score]] = {}
    for position, (index, site, view, part) in enumerate(json.loads(str(payload["names"]))):
        counts = payload[str(position)]
        assert isinstance(counts, dict)
        rounds.setdefault(index, []).append(Score.of(task, site, view, part, counts))
    return list(rounds.values())


def _has(site: Site, parts: Sequence[str]) -> bool:
    return any(part in site.splits and len(site.splits[part]) for part in parts)


def _request(site: str, views: Sequence[str], parts: Sequence[str], scores: bool, data: str = "") -> Request:
    return Request(EVALUATE, site, 0, measure=tuple(parts), views=tuple(views), scores=scores, data=data)


def mean_scores(scores: Sequence[Score]) -> dict[str, Any]:
    """Mean of each metric over scores that have it; confusion matrices add up."""
    return _mean_summaries([score.summary for score in scores])


def _mean_summaries(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(summaries) == 1:
        return dict(summaries[0])
    names = summaries[0]["metrics"]
    return {
        "metrics": {name: _mean([s["metrics"][name] for s in summaries]) for name in names},
        "recall": [_mean(column) for column in zip(*(s["recall"] for s in summaries))],
        "confusion": np.sum([s["confusion"] for s in summaries], axis=0).tolist(),
        "n": int(sum(s["n"] for s in summaries)),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _spread(per_site: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The worst site and the standard deviation over sites, by balanced accuracy."""
    values = {
        site: summary["metrics"]["balanced_accuracy"]
        for site, summary in per_site.items()
        if summary["metrics"]["balanced_accuracy"] is not None
    }
    if not values:
        return {}
    worst = min(values, key=lambda site: values[site])
    return {"worst_site": worst, "worst_site_value": values[worst], "spread": float(np.std(list(values.values())))}
