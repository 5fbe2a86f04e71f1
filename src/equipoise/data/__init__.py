"""Federations of medical images: sources, packed stores, splits, partitions and augmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.core.lazy import on_demand

if TYPE_CHECKING:
    from equipoise.data.data_config import DataConfig, PhantomConfig
    from equipoise.data.federation import Federation, Site, Split
    from equipoise.data.store import Store

__all__ = ["DataConfig", "Federation", "PhantomConfig", "Site", "Split", "Store", "load_federation"]

__getattr__ = on_demand(__name__, __all__, "data_config", "store", "federation")


def load_federation(config: DataConfig, seed: int, whole: bool = True) -> Federation:
    """The federation that `config` describes.

    Args:
        seed: the run's seed, which draws the partition unless `config.partition_seed` is set
        whole: every class must have an image; one hospital of a federation may lack some

    Raises:
        UserError: when the data is not there, not prepared, or cannot make a federation
    """
    from equipoise.data.assembly import assemble
    from equipoise.data.prepare import open_store

    return assemble(open_store(config), config, seed, whole)
