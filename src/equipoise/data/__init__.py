"""Federations of medical images: sources, packed stores, splits, partitions and augmentation."""

from equipoise.data.assembly import assemble
from equipoise.data.config import DataConfig, PhantomConfig
from equipoise.data.federation import Federation, Site, Split
from equipoise.data.prepare import open_store
from equipoise.data.store import Store

__all__ = ["DataConfig", "Federation", "PhantomConfig", "Site", "Split", "Store", "load_federation"]


def load_federation(config: DataConfig, seed: int, whole: bool = True) -> Federation:
    """The federation that `config` describes.

    Args:
        seed: the run's seed, which draws the partition unless `config.partition_seed` is set
        whole: every class must have an image; one hospital of a federation may lack some

    Raises:
        UserError: when the data is not there, not prepared, or cannot make a federation
    """
    return assemble(open_store(config), config, seed, whole)
