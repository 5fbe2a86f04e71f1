"""The engine's side of a client: which tensors it declared, how it can train, and which ask it serves.

A method's author needs none of this. A client is a workplace that serves one site after another: before each ask the
engine fills every declared tensor in place, and afterwards it drops whatever was not declared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from equipoise.contract.declared import DeclaredTensors, Role
from equipoise.contract.optimiser import Optimiser
from equipoise.contract.protocol import Tensors, Value
from equipoise.core.streams import stream

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


class Workplace:
    """What the engine calls on a client between asks."""

    def __init__(self, client: Client):
        self.client = client
        self.phases: dict[str, Phase] = {}
        self.references: list[nn.Module] = []
        self.norm_mode = "train"
        self.site, self.round = "", 0
        self.occasion: tuple[str, ...] = ()
        self._declared = DeclaredTensors(type(client).__name__)
        self._fixed: list[dict[str, Any]] = []

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

    def settle(self) -> None:
        """Refuse tensors that nobody declared, and note first values."""
        for holder in self.client.holders():
            self._declared.check(vars(holder))
        self._declared.remember()
        self._fixed = [dict(vars(holder)) for holder in self.client.holders()]

    # ---- between asks -----------------------------------------------------------------------------

    def begin(self, message: Mapping[str, Value], kept: Mapping[str, Tensor] | None) -> None:
        """Fill every declared tensor for one ask at one site."""
        self._declared.fill(message, kept)

    def end(self) -> None:
        """Forget whatever was not declared, as a site in another process would."""
        for holder, attributes in zip(self.client.holders(), self._fixed, strict=True):
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
        for holder in self.client.holders():
            yield from (value for value in vars(holder).values() if isinstance(value, nn.Module))

    def set_mode(self, training: bool, norm: str = "train") -> None:
        """Training or eval mode; norm layers keep to eval when the phase says so, references always."""
        self.norm_mode = norm
        for module in self.modules():
            module.train(training and module not in self.references)
            if training and norm == "eval":
                for part in module.modules():
                    if isinstance(part, nn.modules.batchnorm._BatchNorm):
                        part.eval()

    def stream(self, purpose: str, *more: str | int) -> int:
        """The seed of a random stream of this site, round and occasion (training, or a fine-tuning to evaluate)."""
        return stream(self.client.config.seed, purpose, self.round, self.site, *self.occasion, *more)
