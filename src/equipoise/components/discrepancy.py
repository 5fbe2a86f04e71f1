"""The more a site's classes are out of balance, the less its model counts (FedDisco)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

from pydantic import Field

from equipoise.components._merging import average_by, site_weights
from equipoise.contract.component import Component, ServerSide, Sheet, SiteSide
from equipoise.contract.disclosed import Entry, shown
from equipoise.contract.protocol import Payload, Replies, Tensors, Work


class DiscrepancyServer(ServerSide):
    """Weighs the sites by max(0, n_k / N - a d_k + b)."""

    def merge(self, updates: Replies, number: int) -> Tensors:
        return average_by(self.weights(updates), updates)

    def weights(self, updates: Replies) -> list[float]:
        """Un-normalised weights. They are sizes where a and b are 0, and where no site would count at all."""
        sizes = site_weights(updates, self.weighting)
        far = self.values(updates, "discrepancy").values("discrepancy")
        shifts = [self.options.b - self.options.a * distance for distance in far]
        found = [max(size + shift * sum(sizes), 0.0) for size, shift in zip(sizes, shifts)]
        return found if any(found) else sizes


class DiscrepancySite(SiteSide):
    """Tells how far its class shares are from equal ones."""

    def reply(self) -> Generator[Work, Any, Payload]:
        yield from ()
        counts = shown(self.class_counts, self.setting.config.privacy.limit)
        shares = (counts / counts.sum()).double()
        equal = 1 / self.num_classes
        if self.options.measure == "l2":
            return {"discrepancy": float((shares - equal).norm())}
        return {"discrepancy": float((shares * (shares / equal).clamp(min=1e-12).log()).sum())}


class Discrepancy(Component):
    """Discrepancy-aware aggregation."""

    name: ClassVar[str] = "discrepancy"
    paper: ClassVar[str] = "Ye et al., FedDisco, ICML 2023"
    rank: ClassVar[int] = 53
    image_by_image: ClassVar[bool] = True
    limit: ClassVar[Mapping[str, Any]] = {"a": 0, "b": 0}
    Site: ClassVar[type[SiteSide]] = DiscrepancySite
    Server: ClassVar[type[ServerSide]] = DiscrepancyServer

    a: float = Field(0.5, ge=0, description="factor of a site's discrepancy, which lowers its share of the images")
    b: float = Field(0.1, description="constant added to every site's share")
    measure: Literal["l2", "kl"] = Field(
        "l2", description="distance of class shares from equal ones: Euclidean, or the Kullback-Leibler divergence"
    )

    def holds(self) -> AbstractSet[str]:
        return {"merge"}

    def needs(self) -> AbstractSet[str]:
        return {"model", "sites"}

    def discloses(self) -> Sheet:
        return {"train": {"discrepancy": Entry("distance of the site's class shares from equal ones", "shares")}}


COMPONENT = Discrepancy
