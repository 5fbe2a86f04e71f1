"""Which round is reported: the best on validation data, one for the whole federation or each site's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from equipoise.contract.config import Config
from equipoise.engine.evaluation import Score
from equipoise.engine.reported import TRAINED, mean_over_sites, reported_round

Choice = dict[str, Any]
"""A chosen `round`, the validation `value` that chose it, where there is validation data, and the places that are
`missing` in that value, if any."""


class Selection:
    """The choice so far. Validation scores of `view` alone decide; test scores are only kept.

    A mean over fewer places may be higher just because a hard one is missing. So of the rounds only those compete that
    were measured everywhere, or, where none was, those that were measured at most places.

    `kept` are test scores that cannot be measured at the end, since the models are gone: one list for each of the last
    rounds where their mean is reported, else one list of the scores right after training in the rounds that stand.
    """

    def __init__(self, config: Config, view: str):
        self.config = config
        self.view = view
        #: a global model is one for all, and so is its round
        self.by_site = config.evaluation.select == "site" and view != "global"
        self.federation: Choice = {}
        self.sites: dict[str, Choice] = {}
        self.kept: list[list[Score]] = []

    def note(self, number: int, scores: Sequence[Score], missing: Sequence[str] = ()) -> None:
        """Judge a round by its validation scores, and keep what will be needed of its test scores.

        Args:
            missing: places whose validation score is due, but did not come
        """
        settings = self.config.evaluation
        judged = [
            score
            for score in scores
            if score.part == "valid" and score.view == self.view and score.metric(settings.score) is not None
        ]
        value = mean_over_sites([s.summary for s in judged])["metrics"][settings.score] if judged else None
        self.federation = self._better(self.federation, number, value, missing)
        if self.by_site:
            for score in judged:
                before = self.sites.get(score.site, {})
                self.sites[score.site] = self._better(before, number, score.metric(settings.score))
        self._keep(number, [score for score in scores if score.part == "test"])

    def _better(self, before: Choice, number: int, value: float | None, missing: Sequence[str] = ()) -> Choice:
        """The choice between the one that stands and a new round."""
        new: Choice = {"round": number}
        new |= {"value": value} if value is not None else {}
        new |= {"missing": list(missing)} if missing else {}
        known = self.config.evaluation.rule == "best" and "value" in before
        if known and (value is None or _merit(new) <= _merit(before)):
            return before
        # Without validation data nothing can be judged: the newest round stands.
        return new

    def _keep(self, number: int, tests: Sequence[Score]) -> None:
        if self.config.evaluation.rule == "mean_last":
            self.kept += [list(tests)] if self.config.may_report(number) else []
            return
        older = [score for scores in self.kept for score in scores if self.round_of(TRAINED, score.site) != number]
        newer = [s for s in tests if s.view == TRAINED and self.round_of(TRAINED, s.site) == number]
        self.kept = [older + newer]

    def round_of(self, view: str, site: str | None) -> int | None:
        """The round that is reported of a view at a site; None for a figure over sites that have each their own."""
        own = {name: choice["round"] for name, choice in self.sites.items()}
        return reported_round(view, site, self.view, self.common, own)

    def reports(self, number: int, view: str, site: str) -> bool:
        """Whether a view at a site reports this round."""
        return self.round_of(view, site) == number

    @property
    def common(self) -> int:
        """The federation's round."""
        return self.federation.get("round", self.config.train.rounds)

    @property
    def rounds(self) -> set[int]:
        """Every round whose models are needed at the end."""
        return {self.common, *(choice["round"] for choice in self.sites.values())}

    def reported(self, sites: Iterable[str]) -> list[tuple[int, list[str]]]:
        """The rounds, each with the sites whose personal models are of that round; the federation's comes last."""
        order = [*sorted(self.rounds - {self.common}), self.common]
        return [(number, [s for s in sites if self.round_of("personal", s) == number]) for number in order]

    def prolong(self, before: int, latest: int) -> None:
        """Forget the test scores of rounds before the last ones, after `latest` of `before` rounds
        of a run that goes on beyond them."""
        if self.config.evaluation.rule == "mean_last":
            noted = [number for number in self.config.evaluation.reportable(before) if number <= latest]
            self.kept = [scores for number, scores in zip(noted, self.kept) if self.config.may_report(number)]

    def record(self) -> dict[str, Any]:
        """The choice as plain values."""
        return self.federation | ({"sites": self.sites} if self.sites else {})

    def restore(self, record: Mapping[str, Any], kept: list[list[Score]]) -> None:
        """Go back to a recorded choice and the scores kept with it."""
        self.sites = dict(record.get("sites", {}))
        self.federation = {key: value for key, value in record.items() if key != "sites"}
        self.kept = kept


def _merit(choice: Choice) -> tuple[int, float]:
    """What rounds are compared by: how few places are missing, then the value."""
    return -len(choice.get("missing", ())), choice["value"]
