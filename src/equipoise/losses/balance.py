"""BalanceFL's two terms besides the supervised loss (Shuai et al., 2022): distillation on classes that a site lacks,
and the entropy of its predictions."""

import torch
from torch import Tensor

from equipoise.losses._shapes import widened


def inherited_knowledge(logits: Tensor, teacher_logits: Tensor, missing: Tensor, temperature: float = 2.0) -> Tensor:
    """Cross entropy from the teacher to the model among the classes of the mask `missing` (C,), mean over samples.

    Logits (B, C) both; softmax over the missing classes alone, at a temperature, without gradient to the teacher. With
    fewer than two missing classes there is nothing to tell apart: 0.
    """
    teacher = _log_softmax_over(teacher_logits.detach() / temperature, missing).exp()
    student = _log_softmax_over(logits / temperature, missing)
    return -(teacher * student).masked_fill(~missing, 0.0).sum(1).mean()


def prediction_entropy(logits: Tensor, present: Tensor) -> Tensor:
    """Entropy (B,) of the softmax of logits (B, C) over the classes of the mask `present` (C,); of one class: 0."""
    chances = _log_softmax_over(logits, present)
    return -(chances.exp() * chances).masked_fill(~present, 0.0).sum(1)


def _log_softmax_over(logits: Tensor, mask: Tensor) -> Tensor:
    """Log softmax (B, C) over the classes of a mask (C,); outside the mask it means nothing."""
    # The lowest finite number, not -inf: where the mask is empty, inf - inf must not arise.
    wide = widened(logits)
    return wide.masked_fill(~mask, torch.finfo(wide.dtype).min).log_softmax(1)
