"""What users write, fully typed. `make check` holds mypy --strict on it, so no public name is of an unknown type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from torch import Tensor, nn

import equipoise as eq


class Half(eq.FedAvgServer):
    """Moves half of the way to the mean."""

    def merge(self, replies: Any, number: int) -> Any:
        """The model between the old one and the mean."""
        mean: dict[str, Tensor] = super().merge(replies, number)
        return {name: self.state.model[name].lerp(value, 0.5) for name, value in mean.items()}


class Sharp(eq.FedAvgClient):
    """Trains on the squared loss."""

    def loss(self, batch: eq.Batch, out: Any) -> Tensor:
        """The loss of a batch."""
        return super().loss(batch, out).square()


class SmallSite(eq.SiteSide):
    """Adds a term to the loss."""

    def loss(self, batch: eq.Batch, out: Any, loss: Tensor) -> Tensor:
        """The loss with the term."""
        logits: Tensor = out.logits
        return loss + logits.square().mean()


class Small(eq.Component):
    """Small logits."""

    name: ClassVar[str] = "small"
    rank: ClassVar[int] = 45
    Site: ClassVar[type[eq.SiteSide]] = SmallSite


METHOD = eq.Method(Half, Sharp, "none", 2026, "server step")


def net(num_classes: int, channels: int) -> nn.Module:
    """A linear net."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, num_classes))


def kappa(tally: eq.Tally) -> float:
    """Accuracy beyond one half."""
    return 2 * tally.accuracy - 1


def listing(config: Any, root: Path) -> eq.Listing:
    """One image of each class."""
    records = tuple(eq.Record(name, eq.Location(root / f"{name}.png"), at, "A", name) for at, name in enumerate("ab"))
    return eq.Listing("mine", ("a", "b"), records)


def program(images: np.ndarray, labels: Sequence[str], folder: Path) -> pd.DataFrame:
    """All calls that users make, from arrays to a comparison."""
    fed: eq.Federation = eq.Federation.from_arrays(images, labels, 2, subgroups={"sex": labels})
    again: eq.Federation = eq.load_federation("phantom", sites=3)
    counts: pd.DataFrame = fed.table()
    result: eq.Result = eq.train(
        fed, METHOD, components=[Small, "margins"], net=net, rounds=2, out=folder, settings={"evaluation.metric": kappa}
    )
    assert result.finished and not result.warnings and counts.size
    model: nn.Module = result.model("site 1")
    page: Path = result.resume(rounds=4).report()
    tables = [result.scores(interval=True), result.history(), result.predictions(fed), result.predict(images, "site 1")]
    tables += [result.evaluate(again, by="sex"), eq.load_result(folder, method=METHOD).curves()]
    found: eq.Comparison = eq.compare(fed, ["local", METHOD], components=["margins"], seeds=2)
    print(model, page, found.report(), len(tables), *found.results)
    return found.table("macro_f1")
