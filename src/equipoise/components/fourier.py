"""Sites share the low frequencies of the weights that travel, and keep the high ones (PRR's PFA, Eqs. 1 to 4).

Chen et al., 2022, Section III-B; the transform itself is `fourier_average`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from equipoise.aggregation import band_schedule
from equipoise.components._fourier_merging import layer_kinds, merge_deputies
from equipoise.components._merging import average
from equipoise.contract.component import Component, ServerSide
from equipoise.contract.protocol import Conversation, PerSite, Replies, Tensors


class FourierServer(ServerSide):
    """Merges the models of each site for itself; sites that took no part keep what they were last sent."""

    def setup(self) -> None:
        kinds = layer_kinds(self.server.new_net(), self.options.classifier_rows)
        # Norm layers and statistics, where they travel, get the plain mean.
        self.kinds = {entry: kinds.get(entry, "") for entry in self.server.state.model}
        self.state.roster = ""
        self.state.deputies = {}

    def start(self, roster: Sequence[str]) -> Conversation:
        self.state.roster = "\n".join(roster)
        yield from ()

    def model_for(self, sites: Sequence[str]) -> Tensors | PerSite:
        """Each site's own, and the mean of the others' to a site that never took part."""
        model, own = self.server.state.model, self.state.deputies
        if not own:
            return model
        return PerSite({site: {e: own.get(f"{site}/{e}", mean) for e, mean in model.items()} for site in sites})

    def evaluated(self) -> Tensors | PerSite:
        """The models that all sites predict by."""
        return self.model_for(self.state.roster.split("\n"))

    def merge(self, updates: Replies, number: int) -> Tensors:
        options, rounds = self.options, self.setting.config.train.rounds
        if options.share == "off":
            return average(updates, "model", self.weighting)
        band = band_schedule(number - 1, rounds, options.band_start, options.band_end)
        parts = options.share if options.share in ("amplitude", "phase") else "both"
        phase = "complex" if options.share == "complex" else "angle"
        mean, merged = merge_deputies(updates, self.kinds, band, phase, parts)
        self.state.deputies = self.state.deputies | merged
        return mean


class Fourier(Component):
    """Progressive Fourier aggregation."""

    name: ClassVar[str] = "fourier"
    paper: ClassVar[str] = "Chen et al., PRR-Imbalance, TMI 2022"
    rank: ClassVar[int] = 50
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"share": "off"}
    Server: ClassVar[type[ServerSide]] = FourierServer

    share: Literal["off", "both", "amplitude", "phase", "complex"] = Field(
        "both",
        description="part of the low frequencies that sites share; complex: mean of complex numbers; off: plain mean",
    )
    band_start: float = Field(0.7, ge=0, le=1, description="share of frequencies shared in the first round, 2 r_0")
    band_end: float = Field(0.95, ge=0, le=1, description="limit that this share grows towards, 2 r_1")
    classifier_rows: bool = Field(True, description="transform the last layer class by class, not as a matrix")

    @model_validator(mode="after")
    def _ordered(self) -> Fourier:
        if self.band_start > self.band_end:
            raise ValueError(f"band_start = {self.band_start} is above band_end = {self.band_end}")
        return self

    def holds(self) -> AbstractSet[str]:
        return {"merge"}

    def needs(self) -> AbstractSet[str]:
        return {"model", "sites"}

    def single_replies(self) -> str:
        return "" if self.share == "off" else "it makes a model for each site of that site's own weights"

    def lacks(self) -> AbstractSet[str]:
        return {"one model"}

    def views(self, views: tuple[str, ...]) -> tuple[str, ...]:
        return ("personal",)

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        if self.share != "off":
            return {}
        return dict.fromkeys(("band_start", "band_end", "classifier_rows"), "fourier.share is off")


COMPONENT = Fourier
