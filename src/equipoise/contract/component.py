"""A component is one idea of a paper that can be put on any method.

It has options, a side at every site and a side on the server. It names the seat that it holds, what it needs of its
method, and what it takes away. `equipoise.contract.composition` puts components on a method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal, get_args, get_origin

from equipoise.contract.client import Batch, Gradients, PerBatch
from equipoise.contract.component_sides import Message, ServerSide, SiteSide
from equipoise.contract.config import Config
from equipoise.contract.setting import Setting
from equipoise.core.table import Table

__all__ = [
    "Batch",
    "Component",
    "Gradients",
    "Message",
    "Options",
    "PerBatch",
    "ServerSide",
    "Sheet",
    "SiteSide",
    "variations",
]

#: {action: {entry: its meaning}}: what leaves a site
Sheet = dict[str, dict[str, str]]


class Options(Table):
    """The options of a method. They also say what the method is made of under these options.

    >>> from pydantic import Field
    >>> class Mine(Options):
    ...     part: float = Field(0.5, gt=0, le=1, description="part of the way to the mean")
    >>> Mine(part=0.2).part
    0.2
    """

    #: options that define the method: a run warns if one has no effect, even at its default
    distinctive: ClassVar[tuple[str, ...]] = ()
    #: settings, as for `--set`, under which a run of few rounds reaches all that it does, at the usual cost of a round
    in_short: ClassVar[tuple[str, ...]] = ()
    #: further settings under which all that costs little, where results do not matter
    at_little_cost: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def switches(cls) -> dict[str, tuple[Any, ...]]:
        """The options that take one of a few values, and these values."""
        found: dict[str, tuple[Any, ...]] = {}
        for name, field in cls.model_fields.items():
            if field.annotation is bool:
                found[name] = (False, True)
            elif get_origin(field.annotation) is Literal:
                found[name] = get_args(field.annotation)
        return found

    @classmethod
    def suited(cls, rounds: int) -> Mapping[str, Any]:
        """Options that suit a number of rounds, where the user sets none."""
        return {}

    def components(self) -> Sequence[Component]:
        """The components that the method consists of, besides its own server and client."""
        return ()

    def holds(self) -> AbstractSet[str]:
        """The seats that the method's own code holds; `train.loss`: it has a loss unless a component brings one."""
        return frozenset()

    def lacks(self) -> AbstractSet[str]:
        """The words that do not hold with it."""
        return frozenset()

    def needs(self) -> AbstractSet[str]:
        """Words that the data's task or, of a component, the method must grant, or another component must give."""
        return frozenset()

    def single_replies(self) -> str:
        """Why its server has to read what each site sent, in words; empty: sums over sites are enough."""
        return ""

    def only_simulated(self) -> str:
        """Why a run with these options cannot be between hospitals, in words; empty: it can."""
        return ""

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        """Options, or dotted keys of the config, that do nothing under this setting, and why."""
        return {}

    def cautions(self, setting: Any, sites: Sequence[dict[str, Any]]) -> Iterator[str]:
        """Warnings about this data; `sites` have a name and the images of each class by part."""
        yield from ()


class Component(Options):
    """A component with its options; an instance is what a run uses.

    >>> import equipoise as eq
    >>> class Site(eq.SiteSide):
    ...     def loss(self, batch, out, loss):
    ...         return loss + self.options.weight * out.logits.square().mean()
    >>> class Small(eq.Component):
    ...     name = "small-logits"
    ...     rank = 45
    ...     Site = Site
    ...     weight: float = 0.01
    >>> fed = eq.load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> result = eq.train(fed, components=[Small(weight=0.1)], rounds=1, epochs=1, out="runs/small")
    >>> result.config.methods["small-logits"]
    {'weight': 0.1}

    Attributes:
        name: how users name it, and the prefix of its entries, actions and states
        paper: where the idea comes from
        stays: groups of the net (body, head, norm, statistics) that stay at the sites
        rank: components act in this order, not in the order of the user's list
        flat: its entries and states carry no prefix
        image_by_image: its part of the loss is a mean over images, and it keeps or sends only gradients and
        `class_counts` of training images: so `privacy.epsilon` can hold
        counts_epochs: the server sends sites the number of the round's next local epoch
        defaults: config values that choosing it implies, unless the user sets them
        limit: options under which it changes no bit of a method that trains by plain cross entropy and weighs sites by
            size; empty where it has no such limit
    """

    name: ClassVar[str]
    paper: ClassVar[str] = ""
    stays: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int] = 50
    flat: ClassVar[bool] = False
    image_by_image: ClassVar[bool] = False
    counts_epochs: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}
    limit: ClassVar[Mapping[str, Any]] = {}
    Site: ClassVar[type[SiteSide]] = SiteSide
    Server: ClassVar[type[ServerSide]] = ServerSide

    def fitted(self, lacks: AbstractSet[str], others: Sequence[Component]) -> Component:
        """The component's variant for a method that lacks some words, beside other components."""
        return self

    def gives(self) -> AbstractSet[str]:
        """Words that other components may need."""
        return frozenset()

    def discloses(self) -> Sheet:
        """What leaves a site because of this component, under these options."""
        return {}

    def single_replies(self) -> str:  # a component that merges by sums overrides this
        return "it merges what sites send in its own way" if "merge" in self.holds() else ""

    def views(self, views: tuple[str, ...]) -> tuple[str, ...]:
        """The models that can be measured, of those that the method has."""
        return ("personal",) if self.stays else views

    def new_net(self, setting: Setting) -> Any:
        """The net, where this component holds the head; the same at first on the server and at every site."""
        raise NotImplementedError

    def remarks(self, setting: Setting) -> Sequence[str]:
        """What a user should know of the component in this run: a run tells it among its warnings."""
        return ()

    def check(self, config: Config) -> None:
        """Refuse settings under which the component cannot work."""

    @property
    def by_epoch(self) -> bool:
        """Whether a site acts between its local epochs."""
        return False

    @property
    def asks_by_epoch(self) -> bool:
        """Whether sites and server exchange something after each local epoch."""
        return False

    @property
    def sole_loss(self) -> bool:
        """Whether this component's loss is all that a step minimises: nothing else of the loss is computed."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether a site changes what it predicts by before each evaluation."""
        return False


def variations(options: type[Any]) -> list[Any]:
    """The default options, and each of them with one switch turned."""
    usual = options()
    found = [usual]
    for name, values in options.switches().items():
        for value in values:
            if value != getattr(usual, name):
                found.append(usual.model_copy(update={name: value}))
    return found
