"""Which net to train, as it stands in a run's configuration."""

from typing import Annotated, Literal

from pydantic import Field

from equipoise.core.table import Table

NetName = Literal["small-cnn", "resnet18", "efficientnet-b0", "efficientnet-lite0", "vgg16-slim"]
Rate = Annotated[float, Field(ge=0, lt=1)]


class NetConfig(Table):
    """A net, where its first weights come from, and how much of it is dropped in training."""

    name: NetName = "small-cnn"
    """The architecture."""
    weights: str = "none"
    """`none` (random), `imagenet` (downloaded or packaged), or the path of a safetensors or torch file."""
    dropout: Rate | None = None
    """Share of features dropped before the head; by default what the net's authors use."""
    drop_connect: Rate | None = None
    """Greatest chance of skipping a residual block (stochastic depth, EfficientNets only)."""
    norm_momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    """How fast running statistics of batch norms follow; by default as the net's authors have it."""
