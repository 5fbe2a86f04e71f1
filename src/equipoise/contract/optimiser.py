"""SGD, Adam and AdamW, whose state is tensors allocated once, so that a captured step can be replayed at any site."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from equipoise.contract.tables import OptimiserConfig

#: AdamW's weight decay is no part of the gradient, which Adam would make as long as any other
ADAMS = {"adam": torch._fused_adam_, "adamw": torch._fused_adamw_}


class Optimiser:
    """Updates `parameters` in place by torch's fused kernels; the learning rate is a tensor on their device.

    `models` names the model that each parameter belongs to, where they belong to several: clipping couples none.
    `rows` are the positions of parameters with a row for each class, and `class_counts` (C,) the site's images of each:
    if the config asks for it, weight decay spares the rows of classes without images.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimiserConfig,
        models: Sequence[str] | None = None,
        rows: Collection[int] = (),
        class_counts: Tensor | None = None,
    ):
        self.config = config
        named = list(parameters)
        self.names = [name for name, _ in named]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self.models = list(models) if models is not None else [""] * len(named)
        self.rows, self.class_counts = frozenset(rows), class_counts
        device = self.parameters[0].device
        self.lr = torch.zeros((), device=device)
        kinds = ("mean", "square") if config.name in ADAMS else ("momentum",) if config.momentum else ()
        self.moments = {kind: [torch.zeros_like(p, requires_grad=False) for p in self.parameters] for kind in kinds}
        # Adam's bias correction counts steps per tensor: a parameter without gradient stands still.
        self.counts = [torch.zeros((), device=device) for _ in self.parameters] if config.name in ADAMS else []

    def state(self) -> dict[str, Tensor]:
        """Every tensor that must outlive a round when the optimiser is kept."""
        named = {f"{kind}/{n}": t for kind, ts in self.moments.items() for n, t in zip(self.names, ts)}
        return named | {f"count/{n}": t for n, t in zip(self.names, self.counts)}

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """One step; a parameter whose gradient is None is left alone, moments included."""
        found = [(i, gradient) for i, gradient in enumerate(gradients) if gradient is not None]
        if not found:
            return
        used = [i for i, _ in found]
        grads = [_laid_out_like(gradient, self.parameters[i]) for i, gradient in found]
        if self.config.clip is not None:
            grads = clip_each(grads, [self.models[i] for i in used], self.config.clip)
        if not (self.rows and self.config.weight_decay and not self.config.decay_absent):
            self._move(used, grads, self.config.weight_decay)
            return
        classes = [place for place, i in enumerate(used) if i in self.rows]
        others = [place for place, i in enumerate(used) if i not in self.rows]
        self._move([used[p] for p in others], [grads[p] for p in others], self.config.weight_decay)
        # The rows' decay is no part of the kernel's: a row without any stays where it is to the last bit.
        decayed = [self._decayed(self.parameters[used[p]], grads[p]) for p in classes]
        self._move([used[p] for p in classes], decayed, 0.0)

    def _decayed(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient with the decay of the classes that the site has; AdamW's moves the parameter itself."""
        assert self.class_counts is not None
        present = (self.class_counts > 0).to(parameter.dtype).reshape(-1, *[1] * (parameter.dim() - 1))
        decay = self.config.weight_decay * present
        if self.config.name == "adamw":
            parameter.mul_(1 - self.lr * decay)
            return gradient
        return gradient + decay * parameter

    def _move(self, used: Sequence[int], grads: Sequence[Tensor], weight_decay: float) -> None:
        """Let torch's kernel move some parameters, by position."""
        if not used:
            return
        parameters = [self.parameters[i] for i in used]
        moments = [[self.moments[kind][i] for i in used] for kind in self.moments]
        if self.config.name == "sgd":
            torch._fused_sgd_(
                parameters,
                list(grads),
                moments[0] if moments else [],
                weight_decay=weight_decay,
                momentum=self.config.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
        else:
            counts = [self.counts[i] for i in used]
            torch._foreach_add_(counts, 1)
            ADAMS[self.config.name](
                parameters,
                list(grads),
                moments[0],
                moments[1],
                [],
                counts,
                lr=self.lr,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                weight_decay=weight_decay,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


def clip_each(gradients: list[Tensor], models: Sequence[str], largest: float) -> list[Tensor]:
    """`clip_by_norm` of each model's gradients: how far one model moves says nothing of another."""
    clipped = list(gradients)
    for model in dict.fromkeys(models):
        own = [place for place, name in enumerate(models) if name == model]
        for place, gradient in zip(own, clip_by_norm([gradients[place] for place in own], largest)):
            clipped[place] = gradient
    return clipped


def clip_by_norm(gradients: list[Tensor], largest: float) -> list[Tensor]:
    """Scale all gradients together so that their joint norm is at most `largest`; no host sync."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    factor: Tensor = (largest / (norm + 1e-6)).clamp(max=1.0)
    return list(torch._foreach_mul(gradients, factor))


def _laid_out_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the parameter's strides, which the fused kernels take for granted."""
    if gradient.stride() == parameter.stride():
        return gradient
    layouts = zip(parameter.shape, gradient.stride(), parameter.stride())
    if all(own == wanted for size, own, wanted in layouts if size > 1):  # how a single entry is laid out means nothing
        return gradient.as_strided(parameter.shape, parameter.stride())
    return torch.empty_like(parameter).copy_(gradient)
