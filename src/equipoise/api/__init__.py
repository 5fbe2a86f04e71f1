"""Equipoise from Python: federations, training, comparisons and results, as `import equipoise` offers them."""

from typing import TYPE_CHECKING

from equipoise.core.lazy import on_demand

if TYPE_CHECKING:
    from equipoise.api.comparison import Comparison, compare
    from equipoise.api.result import Result, load_result
    from equipoise.api.training_runs import load_federation, train

__all__ = ["Comparison", "Result", "compare", "load_federation", "load_result", "train"]

__getattr__ = on_demand(__name__, __all__, "training_runs", "result", "comparison")
