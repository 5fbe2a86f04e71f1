"""How losses line up class axes, data types and class counts, so that each formula stays on one line."""

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core.arguments import check_shape


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The type a loss is computed in: float32 at least, for half precision is too coarse."""
    return torch.promote_types(tensor.dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """A tensor in the type that losses are computed in; the very same one unless it is of half precision."""
    return tensor.to(working_dtype(tensor))


def cross_entropy_of(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of logits (B, C) or (B, C, ...) of any floating type, labels of any integer type."""
    return F.cross_entropy(widened(logits), labels.long(), reduction=reduction)


def per_class(argument: str, values: Tensor, logits: Tensor) -> Tensor:
    """Values (C,) shaped to broadcast over logits (B, C, ...)."""
    check_shape(argument, values.shape, logits.shape[1:2])
    return values.reshape(-1, *[1] * (logits.dim() - 2))


def rows(logits: Tensor) -> Tensor:
    """Logits (B, C, ...) as one row of C per sample, or per pixel."""
    return logits.movedim(1, -1).flatten(0, -2)


def frequencies(class_counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Class counts (C,) as shares of their sum; all zero where there is no sample at all."""
    counts = class_counts.to(dtype)
    return counts / counts.sum().clamp(min=torch.finfo(dtype).tiny)


def membership(labels: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """One-hot labels (B, ...) -> (B, C, ...), by comparison: `one_hot` would look at the values on the host."""
    classes = torch.arange(num_classes, device=labels.device).reshape(-1, *[1] * (labels.dim() - 1))
    return (labels[:, None] == classes).to(dtype)


def by_place(features: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Features as rows (n, D), and how many samples of each class have these features (n, C).

    Of features (B, D) and labels (B,) a row is an image. Of maps (B, D, h, w) and masks (B, H, W) it is a place of the
    maps, whose features are those of all pixels there.
    """
    members = membership(labels, num_classes, features.dtype)
    if features.dim() == 2:
        return features, members
    side = labels.shape[-1] // features.shape[-1]
    return rows(features), rows(F.avg_pool2d(members, side) * side**2)


def cross_entropy_over(scores: Tensor, labels: Tensor, present: Tensor | None) -> Tensor:
    """Mean cross entropy of scores (B, C) over the classes of the mask `present` (C,); None is all of them.

    A sample whose own class is left out contributes 0.
    """
    if present is None:
        return cross_entropy_of(scores, labels)
    # The lowest finite number, not -inf: a site with no class present must not meet inf - inf.
    visible = scores.masked_fill(~present, torch.finfo(scores.dtype).min)
    losses = cross_entropy_of(visible, labels, reduction="none")
    return losses.masked_fill(~present[labels.long()], 0.0).mean()
