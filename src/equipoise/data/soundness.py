"""What is checked of a federation before it trains: classes that lack images, sites that lack parts."""

from dataclasses import replace

import numpy as np

from equipoise.core.errors import UserError, first_few
from equipoise.data.data_config import DataConfig
from equipoise.data.federation import Federation
from equipoise.data.splits import PARTS
from equipoise.data.store import StoreIndex


def check_classes(index: StoreIndex, chosen: np.ndarray) -> None:
    """Refuse data that lacks a class.

    Args:
        chosen: (n,), the positions of the images in use
    """
    if index.task == "segmentation":
        counts = index.pixel_counts[chosen].sum(axis=0)
        what, remedy = "pixel of structure", "take it out of the classes, or add masks that show it"
    else:
        counts = np.bincount(index.labels[chosen], minlength=len(index.classes))
        what, remedy = "image of class", "remove the class or add images"
    empty = [name for name, count in zip(index.classes, counts) if count == 0]
    if empty:
        raise UserError(f"no {what} {', '.join(map(repr, empty))} anywhere; {remedy}")


def missing_training(federation: Federation) -> list[str]:
    """A warning about classes without training images, if any."""
    absent = [name for name, count in zip(federation.classes, federation.class_counts()) if count == 0]
    what = "training image of class" if federation.task == "classification" else "training pixel of structure"
    return [f"no {what} {', '.join(absent)} at any site"] if absent else []


def idle_sites(federation: Federation) -> list[str]:
    """A warning about the sites that have no training image, if any."""
    idle = [site.name for site in federation.sites if "train" not in site.splits]
    return [f"sites without training images only measure models: {first_few(idle)}"] if idle else []


def classes_of_one_site(federation: Federation) -> list[str]:
    """A warning about the classes that one of several sites alone can train on."""
    sites = federation.training_sites()
    counts = np.array([site.class_counts(len(federation.classes)) for site in sites])
    alone = [
        f"{name} ({sites[int(counts[:, label].argmax())].name})"
        for label, name in enumerate(federation.classes)
        if len(sites) > 1 and np.count_nonzero(counts[:, label]) == 1
    ]
    if not alone:
        return []
    if federation.task == "segmentation":
        return [f"structures in the training masks of one site only: {first_few(alone)}; others cannot learn them"]
    return [
        f"classes with training images at one site only: {first_few(alone)}; a model may learn the site instead of "
        "the disease"
    ]


def scarce_classes(federation: Federation) -> list[str]:
    """A warning about the classes of which the whole federation trains on one image, or validates or tests on none.

    An empty part says nothing of a class. Another warning names classes without training images.
    """
    unit = "image" if federation.task == "classification" else "pixel"
    train, valid, test = (federation.class_counts(part) for part in PARTS)
    scarce = []
    for label, name in enumerate(federation.classes):
        lacks = [word for word, counts in (("validation", valid), ("test", test)) if counts.any() and not counts[label]]
        found = [f"1 training {unit}"] * int(train[label] == 1) + [f"no {word} {unit}" for word in lacks]
        if found:
            scarce.append(f"{name} ({' and '.join(found)})")
    if not scarce:
        return []
    follows = f"a class without validation or test {unit}s has no part in those scores"
    return [f"too few {unit}s of a class in the whole federation: {first_few(scarce)}; {follows}"]


def check_sites(federation: Federation, config: DataConfig) -> Federation:
    """Refuse a federation that cannot train; drop sites that are left with nothing."""
    sites = tuple(site for site in federation.sites if site.splits)
    training = [site for site in sites if "train" in site.splits]
    if not training:
        raise UserError(f"no site of {config.name} has a training image")
    small = [site.name for site in training if len(site.splits["train"]) < config.min_images]
    if small:
        fewest = f"data.min_images = {config.min_images}"
        raise UserError(f"fewer training images than {fewest} at {first_few(small)}")
    return replace(federation, sites=sites)
