"""Equipoise: federated learning for medical images when classes are imbalanced and hospitals differ."""

from equipoise.core.version import __version__

__all__ = ["__version__"]
