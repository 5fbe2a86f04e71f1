"""The engine's side of a client: which tensors it declared, how it can train, and which ask it serves.

A client is a workplace that serves one site after another. Before each ask the engine fills every declared tensor in
place; afterwards it drops all other tensors. Few methods need this module. It holds the current round and site,
precision, `descend` for a custom step, and how many batches and views of an image a step takes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.contract.declared import DeclaredTensors, Role
from equipoise.contract.notes import Notes
from equipoise.contract.optimiser import Optimiser
from equipoise.contract.private_steps import PrivateSteps
from equipoise.contract.protocol import Tensors, Value, Work
from equipoise.core.streams import stream
from equipoise.nets import class_rows

if TYPE_CHECKING:
    from equipoise.contract.client import Client


@dataclass
class Phase:
    """Which parameters train, by which optimiser, and whether norm layers use batch statistics.

    `scheduled`: whether its learning rate follows train.schedule; a step size that is a method's own does not.
    """

    optimiser: Optimiser
    norm: str = "train"
    scheduled: bool = True


def shuffled(labels: Tensor, generator: torch.Generator) -> Tensor:
    """All samples of one epoch, in random order. Labels (n,) and generator are the host's."""
    return torch.randperm(len(labels), generator=generator)


def nothing() -> Generator[Work, Any, None]:
    """No work."""
    yield from ()


class Workplace:
    """What the engine calls on a client, and what components change of it.

    Attributes:
        holders: the objects whose attributes are the client's tensors and modules
        image_views: how many augmented views of an image a batch holds (`image`, `second`)
        batches_per_step: batches that one call of the client's `step` takes
        order: gives the samples of one epoch, in order
        after_step: what components do after the parameters moved
        ready: renews what the model just trained needs to predict, before it is measured; rolled back afterwards
        head_gives_logits: whether the net's last layer has a row for each class
        private: makes the gradients of steps differentially private; None: ordinary gradients
    """

    def __init__(self, client: Client):
        self.client = client
        self.config = client.setting.config
        self.holders: list[Any] = [client]
        self.image_views = self.batches_per_step = 1
        self.order: Callable[[Tensor, torch.Generator], Tensor] = shuffled
        self.ready: Callable[[], Generator[Work, Any, None]] = nothing
        self.after_step: Callable[[], None] = lambda: None
        self.head_gives_logits = True
        self.private: PrivateSteps | None = None
        self.phases: dict[str, Phase] = {}
        self.references: list[nn.Module] = []
        self.norm_mode = "train"
        self.site, self.round = "", 0
        self.notes = Notes()
        self.occasion: tuple[str, ...] = ()
        self._declared = DeclaredTensors(type(client).__name__)
        self._fixed: list[dict[str, Any]] = []
        self._full_precision = False

    # ---- while the client is built --------------------------------------------------------------

    def declare(self, role: Role, name: str, target: Any, entries: Iterable[str] | None) -> Any:
        """A tensor or a module that hooks read."""
        target = target if isinstance(target, nn.Module) else target.to(self.client.setting.device)
        self._declared.add(role, name, target, entries)
        return target

    def add_phase(self, name: str, phase: Phase) -> None:
        """A way to train; its optimiser's state is declared, too."""
        self.phases[name] = phase
        if state := phase.optimiser.state():
            self._declared.add_optimiser("kept" if phase.optimiser.config.keep else "scratch", name, state)

    def class_rows(self, module: nn.Module) -> tuple[str, ...]:
        """The parameters of a module that have a row for each class."""
        return class_rows(module, self.client.num_classes) if self.head_gives_logits else ()

    def settle(self) -> None:
        """Refuse tensors without a declaration, and note first values."""
        for holder in self.holders:
            self._declared.check(vars(holder))
        self._declared.remember()
        if self.config.privacy.epsilon is not None:
            self.private = PrivateSteps(self._trained_modules(), self.config.privacy.clip)
        self._fixed = [dict(vars(holder)) for holder in self.holders]

    def _trained_modules(self) -> list[nn.Module]:
        """The modules with parameters that train, none of which lies in another."""
        trained = {id(parameter) for phase in self.phases.values() for parameter in phase.optimiser.parameters}
        found = [m for m in dict.fromkeys(self.modules()) if any(id(p) in trained for p in m.parameters())]
        inner = {layer for module in found for layer in module.modules() if layer is not module}
        return [module for module in found if module not in inner]

    # ---- between asks -----------------------------------------------------------------------------

    def begin(self, message: Mapping[str, Value], kept: Mapping[str, Tensor] | None) -> None:
        """Fill every declared tensor for one ask at one site."""
        self._declared.fill(message, kept)

    def end(self) -> None:
        """Forget all undeclared attributes, as a site in another process would."""
        for holder, attributes in zip(self.holders, self._fixed, strict=True):
            vars(holder).clear()
            vars(holder).update(attributes)

    def kept(self) -> Tensors:
        """The tensors that outlive the ask, by flat name; references, not copies."""
        return self._declared.kept()

    def tensors(self) -> list[Tensor]:
        """Every tensor that a step may read or change."""
        return self._declared.tensors()

    def modules(self) -> Iterator[nn.Module]:
        """The modules of the client and of its components."""
        for holder in self.holders:
            yield from (value for value in vars(holder).values() if isinstance(value, nn.Module))

    def set_mode(self, training: bool, norm: str = "train") -> None:
        """Training or eval mode; norm layers stay in eval mode if the phase asks for it, references always."""
        self.norm_mode = norm
        for module in self.modules():
            module.train(training and module not in self.references)
            if training and norm == "eval":
                for layer in module.modules():
                    if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                        layer.eval()

    @property
    def examples(self) -> int:
        """Number of local training images."""
        setting = self.client.setting
        return setting.task.images(self.client.class_counts, setting.image_size**2)

    # ---- what a step needs ------------------------------------------------------------------------

    @property
    def autocasts(self) -> bool:
        """Whether nets run in bfloat16 now."""
        return self.client.setting.autocasts and not self._full_precision

    def precision(self) -> torch.autocast:
        """The context in which nets run: the setting's, except within `full_precision`."""
        return self.client.setting.precision(full=self._full_precision)

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Nets run in float32 within, under any config."""
        outside, self._full_precision = self._full_precision, True
        try:
            yield
        finally:
            self._full_precision = outside

    def logits(self, net: nn.Module, image: Tensor) -> Tensor:
        """Logits (B, C) of one net alone, in the configured precision."""
        with self.precision():
            logits: Tensor = net(image)
        return logits.float()

    def descend(self, phase: Phase, gradients: Sequence[Tensor | None]) -> None:
        """Let the optimiser move its parameters by these gradients, after the client's `adjust`."""
        parameters = phase.optimiser.parameters
        found = {parameter: g for parameter, g in zip(parameters, gradients, strict=True) if g is not None}
        adjusted = self.client.adjust(found)
        phase.optimiser.update([adjusted.get(parameter) for parameter in parameters])
        self.after_step()

    def stream(self, purpose: str, *more: str | int) -> int:
        """The seed of a random stream of this site, round and occasion (training, or a fine-tuning to evaluate)."""
        return stream(self.config.seed, purpose, self.round, self.site, *self.occasion, *more)
