"""A tiny frozen encoder for tests."""

import torch
from torch import nn

FEATURES = 24


def encoder() -> nn.Module:
    """The same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, FEATURES, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )


encoder.input_size = 20
encoder.mean = (0.5, 0.4, 0.3)
encoder.std = (0.5, 0.5, 0.25)
