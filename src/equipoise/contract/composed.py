"""What both sides of a method with components know alike: the components, their names, and which entries travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from torch import nn

from equipoise.contract.component import Component
from equipoise.contract.setting import Setting
from equipoise.nets import all_but

#: actions of every method, to whose replies components add entries
TRAIN, EPOCH = "train", "epoch"


class Names:
    """How a component's entries, actions and states are called: with its name before them, or plain.

    The components that a method consists of, and those that are `flat`, have plain names. `names` holds exceptions.
    """

    def __init__(self, plain: Iterable[str], names: Mapping[str, str]):
        self._plain, self._names = frozenset(plain), dict(names)

    def of(self, name: str) -> str:
        """What a name of the host itself is called."""
        return self._names.get(name, name)

    def __call__(self, component: Component, name: str) -> str:
        full = f"{component.name}.{name}"
        plain = component.flat or component.name in self._plain
        return self._names.get(full, name if plain else full)


class Composed:
    """What both sides know alike: the components, the net, and which of its entries travel."""

    composition: ClassVar[tuple[Component, ...]] = ()
    names: ClassVar[Names] = Names((), {})
    setting: Setting

    def spaced(self, component: Component, name: str) -> str:
        """What an entry, action or state of a component is called outside it."""
        return self.names(component, name)

    def new_net(self) -> Any:
        """The net in its first state: that of the component which holds the head, or else the method's."""
        for component in self.composition:
            if "head" in component.holds():
                return component.new_net(self.setting)
        make: Callable[[], Any] = getattr(super(), "new_net", self.setting.new_net)
        return make()

    def shared_entries(self, net: nn.Module) -> Iterable[str]:
        """The state-dict names that travel: the method's, without the groups that components keep at the sites."""
        wanted = set(all_but(net, *self.staying()))
        method: Any = super()
        return tuple(entry for entry in method.shared_entries(net) if entry in wanted)

    @classmethod
    def staying(cls) -> tuple[str, ...]:
        """The groups of the net that components keep at the sites."""
        return tuple(dict.fromkeys(group for component in cls.composition for group in component.stays))

    @classmethod
    def by_epoch(cls) -> bool:
        """Whether any component acts between local epochs."""
        return any(component.by_epoch for component in cls.composition)

    @classmethod
    def asks_by_epoch(cls) -> bool:
        """Whether any component exchanges something after each local epoch."""
        return any(component.asks_by_epoch for component in cls.composition)
