"""Equipoise: federated learning for medical images when classes are imbalanced and hospitals differ."""

__version__ = "0.1.0"
