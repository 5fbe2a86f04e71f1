"""Each site keeps a classifier; only the feature extractor is averaged (FedPer, FedNPR-Per)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import ClassVar

from equipoise.contract.component import Component


class PersonalHead(Component):
    """Each site keeps a classifier.

    A site that has not trained yet is measured with the initial or loaded values of these entries.
    """

    name: ClassVar[str] = "personal-head"
    paper: ClassVar[str] = "Arivazhagan et al., FedPer, 2019"
    stays: ClassVar[tuple[str, ...]] = ("head",)
    rank: ClassVar[int] = 10
    image_by_image: ClassVar[bool] = True

    def needs(self) -> AbstractSet[str]:
        return {"model", "sites", "class head"}

    def lacks(self) -> AbstractSet[str]:
        return {"whole model", "class head"}


COMPONENT = PersonalHead
