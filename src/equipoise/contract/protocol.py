"""The words that servers, sites and engines exchange: asks, work, payloads and replies.

A method's server yields `Ask`s and is sent back `Replies`; a method's client yields work (`Train`, `Scan`,
`Evaluate`) and is sent back its result. Nothing here knows where a site runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from equipoise.contract.bulk import all_finite
from equipoise.core.errors import UserError

Tensors = dict[str, Tensor]
Value = Tensor | int | float | str | bool | Tensors
Payload = dict[str, Value]


@dataclass(frozen=True)
class PerSite:
    """A payload value that differs from site to site (PFA sends each site its own weights).

    >>> PerSite({"A": 0.5, "B": 2.0}).values["B"]
    2.0
    """

    values: Mapping[str, Value]


class Ask:
    """A request to some sites to perform `action`; keyword arguments are the message.

    >>> Ask("train", ["A", "B"], weight=PerSite({"A": 0.5, "B": 2.0}), step=3).message("B")
    {'weight': 2.0, 'step': 3}
    """

    def __init__(self, action: str, sites: Sequence[str], **payload: Value | PerSite):
        self.action = action
        self.sites = tuple(sites)
        self.payload = payload

    @property
    def same_for_all(self) -> bool:
        """Whether all sites are sent the same."""
        return not any(isinstance(value, PerSite) for value in self.payload.values())

    def message(self, site: str) -> Payload:
        """What this one site is sent."""
        return {
            name: value.values[site] if isinstance(value, PerSite) else value for name, value in self.payload.items()
        }


@dataclass(frozen=True)
class Train:
    """Local training in the shared loop. Without numbers: what the config says; 0 epochs or steps: none.

    >>> import equipoise as eq
    >>> class Twice(eq.FedAvgClient):
    ...     def train(self, message):
    ...         yield eq.Train(epochs=1)
    ...         yield eq.Train(epochs=1, first_epoch=1)
    ...         return self.update()
    """

    epochs: int | None = None
    steps: int | None = None
    phase: str = "main"
    first_epoch: int = 0
    """Number of the first epoch, where the site already trained in another ask of the round: no draw is repeated."""


@dataclass(frozen=True)
class Scan:
    """`function(batch) -> {name: tensor}` over a whole part of the local data, without gradients.

    `view` is "plain" (as in evaluation), "augmented" (a training view, drawn anew in each pass) or "cached" (a
    training view that is the same in every round, as if the images had been augmented once and stored). `reduce` is
    "sum" (tensors are added up) or "concatenate" (rows are joined in the order of the data).

    >>> import equipoise as eq
    >>> class Bright(eq.FedAvgClient):
    ...     discloses = {"train": {**eq.FedAvgClient.discloses["train"], "brightness": "sum of all grey levels"}}
    ...     def train(self, message):
    ...         found = yield eq.Scan("train", lambda batch: {"brightness": batch.image.sum()})
    ...         yield eq.Train()
    ...         return self.update() | found
    """

    part: str
    function: Callable[[Any], Tensors]
    view: str = "plain"
    reduce: str = "sum"


@dataclass(frozen=True)
class Evaluate:
    """Measure predictors `{name: function(batch) -> logits}` on a part; gives `{name: counts}`.

    Where a site has no images in the part, its training images are used. `view` is as in `Scan`.

    >>> import equipoise as eq
    >>> class Careful(eq.FedAvgClient):
    ...     def train(self, message):
    ...         before = yield eq.Evaluate("valid", {"net": lambda batch: self.predict("global", batch)})
    ...         yield eq.Train(epochs=1 if before["net"]["loss"] < 1 else 2)
    ...         return self.update()
    """

    part: str
    predictors: Mapping[str, Callable[[Any], Tensor]]
    view: str = "plain"


class SiteFailure(Exception):
    """A site cannot answer; the round goes on without it."""


class Diverged(SiteFailure):
    """What a site would keep from a round is not finite."""


Work = Train | Scan | Evaluate
Conversation = Generator[Ask, "Replies", None]
Action = Generator[Work, Any, Payload]


@dataclass
class Reply:
    """One site's answer."""

    site: str
    payload: Mapping[str, Value]

    def __getitem__(self, name: str) -> Any:
        return self.payload[name]


