"""The site side of a method: a workplace that serves one site after another.

Whatever its hooks read is a declared tensor, allocated once in `build` and filled in place before each ask, so that the
same code runs eagerly and inside a captured graph.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.contract.bulk import copy_all
from equipoise.contract.config import OptimiserConfig
from equipoise.contract.optimiser import Optimiser
from equipoise.contract.protocol import Action, Payload, Tensors, Train, Work
from equipoise.contract.setting import Setting
from equipoise.contract.workplace import Phase, Workplace
from equipoise.losses import cross_entropy
from equipoise.nets import class_rows, groups

#: gradients by parameter; a parameter without one is not among them
Gradients = dict[Tensor, Tensor]


@dataclass(frozen=True)
class PerBatch:
    """A field that `prepare` adds with one row per batch instead of one per sample."""

    rows: Tensor


class Batch(SimpleNamespace):
    """The fields of one batch: `image` (B, C, H, W), `label` (B,), and what `prepare` adds."""


class Client:
    """The site side of a method. Subclasses declare state in `build` and supply actions and hooks."""

    #: {action: {reply entry: what it is}}: everything that leaves a site. Other entries are refused.
    discloses: ClassVar[dict[str, dict[str, str]]] = {}
    #: which models can be evaluated: "global" (the same everywhere) and "personal"
    views: ClassVar[tuple[str, ...]] = ("global",)
    #: how many augmented views of an image a batch holds (`image`, `second`)
    image_views: int = 1
    #: batches that one call of `step` takes
    batches_per_step: int = 1

    def __init__(self, setting: Setting):
        self.setting = setting
        self.config = setting.config
        self.options = setting.options
        self.num_classes = setting.num_classes
        self.workplace = Workplace(self)
        self._full_precision = False
        self.class_counts = self.scratch("class_counts", torch.zeros(self.num_classes))
        self.build()
        self.workplace.settle()

    @property
    def round(self) -> int:
        """Number of the present round, counted from 1; 0 before the first."""
        return self.workplace.round

    @classmethod
    def adapts(cls) -> bool:
        """Whether sites change their personal model before it is evaluated."""
        return cls.adapt is not Client.adapt

    # ---- declarations, used in build() ---------------------------------------------------------

    def build(self) -> None:
        """Make nets and declare every tensor that hooks read."""
        raise NotImplementedError

    def keeps(self, name: str, target: Any, entries: Iterable[str] | None = None) -> Any:
        """`target` (a tensor, or entries of a module) outlives an ask and never leaves the site by itself."""
        return self.workplace.declare("kept", name, target, entries)

    def receives(self, name: str, target: Any, entries: Iterable[str] | None = None) -> Any:
        """`target` is filled from the message entry `name`; without one it holds NaN."""
        return self.workplace.declare("received", name, target, entries)

    def scratch(self, name: str, target: Any, entries: Iterable[str] | None = None) -> Any:
        """`target` starts each ask anew: a tensor at its first value, a module at NaN until it is filled."""
        return self.workplace.declare("scratch", name, target, entries)

    def reference(self, module: nn.Module) -> nn.Module:
        """A frozen module: always in eval mode, never trained."""
        self.workplace.references.append(module.requires_grad_(False).eval())
        return module

    def phase(
        self,
        name: str,
        modules: Mapping[str, nn.Module] | nn.Module,
        entries: Iterable[str] | None = None,
        optimiser: OptimiserConfig | None = None,
        norm: str = "train",
        scheduled: bool = True,
    ) -> None:
        """Declare a way to train: the named parameters of a module (or of several models, by name).

        Where gradients are clipped, each of several models is clipped by its own norm.
        """
        named = list(modules.items()) if isinstance(modules, Mapping) else [("", modules)]
        wanted = None if entries is None else set(entries)
        chosen = [
            (prefix, key, parameter)
            for prefix, module in named
            for key, parameter in module.named_parameters()
            if wanted is None or key in wanted
        ]
        parameters = [(f"{prefix}.{key}" if prefix else key, parameter) for prefix, key, parameter in chosen]
        models = [prefix for prefix, _, _ in chosen]
        per_class = {(p, key) for p, module in named for key in self.class_rows(module)}
        rows = [place for place, (prefix, key, _) in enumerate(chosen) if (prefix, key) in per_class]
        made = Optimiser(parameters, optimiser or self.config.train.optimiser, models, rows, self.class_counts)
        self.workplace.add_phase(name, Phase(made, norm, scheduled))

    def class_rows(self, module: nn.Module) -> tuple[str, ...]:
        """The parameters of a module that have a row for each class."""
        return class_rows(module, self.num_classes)

    def holders(self) -> list[Any]:
        """The objects whose attributes are this client's tensors and modules."""
        return [self]

    # ---- what actions and hooks use ------------------------------------------------------------

    def entries(self, module: nn.Module, *names: str) -> tuple[str, ...]:
        """State-dict names of the groups "body", "head", "norm" and "statistics" of a module."""
        return tuple(entry for name in names for entry in groups(module)[name])

    @staticmethod
    def share(module: nn.Module, entries: Iterable[str] | None = None) -> Tensors:
        """Entries of a module's state, for a reply."""
        state = module.state_dict()
        return dict(state) if entries is None else {entry: state[entry] for entry in entries}

    @staticmethod
    @torch.no_grad()
    def copy(source: nn.Module, target: nn.Module, entries: Iterable[str] | None = None) -> None:
        """Copy a module's state into another of the same shape, in place."""
        from_state, to_state = source.state_dict(), target.state_dict()
        names = list(to_state) if entries is None else list(entries)
        copy_all([to_state[n] for n in names], [from_state[n] for n in names])

    def random(self, purpose: str, *more: str | int) -> torch.Generator:
        """A generator of this site's own for this purpose and round."""
        return torch.Generator(device=self.setting.device).manual_seed(self.workplace.stream(purpose, *more))

    def precision(self) -> torch.autocast:
        """The context in which nets run: the setting's, except within `full_precision`."""
        return self.setting.precision(full=self._full_precision)

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Nets run in float32 within, whatever the config asks for."""
        outside, self._full_precision = self._full_precision, True
        try:
            yield
        finally:
            self._full_precision = outside

    def logits(self, net: nn.Module, batch: Batch) -> Tensor:
        """Logits (B, C) of one net alone, in the configured precision."""
        with self.precision():
            return net(batch.image).float()

    def outputs(self, batch: Batch) -> Any:
        """`forward` in the configured precision, with float32 outputs."""
        if self._full_precision or not self.setting.autocasts:
            return self.forward(batch)
        with self.precision():
            out = self.forward(batch)
        return SimpleNamespace(
            **{key: value.float() if isinstance(value, Tensor) else value for key, value in vars(out).items()}
        )

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The supervised loss: cross entropy, unless a component or the method brings another."""
        return cross_entropy(logits, labels)

    # ---- hooks of the step: tensors in, tensors out, no host sync ---------------------------------

    def forward(self, batch: Batch) -> Any:
        """Outputs of the model(s) for a batch."""
        raise NotImplementedError

    def loss(self, batch: Batch, out: Any) -> Tensor:
        """The scalar that training minimises."""
        raise NotImplementedError

    def adjust(self, gradients: Gradients) -> Gradients:
        """Change the gradients before the optimiser sees them (control variates, proximal terms)."""
        return gradients

    def descend(self, phase: Phase, gradients: Sequence[Tensor | None]) -> None:
        """Let the optimiser move its parameters by these gradients, which `adjust` sees first."""
        parameters = phase.optimiser.parameters
        found = {parameter: g for parameter, g in zip(parameters, gradients, strict=True) if g is not None}
        adjusted = self.adjust(found)
        phase.optimiser.update([adjusted.get(parameter) for parameter in parameters])

    def after_step(self) -> None:
        """Act after the parameters moved (projections, clipping of a mixture)."""

    def step(self, batches: list[Batch], phase: Phase) -> Tensor:
        """One optimiser step; gives the loss. Replaced by the few methods that need several batches a step."""
        (batch,) = batches
        loss = self.loss(batch, self.outputs(batch))
        gradients = torch.autograd.grad(loss, phase.optimiser.parameters, allow_unused=True)
        self.descend(phase, gradients)
        self.after_step()
        return loss.detach()

    # ---- hooks outside the step ------------------------------------------------------------------

    def order(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """The samples of one epoch, in order: all of them, shuffled. Labels (n,) and generator are the host's."""
        return torch.randperm(len(labels), generator=generator)

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """Fields to add to a large chunk of batches (frozen outputs, synthetic images)."""
        return {}

    def predict(self, view: str, batch: Batch) -> Tensor:
        """Logits of the global or the personal model."""
        raise NotImplementedError

    def adapt(self) -> Generator[Work, Any, None]:
        """Change the personal model before it is evaluated; rolled back afterwards."""
        yield from ()

    def ready(self) -> Generator[Work, Any, None]:
        """Renew what the model just trained needs to predict, before it is measured; rolled back afterwards."""
        yield from ()

    def train(self, message: Payload) -> Action:
        """The action that every method has: train locally and reply."""
        yield Train()
        return {}
