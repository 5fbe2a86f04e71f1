"""Mutual learning between two models that see the same batch (PRR-Imbalance's deputies, FML)."""

import torch.nn.functional as F
from torch import Tensor

from equipoise.losses._shapes import rows, widened


def mutual_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher || student) of logits (B, C) or (B, C, ...), mean over samples; no gradient to the teacher.

    Equal logits give 0.
    """
    student = rows(widened(student_logits)).log_softmax(1)
    teacher = rows(widened(teacher_logits.detach())).log_softmax(1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)
