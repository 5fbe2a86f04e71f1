"""Which augmentation to use, as it stands in a run's configuration."""

from typing import Literal

from pydantic import Field

from equipoise.core.table import Table

PipelineName = Literal["none", "flips", "standard", "fediic", "fediic-ich", "fednpr", "fednpr-ich", "fedbm", "prr"]
Normalisation = Literal["imagenet", "half", "none"]


class AugmentConfig(Table):
    """Which pipeline, and how its output is normalised, as it stands in a run's configuration."""

    name: PipelineName = "standard"
    """The pipeline: those of the papers have their names."""
    size: int | None = Field(default=None, ge=8, le=1024)
    """Pixels of the images that the net sees; by default those of the stored images."""
    normalise: Normalisation | None = None
    """`imagenet`, `half` (mean and deviation 0.5) or `none` (0 to 1); by default as the pipeline's paper."""
    mean: tuple[float, ...] | None = None
    """Mean per channel, of values from 0 to 1, in place of a named normalisation."""
    std: tuple[float, ...] | None = None
    """Deviation per channel, likewise."""
