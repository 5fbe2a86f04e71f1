"""The lines of a run's `events.jsonl` as typed values."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

View = Literal["global", "personal", "trained"]
Confusion = list[list[float]]
Metrics = dict[str, float | None]


class Event(BaseModel):
    """One line of `events.jsonl`; fields unknown to this version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SiteCounts(Event):
    """How many images of each class a site holds, per part."""

    name: str
    train: list[int]
    valid: list[int] = Field(default_factory=list)
    test: list[int] = Field(default_factory=list)


class Start(Event):
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


class SiteRound(Event):
    """What one site did in one round; `sent` and `received` are bytes, seen from the site."""

    loss: float | None = None
    seconds: float = 0.0
    examples: int = 0
    sent: int = 0
    received: int = 0


class Round(Event):
    """A completed round; `missing` says why a site was left out of it, `entries` how many bytes a site sent of what."""

    round: int
    seconds: float
    lr: float | None = None
    sites: dict[str, SiteRound] = Field(default_factory=dict)
    missing: dict[str, str] = Field(default_factory=dict)
    entries: dict[str, float] = Field(default_factory=dict)


class Evaluation(Event):
    """One model scored on one part of one site; `trained` is the site's model before communication."""

    round: int
    part: str
    view: View
    site: str
    n: int = 0
    metrics: Metrics
    recall: list[float | None] = Field(default_factory=list)
    confusion: Confusion | None = None


class SiteChoice(Event):
    """The round that one site chose by its own validation data."""

    round: int
    value: float | None = None


class Selection(Event):
    """Which round was chosen, on validation data alone; `sites` where each site chose its own.

    `missing` are places that did not measure the chosen round.
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
        return mean([choice.value for choice in self.sites.values()]) if self.sites else self.value


class Result(Event):
    """One line of the results: a view scored at a site, as the mean over sites, pooled, or on a cohort.

    There is no one `round` over sites that each chose their own. Where it is the mean over several `rounds`, that is
    their number, `round` is the last of them, and cells of the confusion matrix may be fractions.
    """

    part: str
    rule: str
    round: int | None = None
    rounds: int = 1
    view: View
    scope: Literal["site", "mean", "pooled", "cohort"]
    site: str | None = None
    metrics: Metrics
    recall: list[float | None] = Field(default_factory=list)
    confusion: Confusion | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are known; None when none is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
