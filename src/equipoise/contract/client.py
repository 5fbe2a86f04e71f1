"""The site side of a method: a workplace that serves one site after another.

Every tensor that its hooks read is declared. It is allocated once in `build` and filled in place before each ask. So
the same code runs eagerly and inside a captured graph.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from equipoise.contract.optimiser import Optimiser
from equipoise.contract.protocol import Action, Payload, Train, Work
from equipoise.contract.setting import Setting
from equipoise.contract.tables import OptimiserConfig
from equipoise.contract.workplace import Phase, Workplace
from equipoise.losses import cross_entropy

#: gradients by parameter; a parameter without one is not among them
Gradients = dict[Tensor, Tensor]


@dataclass(frozen=True)
class PerBatch:
    """A field that `prepare` adds with one row per batch instead of one per sample."""

    rows: Tensor


class Batch(SimpleNamespace):
    """The fields of one batch: `image` (B, C, H, W), `label` (B,), and what `prepare` adds.

    >>> Batch(image=torch.zeros(2, 3, 8, 8), label=torch.tensor([0, 1])).label.shape
    torch.Size([2])
    """

    image: Tensor
    label: Tensor


class Client:
    """The site side of a method. Subclasses declare state in `build` and supply actions and hooks.

    >>> import equipoise as eq
    >>> class Sharp(eq.FedAvgClient):
    ...     def loss(self, batch, out):
    ...         return super().loss(batch, out).square()
    >>> fed = eq.load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> method = eq.Method(eq.FedAvgServer, Sharp, "none", 2026, "loss")
    >>> eq.train(fed, method, rounds=1, epochs=1, out="runs/sharp").finished
    True
    """

    #: {action: {reply entry: its meaning}}: everything that leaves a site. Other entries are refused.
    discloses: ClassVar[dict[str, dict[str, str]]] = {}
    #: which models can be evaluated: "global" (the same everywhere) and "personal"
    views: ClassVar[tuple[str, ...]] = ("global",)
    #: whether this class itself (no subclass) trains once a round by a mean loss over images, and nothing but gradients
    #: and `class_counts` reaches what it keeps or sends: so `privacy.epsilon` can hold
    image_by_image: ClassVar[bool] = False

    def __init__(self, setting: Setting):
        self.setting = setting
        self.options = setting.options
        self.num_classes = setting.num_classes
        self.workplace = Workplace(self)
        self.class_counts = self.scratch("class_counts", torch.zeros(self.num_classes))
        self.build()
        self.workplace.settle()

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
        per_class = {(p, key) for p, module in named for key in self.workplace.class_rows(module)}
        rows = [place for place, (prefix, key, _) in enumerate(chosen) if (prefix, key) in per_class]
        made = Optimiser(parameters, optimiser or self.setting.config.train.optimiser, models, rows, self.class_counts)
        self.workplace.add_phase(name, Phase(made, norm, scheduled))

    # ---- what actions and hooks use ------------------------------------------------------------

    def random(self, purpose: str, *more: str | int) -> torch.Generator:
        """A generator of this site's own for this purpose and round."""
        return torch.Generator(device=self.setting.device).manual_seed(self.workplace.stream(purpose, *more))

    def outputs(self, batch: Batch) -> Any:
        """`forward` in the configured precision, with float32 outputs."""
        if not self.workplace.autocasts:
            return self.forward(batch)
        with self.workplace.precision():
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

    def step(self, batches: list[Batch], phase: Phase) -> Tensor:
        """One optimiser step; gives the loss. Replaced by the few methods that need several batches a step."""
        (batch,) = batches
        parameters, private = phase.optimiser.parameters, self.workplace.private
        if private is not None and not len(batch.label):
            self.workplace.descend(phase, private.of_no_image(parameters))
            return batch.image.new_zeros(())
        loss = self.loss(batch, self.outputs(batch))
        if private is None:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            self.workplace.descend(phase, gradients)
        else:
            self.workplace.descend(phase, private.gradients(loss, parameters))
        return loss.detach()

    # ---- hooks outside the step ------------------------------------------------------------------

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """Fields to add to a large chunk of batches (frozen outputs, synthetic images)."""
        return {}

    def predict(self, view: str, batch: Batch) -> Tensor:
        """Logits of the global or the personal model."""
        raise NotImplementedError

    def adapt(self) -> Generator[Work, Any, None]:
        """Change the personal model before it is evaluated; rolled back afterwards."""
        yield from ()

    def train(self, message: Payload) -> Action:
        """The action that every method has: train locally and reply."""
        yield Train()
        return {}
