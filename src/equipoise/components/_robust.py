"""What robust merging has in common: it reads each site's own model, and replaces the mean over sites."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from equipoise.contract.component import Component


class RobustMerging(Component):
    """A rule of merging that bounds what a few lying sites can do."""

    def holds(self) -> AbstractSet[str]:
        return {"merge"}

    def needs(self) -> AbstractSet[str]:
        return {"model", "sites"}

    def single_replies(self) -> str:
        return "it compares each site's model with the others'; sites check their own updates"
