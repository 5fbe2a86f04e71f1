"""What one model learns from another that sees the same batch.

All predictions count (PRR-Imbalance's deputies, FML), or those of wrong classes (FedNTD), or those of classes without
local images (FedVLS).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.losses._shapes import membership, per_class, rows, widened


def mutual_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher || student) of logits (B, C) or (B, C, ...), mean over samples; no gradient to the teacher.

    Equal logits give 0.
    """
    student = rows(widened(student_logits)).log_softmax(1)
    teacher = rows(widened(teacher_logits.detach())).log_softmax(1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


def not_true_kl(student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """tau^2 KL(teacher || student) over the classes that are not the label (Lee et al., 2022), mean over samples.

    Logits (B, C) or (B, C, ...), labels (B, ...). What the student says of the label itself plays
    no part. Equal logits give 0.
    """
    others = membership(labels.flatten(), student_logits.shape[1], torch.bool).logical_not()
    student, teacher = (rows(widened(logits)) / temperature for logits in (student_logits, teacher_logits))
    return temperature**2 * _kl_among(student, teacher, others)


def vacant_kl(student_logits: Tensor, teacher_logits: Tensor, class_counts: Tensor) -> Tensor:
    """KL(teacher || student) over the classes without local images (Guo et al., 2025), mean over samples.

    Logits (B, C), `class_counts` (C,). Fewer than two such classes give 0.
    """
    vacant = per_class("class_counts", class_counts, student_logits) == 0
    return _kl_among(student_logits, teacher_logits, vacant.expand_as(student_logits))


def _kl_among(student_logits: Tensor, teacher_logits: Tensor, among: Tensor) -> Tensor:
    """KL(teacher || student) of softmaxes over the classes that `among` (B, C) marks, mean over samples."""
    student, teacher = (_log_shares(logits, among) for logits in (student_logits, teacher_logits.detach()))
    return (among * teacher.exp() * (teacher - student)).sum(1).mean()


def _log_shares(logits: Tensor, among: Tensor) -> Tensor:
    """Log-softmax over the marked classes; 0 at the others, and finite where none is marked."""
    wide = widened(logits)
    return wide.masked_fill(~among, torch.finfo(wide.dtype).min / 2).log_softmax(1).masked_fill(~among, 0.0)
