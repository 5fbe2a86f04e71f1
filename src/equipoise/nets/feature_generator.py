"""A generator of features of a frozen encoder, from the embedding of a class concept.

It stands in place of FedBM's generator of images where a run has no images. It is a variant of ours, not the paper's.
"""

import math
from itertools import pairwise

from torch import Tensor, nn

SLOPE = 0.2  # of the leaky ReLU, as in the generator of images


class FeatureGenerator(nn.Module):
    """Codes (B, code_size) -> features (B, *shape): two hidden layers, then values of any size."""

    def __init__(self, code_size: int, shape: tuple[int, int, int], width: int = 64) -> None:
        super().__init__()
        self.shape = shape
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((code_size, 4 * width, 4 * width)):
            layers += [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.LeakyReLU(SLOPE)]
        self.layers = nn.Sequential(*layers, nn.Linear(4 * width, math.prod(shape)))

    def forward(self, codes: Tensor) -> Tensor:
        """Features (B, *shape) of codes (B, code_size)."""
        features: Tensor = self.layers(codes).unflatten(1, self.shape)
        return features
