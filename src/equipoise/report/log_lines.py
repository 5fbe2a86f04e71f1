"""The lines of a run's `events.jsonl` as typed values; fields unknown to this version are ignored."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from equipoise.cells import Matrix

View = Literal["global", "personal", "trained"]
PARTS = ("train", "valid", "test")


class Line(BaseModel):
    """One line."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SiteCounts(Line):
    """How many images of each class a site holds, per part."""

    name: str
    train: list[int]
    valid: list[int] = Field(default_factory=list)
    test: list[int] = Field(default_factory=list)


class Start(Line):
    """What is known before the first round."""

    run: str
    method: str
    classes: list[str]
    sites: list[SiteCounts]
    time: str = ""
    version: str = ""
    device: str = ""
    config: dict[str, Any] = Field(default_factory=dict)
    data: str = ""
    judging_data: str = ""
    warnings: list[str] = Field(default_factory=list)
    disclosure: dict[str, dict[str, str]] = Field(default_factory=dict)
    paper: str = ""
    parameters: int | None = None
    model_bytes: int | None = None
    task: str = "classification"
    encoder: dict[str, float] = Field(default_factory=dict)

    @cached_property
    def images(self) -> pd.DataFrame:
        """Images at each site: columns by part (train, valid, test) and class."""
        counts = {part: [getattr(site, part) or [0] * len(self.classes) for site in self.sites] for part in PARTS}
        names = [site.name for site in self.sites]
        return pd.concat({part: pd.DataFrame(own, names, self.classes, int) for part, own in counts.items()}, axis=1)

    @cached_property
    def training_images(self) -> pd.DataFrame:
        """Training images of each class at the sites that train."""
        train = self.images["train"]
        return train[train.sum(axis=1) > 0]

    @property
    def evaluators(self) -> list[str]:
        """The places where models are only measured."""
        return [name for name in self.images.index if name not in self.training_images.index]


class SiteRound(Line):
    """What one site did in one round; `sent` and `received` are bytes, seen from the site."""

    loss: float | None = None
    seconds: float = 0.0
    examples: int = 0
    sent: int = 0
    received: int = 0


class Round(Line):
    """A completed round; `missing` says why a site was left out of it, `entries` how many bytes a site sent of what."""

    round: int
    seconds: float
    lr: float | None = None
    sites: dict[str, SiteRound] = Field(default_factory=dict)
    missing: dict[str, str] = Field(default_factory=dict)
    entries: dict[str, float] = Field(default_factory=dict)


class Score(Line):
    """A model scored on one part of some images; `trained` is a site's model before communication."""

    part: str
    view: View
    site: str | None = None
    round: int | None = None
    metrics: dict[str, float | None]
    recall: list[float | None] = Field(default_factory=list)


class Evaluation(Score):
    """One model scored at one site after a round."""

    round: int
    site: str


class Final(Score):
    """One line of the results: a view scored at a site, as the mean over sites, pooled, or on a cohort.

    There is no one `round` over sites that each chose their own. Where it is the mean over several `rounds`, that is
    their number, `round` is the last of them, and cells of the confusion matrix may be fractions.
    """

    rule: str
    rounds: int = 1
    scope: Literal["site", "mean", "pooled", "cohort"]
    confusion: Matrix | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


class SiteChoice(Line):
    """The round that one site chose by its own validation data."""

    round: int
    value: float | None = None


class Selection(Line):
    """Which round was chosen, on validation data alone; `sites` where each site chose its own.

    `missing` are sites that did not measure the chosen round.
    """

    rule: str
    metric: str
    view: str
    round: int
    value: float | None = None
    sites: dict[str, SiteChoice] = Field(default_factory=dict)
    missing: list[str] = Field(default_factory=list)

    @property
    def rounds(self) -> set[int]:
        """The chosen rounds."""
        return {choice.round for choice in self.sites.values()} or {self.round}

    @property
    def score(self) -> float | None:
        """The validation score that the choice rests on; the mean over sites where each chose by its own."""
        known = [choice.value for choice in self.sites.values() if choice.value is not None]
        return sum(known) / len(known) if known else self.value if not self.sites else None


KINDS: dict[str, type[Line]] = {
    "start": Start,
    "round": Round,
    "evaluation": Evaluation,
    "selection": Selection,
    "final": Final,
}
