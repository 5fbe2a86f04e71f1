"""Checks of what every method keeps: resume, workers, replies, lost sites, NaN, host reads, privacy, masks, Flower.

`equipoise check FILE` runs them on a plug-in, the project's tests on its own methods.
"""
