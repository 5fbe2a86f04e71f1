"""Supervised losses for imbalanced classes, of logits (B, C) or (B, C, ...), labels and class counts (C,)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from equipoise.core.arguments import check_shape
from equipoise.losses._shapes import cross_entropy_of, frequencies, membership, per_class, rows, widened, working_dtype


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[label]."""
    return cross_entropy_of(logits, labels)


def logit_adjusted(logits: Tensor, labels: Tensor, margins: Tensor) -> Tensor:
    """Cross entropy of logits + margins (C,) (Menon et al., 2021); equal margins change nothing.

    A margin of -inf takes its class out of the softmax.
    """
    return cross_entropy_of(logits + per_class("margins", margins.to(working_dtype(logits)), logits), labels)


def balanced_softmax(logits: Tensor, labels: Tensor, class_counts: Tensor, gamma: float = 1.0) -> Tensor:
    """Cross entropy of logits + gamma log(p + 1e-9), p the class frequencies (Ren et al., 2020).

    With equal counts, or gamma 0, it is plain cross entropy.
    """
    return logit_adjusted(logits, labels, gamma * (frequencies(class_counts, working_dtype(logits)) + 1e-9).log())


def difficulty_margins(class_counts: Tensor, class_losses: Tensor, exponent: float = 0.25) -> Tensor:
    """FedIIC's margins (C,), log(p / (l^exponent + 1e-5)), to be added to logits (Wu et al., 2023, Eq. 6).

    `class_counts` are the site's own, `class_losses` (C,) the federation's mean loss per class. A class
    that is absent at the site gets -inf; equal counts and losses give equal margins, which change nothing.
    """
    check_shape("class_losses", class_losses.shape, class_counts.shape)
    losses = widened(class_losses)
    margins = (frequencies(class_counts, losses.dtype) / (losses.pow(exponent) + 1e-5)).log()
    return margins.masked_fill(class_counts == 0, -torch.inf)  # also where a loss of no sample is not a number


def class_loss_sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What a site tells of its classes' difficulty: summed cross entropy and number of samples, (C,) each."""
    losses = cross_entropy_of(logits, labels, reduction="none").flatten()
    members = membership(labels.flatten(), logits.shape[1], losses.dtype)
    return losses @ members, members.sum(0)


def focal(logits: Tensor, labels: Tensor, gamma: float = 2.0, alpha: Tensor | None = None) -> Tensor:
    """Mean of alpha_y (1 - p_y)^gamma * cross entropy (Lin et al., 2017); gamma 0 is cross entropy.

    `alpha` (C,) weighs the classes; None weighs them all by 1.
    """
    losses = cross_entropy_of(logits, labels, reduction="none")
    # Never quite 0: there a power below 1 is infinitely steep, and a sample that is surely right would give nan.
    chances_missed = (-torch.expm1(-losses)).clamp(min=torch.finfo(losses.dtype).tiny)
    losses = chances_missed.pow(gamma) * losses
    return (losses if alpha is None else alpha.to(losses.dtype)[labels.long()] * losses).mean()


def class_balanced(logits: Tensor, labels: Tensor, class_counts: Tensor, power: float = 1.0) -> Tensor:
    """FedeAMC: cross entropy, a sample weighed by N / (P n_y) for P classes present (Wang et al., 2021).

    With a power below 1, in proportion to n_y^-power. The weights average 1 over the site's data, so learning rates
    keep their meaning; equal counts, or power 0, give plain cross entropy.
    """
    counts = class_counts.to(working_dtype(logits))
    present = counts > 0
    powers = counts.pow(power)
    parts = (counts / powers).masked_fill(~present, 0.0)
    weights = (counts.sum() / (parts.sum() * powers)).masked_fill(~present, 0.0)
    return (weights[labels.long()] * cross_entropy_of(logits, labels, reduction="none")).mean()


def restricted_logits(logits: Tensor, present: Tensor, alpha: float = 0.5) -> Tensor:
    """Logits, those of locally missing classes scaled by alpha; `present` (C,) marks the classes the site has."""
    return torch.where(per_class("present", present.bool(), logits), logits, alpha * logits)


def graded_factors(class_counts: Tensor, alpha: float = 0.5) -> Tensor:
    """The factors (C,) of FedRS's released code, alpha + (1 - alpha) n_c / n_max: a missing class has alpha."""
    counts = widened(class_counts)
    return alpha + (1 - alpha) * counts / counts.max().clamp(min=1)


def restricted_softmax(logits: Tensor, labels: Tensor, present: Tensor, alpha: float = 0.5) -> Tensor:
    """Cross entropy with the logits of locally missing classes scaled by alpha (FedRS, Li & Zhan, 2021).

    `present` (C,) marks the classes the site has; alpha 1 is cross entropy, alpha 0 gives the others a logit
    of 0.
    """
    return cross_entropy_of(restricted_logits(logits, present, alpha), labels)


def calibrated_margins(class_counts: Tensor, tau: float = 1.0) -> Tensor:
    """FedLC's margins (C,), -tau n_c^(-1/4), to be added to logits; -inf for absent classes."""
    counts = widened(class_counts)
    return (-tau * counts.pow(-0.25)).masked_fill(counts == 0, -torch.inf)


def fedlc(logits: Tensor, labels: Tensor, class_counts: Tensor, tau: float = 1.0) -> Tensor:
    """Cross entropy of logits - tau n_c^(-1/4), absent classes left out (FedLC, Zhang et al., 2022).

    With equal counts, or tau 0, it is cross entropy over the classes present.
    """
    return logit_adjusted(logits, labels, calibrated_margins(class_counts.to(working_dtype(logits)), tau))


def logit_suppression(logits: Tensor, labels: Tensor, class_counts: Tensor) -> Tensor:
    """FedVLS's pull on logits of classes that an image is not of (Guo et al., 2025).

    The sum over classes of p_c log mean exp(z_c - log p_c - log C). The mean is over the images of the batch; an image
    of class c itself counts with an exponent of 0, as released. Logits (B, C); p are the site's class frequencies, so
    absent classes weigh nothing.
    """
    wide = rows(widened(logits))
    share = frequencies(class_counts, wide.dtype)
    spread = wide - (share + 1e-9).log() - math.log(logits.shape[1])
    spread = spread * (1 - membership(labels.flatten(), logits.shape[1], wide.dtype))
    return (share * (spread.logsumexp(0) - math.log(max(len(wide), 1)))).sum()


def rebalanced_binary(logits: Tensor, labels: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Binary cross entropy of each class against all others, summed over classes, mean over samples.

    Logits (B, C). Images of class c weigh `positive` (C,) for it, all others `negative` (C,); ones change nothing.
    """
    wide = widened(logits)
    own = membership(labels, logits.shape[1], wide.dtype)
    losses = own * positive * F.softplus(-wide) + (1 - own) * negative * F.softplus(wide)
    return losses.sum(1).mean()


def soft_dice(logits: Tensor, masks: Tensor, smooth: float = 1.0) -> Tensor:
    """1 - the mean Dice of the structures over all pixels of a batch, of chances in place of predictions.

    Logits (B, C, H, W), masks (B, H, W); class 0 is the background and does not count. `smooth` pixels are added to
    both sides of each ratio, so that a structure that is neither there nor predicted costs nothing. Sure and right
    logits give 0.
    """
    chances = rows(widened(logits).softmax(1))
    truth = membership(masks.flatten(), logits.shape[1], chances.dtype)
    both, sizes = (chances * truth).sum(0), chances.sum(0) + truth.sum(0)
    return 1 - ((2 * both + smooth) / (sizes + smooth))[1:].mean()
