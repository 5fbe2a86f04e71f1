"""The server side of the contract: an explicit state, and rounds written as conversations with sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from equipoise.contract.notes import Notes
from equipoise.contract.protocol import Conversation, PerSite, Value, check_payload, flatten, unflatten
from equipoise.contract.setting import Setting
from equipoise.core.streams import stream


class State:
    """A server's state: named tensors, dicts of tensors and plain values, nothing else.

    Values are replaced, never changed in place: a snapshot is then a cheap copy of the names.
    """

    values: dict[str, Value]
    _versions: dict[str, list[tuple[int, int]]]

    def __init__(self) -> None:
        object.__setattr__(self, "values", {})
        object.__setattr__(self, "_versions", {})

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "values")[name]
        except KeyError:
            raise AttributeError(f"the server's state has no '{name}'") from None

    def __setattr__(self, name: str, value: Value) -> None:
        check_payload({name: value}, "the server's state")
        self.values[name] = value
        self._versions[name] = _versions(value)

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def snapshot(self) -> dict[str, Value]:
        """The current state."""
        return dict(self.values)

    def check(self) -> None:
        """Refuse a state whose tensors were changed in place since they were set: snapshots have changed with them."""
        for name, value in self.values.items():
            if _versions(value) != self._versions[name]:
                raise TypeError(f"the server changed state.{name} in place; give it a new value instead")

    def restore(self, snapshot: Mapping[str, Value], device: torch.device | str = "cpu") -> None:
        """Go back to a snapshot (or a payload read from disk)."""
        tensors, plain = flatten(snapshot)
        moved = unflatten({name: tensor.to(device) for name, tensor in tensors.items()}, plain)
        object.__setattr__(self, "values", {})
        for name, value in moved.items():
            setattr(self, name, value)


def _versions(value: Value) -> list[tuple[int, int]]:
    """Which tensors a value holds, and how often each has been changed in place."""
    return [(id(tensor), tensor._version) for tensor in flatten({"": value})[0].values()]


class Server:
    """The server side of a method.

    >>> import equipoise as eq
    >>> class Patient(eq.FedAvgServer):
    ...     def round(self, number, sites):
    ...         for name in sites:  # one site after the other
    ...             replies = yield eq.Ask("train", [name], model=self.state.model)
    ...             self.state.model = self.merge(replies, number)
    """

    def __init__(self, setting: Setting):
        self.setting = setting
        self.options = setting.options
        self.state = State()
        #: what the log tells of how the method acts in a round, by site; empty: of all
        self.notes: dict[str, Notes] = {}
        #: work left for later; None where nothing can go on meanwhile
        self.unfinished: list[Callable[[], None]] | None = None
        self.setup()

    def setup(self) -> None:
        """Set the first state, before the first ask."""

    def start(self, roster: Sequence[str]) -> Conversation:
        """Gather once what must be known before the first round."""
        yield from ()

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        """One round, counted from 1: yield `Ask`s, receive `Replies`, change `self.state`."""
        raise NotImplementedError

    def message(self) -> dict[str, Value | PerSite]:
        """What a site needs, besides what it keeps, to predict: sent with every evaluation."""
        return {}

    def later(self, work: Callable[[], None]) -> None:
        """Do work that the next round needs and the evaluation of this one does not.

        Where sites are other processes, the engine does it while they evaluate.
        """
        if self.unfinished is None:
            work()
        else:
            self.unfinished.append(work)

    def note(self, name: str, value: Tensor | float, site: str = "") -> None:
        """Write down how the method acts: a number, or a small tensor; of one site, if named."""
        self.notes.setdefault(site, Notes()).add(name, value)

    def show(self, name: str, images: Tensor) -> None:
        """Keep a few images (n, C, H, W), from 0 to 1, as a file in the run's folder."""
        self.notes.setdefault("", Notes()).show(name, images)

    def random(self, purpose: str, number: int) -> torch.Generator:
        """A generator of the server's own for this purpose and round."""
        seed = stream(self.setting.config.seed, "server", purpose, number)
        return torch.Generator(device=self.setting.device).manual_seed(seed)
