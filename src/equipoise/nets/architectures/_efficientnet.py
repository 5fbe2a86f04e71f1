"""The EfficientNets have one shape: 1280 features, from 32 px up. A `Net` replaces their dropout and classifier."""

from torch import nn

from equipoise.nets.net import Net

FEATURES = 1280
SMALLEST = 32
#: rate of dropout and of drop-connect, as published
RATE = 0.2


def without_classifier(body: nn.Module, num_classes: int, dropout: float) -> Net:
    """An EfficientNet whose own dropout and classifier give way to the dropout and head of a `Net`."""
    body._dropout, body._fc = nn.Identity(), nn.Identity()
    return Net(body, nn.Linear(FEATURES, num_classes), dropout, SMALLEST)
