"""What FedBM (Zhu et al., 2025) makes of a concept bank: a frozen classifier, and codes to make images from."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equipoise.losses import concept_alignment, concept_logits
from equipoise.prototypes import concept_statistics

CODE_NOISE = 1e-2  # its square is added to the covariance of the texts, which alone is singular


class ConceptClassifier(nn.Module):
    """A classifier that does not learn (Eq. 5): a Gaussian per class, mean and variance (C, D). Without variance it
    is a cosine classifier."""

    mean: Tensor
    variance: Tensor

    def __init__(self, mean: Tensor, variance: Tensor, temperature: float):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("variance", variance)
        self.temperature = temperature

    def forward(self, embeddings: Tensor) -> Tensor:
        """Logits (B, C) of image embeddings (B, D)."""
        return concept_logits(embeddings, self.mean, self.variance, self.temperature)

    def loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The surrogate loss (Eq. 4) of image embeddings (B, D) with labels (B,)."""
        return concept_alignment(embeddings, labels, self.mean, self.variance, self.temperature)


class ConditionCodes(nn.Module):
    """A Gaussian per class that codes are drawn from (Eq. 9): mean (C, D), covariance spread' spread + noise^2 I.

    The spread (C, M, D) holds M scaled directions, so that a draw needs no (D, D) matrix.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Tensor, spread: Tensor, noise: float):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("spread", spread)
        self.noise = noise

    @classmethod
    def of_texts(cls, embeddings: Tensor) -> ConditionCodes:
        """The distribution of text embeddings (C, M, D), with their full covariance + 1e-4 I."""
        mean, _ = concept_statistics(embeddings)
        centred = F.normalize(embeddings, dim=-1) - mean[:, None]
        return cls(mean, centred / max(embeddings.shape[1] - 1, 1) ** 0.5, CODE_NOISE)

    @classmethod
    def gaussian(cls, embeddings: Tensor) -> ConditionCodes:
        """N(0, I) of the same width for every class."""
        nothing = torch.zeros_like(embeddings[:, :1])
        return cls(nothing[:, 0], nothing, 1.0)

    def draw(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """A code (n, D) for each of the labels (n,)."""
        spread = self.spread[labels]
        mixture = torch.randn(spread.shape[:2], generator=random, device=labels.device)
        noise = torch.randn(len(labels), spread.shape[2], generator=random, device=labels.device)
        return self.mean[labels] + torch.einsum("nm,nmd->nd", mixture, spread) + self.noise * noise