class Replies(Sequence[Reply]):
    """The accepted replies of one Ask, in site order; payloads may be read lazily from disk."""

    def __init__(self, replies: Sequence[Reply], missing: Mapping[str, str] | None = None):
        self._replies = list(replies)
        self.missing = dict(missing or {})

    def __getitem__(self, index: Any) -> Any:
        return self._replies[index]

    def __len__(self) -> int:
        return len(self._replies)

    def __iter__(self) -> Iterator[Reply]:
        return iter(self._replies)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that answered, in order."""
        return tuple(reply.site for reply in self._replies)

    def values(self, name: str) -> list[Any]:
        """One payload entry of every site, in site order."""
        return [reply[name] for reply in self._replies]


class Sums(Replies):
    """What sites sent, added up: `whole` holds sums and means, and the server cannot read a single site's reply."""

    def __init__(self, whole: Mapping[str, Value], sites: Sequence[str], missing: Mapping[str, str] | None = None):
        super().__init__([], missing)
        self.whole = whole
        self._sites = tuple(sites)

    def __getitem__(self, index: Any) -> Any:
        raise SingleReplies

    def __iter__(self) -> Iterator[Reply]:
        raise SingleReplies

    def __len__(self) -> int:
        return len(self._sites)

    @property
    def sites(self) -> tuple[str, ...]:
        return self._sites

    def values(self, name: str) -> list[Any]:
        raise SingleReplies


class SingleReplies(UserError):
    """A server that reads single replies met sums."""

    def __init__(self) -> None:
        super().__init__(
            "the method's server reads single replies, but privacy.secure_sums = true shows it only sums; read "
            "replies through average, total and mean_by_class, or set privacy.secure_sums = false"
        )


def check_payload(payload: Mapping[str, Any], where: str) -> None:
    """Raise TypeError unless every value is a tensor, a number, a string, a bool or a flat dict of tensors."""
    for name, value in payload.items():
        if not isinstance(name, str):
            raise TypeError(f"{where}: payload names are strings, not {name!r}")
        if isinstance(value, dict):
            wrong = [key for key, entry in value.items() if not isinstance(entry, Tensor)]
            if wrong:
                raise TypeError(f"{where}: '{name}' holds {wrong[0]!r}, which is not a tensor")
        elif not isinstance(value, Tensor | int | float | str | bool):
            raise TypeError(f"{where}: '{name}' is a {type(value).__name__}; only tensors and plain values travel")


def flatten(payload: Mapping[str, Value]) -> tuple[Tensors, dict[str, Any]]:
    """Split a payload into named tensors (`model/head.weight`) and plain values."""
    tensors: Tensors = {}
    plain: dict[str, Any] = {}
    for name, value in payload.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, Mapping):
            plain[name] = {"entries": len(value)}
            tensors.update({f"{name}/{entry}": tensor for entry, tensor in value.items()})
        else:
            plain[name] = value
    return tensors, plain


def unflatten(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> Payload:
    """The inverse of `flatten`."""
    payload: Payload = {name: {} if isinstance(value, Mapping) else value for name, value in plain.items()}
    for name, tensor in tensors.items():
        head, slash, entry = name.partition("/")
        if slash:
            group = payload[head]
            assert isinstance(group, dict)
            group[entry] = tensor
        else:
            payload[name] = tensor
    return payload


def payload_bytes(payload: Mapping[str, Value]) -> int:
    """Bytes of the tensors and plain values of a payload."""
    tensors, plain = flatten(payload)
    return sum(t.numel() * t.element_size() for t in tensors.values()) + 8 * len(plain)


def signature(payload: Mapping[str, Value]) -> dict[str, Any]:
    """What a reply looks like: the shape of each tensor and the kind of each plain value."""
    tensors, plain = flatten(payload)
    shapes: dict[str, Any] = {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
    kinds = {name: "text" if isinstance(value, str) else "number" for name, value in plain.items()}
    return shapes | {name: kind for name, kind in kinds.items() if not isinstance(plain[name], Mapping)}


def first_unfinite(payload: Mapping[str, Value]) -> str | None:
    """The name of the first entry with NaN or infinity, or None. One host sync for all tensors."""
    tensors, plain = flatten(payload)
    for name, value in plain.items():
        if isinstance(value, float) and not math.isfinite(value):
            return name
    return Soundness(tensors).first_unfinite()


class Soundness:
    """Whether tensors are finite: asked for at once, and read once the device has come to it."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
        self._names = list(floats)
        self._finite = all_finite(list(floats.values())) if floats else None

    def first_unfinite(self) -> str | None:
        """The name of the first tensor with NaN or infinity, or None. One host sync for all of them."""
        finite = [] if self._finite is None else self._finite.tolist()
        return next((name for name, good in zip(self._names, finite) if not good), None)
