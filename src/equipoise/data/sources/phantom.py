"""The built-in phantom federation: how many images of which class each site has, and their packed store.

Counts are long-tailed, sites lack some classes, and each site has another scanner.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.core.errors import UserError
from equipoise.core.table import drop_later
from equipoise.data.data_config import DataConfig, PhantomConfig
from equipoise.data.phantom_images import CLASS_NAMES, STRUCTURES, Scanners, render, render_with_masks
from equipoise.data.splits import PARTS, apportion, part_targets
from equipoise.data.store import IMAGES, MASKS, Store, StoreIndex, claimed, with_masks, write_index

TITLE = "built-in procedural lesion images with long tails, missing classes and scanner shifts"
SIZE = 32
PARTITION = "source"
VERSION = 1  # part of a store's name: raise it when the same config would give other images
RATIOS = (0.7, 0.15, 0.15)
COHORT = "unseen"
COHORT_SHIFT = 1.5
OF_PATIENT = 4  # images, where they have masks
ULCERATED = (0.1, 0.5)  # least and most of a site's lesions
MOST_GIGABYTES = 16  # images are drawn in memory


def opened(config: DataConfig, root: Path) -> Store:
    """The store under `root` of the phantom that the settings describe."""
    size = {} if config.size is None else {"size": config.size}
    return build(config.phantom.model_copy(update=size), root)


def build(config: PhantomConfig, root: Path) -> Store:
    """The phantom's store under `root`, made now if it is not there yet (about a second per 2,000 images)."""
    digest = hashlib.sha256(f"{VERSION}{json.dumps(_told(config), separators=(',', ':'))}".encode()).hexdigest()
    store = Store(root / f"phantom-{digest[:12]}")
    if store.exists():
        return store
    if config.images < config.sites:
        raise UserError(f"a phantom of {config.images} images cannot fill {config.sites} sites")
    gigabytes = (config.images + config.cohort) * 3 * config.size**2 / 1e9
    if gigabytes > MOST_GIGABYTES:
        raise UserError(
            f"a phantom of {config.images + config.cohort} images of {config.size} pixels takes {gigabytes:.0f} GB of "
            f"memory, more than {MOST_GIGABYTES}; set data.phantom.images, cohort or size lower"
        )
    with claimed(store.folder):
        if not store.exists():
            _write(config, store.folder, digest)
    return store


def _write(config: PhantomConfig, folder: Path, checksum: str) -> None:
    """Make all images in a temporary folder, then move it into place."""
    index, sites = phantom_index(config, checksum)
    scanners = _scanners(config)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        how = (config.size, config.difficulty, config.seed)
        if config.masks:
            images, masks = render_with_masks(index.labels, sites, scanners, _ulcerated(config), *how)
            np.save(draft / MASKS, masks)
            index = with_masks(replace(index, groups=_patients(index)), masks, STRUCTURES)
        else:
            images = render(index.labels, sites, scanners, *how)
        np.save(draft / IMAGES, images)
        write_index(draft, index)
        os.replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def phantom_index(config: PhantomConfig, checksum: str = "") -> tuple[StoreIndex, np.ndarray]:
    """What each image of the phantom is, and the number of its site (n,)."""
    counts = part_counts(config)
    names = [f"site {number + 1}" for number in range(config.sites)]
    if config.cohort:
        tested = apportion(_long_tail(config), config.cohort)
        counts = np.concatenate([counts, tested[None, :, None] * np.array([0, 0, 1])])
        names.append(COHORT)
    sites, labels, numbers = (np.repeat(place.ravel(), counts.ravel()) for place in np.indices(counts.shape))
    parts = [PARTS[number] for number in numbers]
    identifiers = tuple(f"phantom-{row:06d}" for row in range(len(labels)))
    index = StoreIndex(
        source="phantom",
        classes=CLASS_NAMES[: config.classes],
        names=identifiers,
        labels=labels.astype(np.int64),
        sites=tuple(names[s] for s in sites),
        groups=identifiers,
        splits=tuple(parts),
        clean=tuple(parts),
        rows=np.arange(len(labels)),
        cohorts=(COHORT,) if config.cohort else (),
        common=config.common,
        facts={"description": "procedural lesion images", "config": _told(config)},
        checksum=checksum,
    )
    return index, sites.astype(np.int64)


def _patients(index: StoreIndex) -> tuple[str, ...]:
    """The patient of each image: some in a row that lie at one site and in one part."""
    seen: dict[tuple[str, str], int] = {}
    names = []
    for place in zip(index.sites, index.splits):
        seen[place] = seen.get(place, -1) + 1
        names.append(f"{place[0]} {place[1]} patient {seen[place] // OF_PATIENT + 1}")
    return tuple(names)


def _ulcerated(config: PhantomConfig) -> np.ndarray:
    """The share of each scanner's lesions that have an ulcer (S,)."""
    sites = config.sites + bool(config.cohort)
    return np.random.default_rng([config.seed, 5]).uniform(*ULCERATED, sites)


def _told(config: PhantomConfig) -> dict[str, Any]:
    """The settings as a store names them: later ones only where they differ from their defaults."""
    told = config.model_dump(mode="json")
    drop_later(config, told)
    return told


def part_counts(config: PhantomConfig) -> np.ndarray:
    """Images of each class in each part at each site: int64 (sites, classes, parts)."""
    counts = site_class_counts(config)
    if config.patients == "own":
        return np.array([[part_targets(count, RATIOS) for count in site] for site in counts])
    shares = np.array([part_targets(total, RATIOS) for total in counts.sum(axis=0)])
    found = np.zeros((*counts.shape, len(PARTS)), dtype=np.int64)
    for label, (trained, *visiting) in enumerate(shares):
        found[:, label, 0] = apportion(counts[:, label].astype(float), trained)
        for part, total in enumerate(visiting, start=1):
            found[:, label, part] = apportion(np.ones(config.sites), total)
    return found


def site_class_counts(config: PhantomConfig) -> np.ndarray:
    """Images of each class at each site: int64 (sites, classes), summing to `config.images`.

    Every class lies at one site at least, and every site has an image.
    """
    rng = np.random.default_rng([config.seed, 0])
    weights = _presence(config, rng).astype(float)
    if config.skew > 1e-3:  # below, the draws are even up to rounding
        weights *= rng.lognormal(0, config.skew / 2, size=(config.sites, 1))
        weights *= rng.gamma(1 / config.skew, config.skew, size=weights.shape) + 1e-6
    totals = apportion(_long_tail(config), config.images)
    columns = [apportion(weights[:, c], totals[c]) for c in range(config.classes)]
    counts = np.stack(columns, axis=1)
    for site in np.flatnonzero(counts.sum(axis=1) == 0):
        donor = np.argmax(counts[:, 0])
        counts[donor, 0] -= 1
        counts[site, 0] += 1
    return counts


def _long_tail(config: PhantomConfig) -> np.ndarray:
    """Relative class frequencies (C,), falling exponentially from 1 to 1 / imbalance."""
    return config.imbalance ** -(np.arange(config.classes) / (config.classes - 1))


def _presence(config: PhantomConfig, rng: np.random.Generator) -> np.ndarray:
    """Which site has which class: bool (S, C). The first class is everywhere, each class at two sites or more."""
    present = np.ones((config.sites, config.classes), dtype=bool)
    lacking = min(round(config.missing * config.classes), config.classes - 1)
    for site in range(config.sites):
        removable = np.flatnonzero(present.sum(axis=0) > min(2, config.sites))
        removable = removable[removable > 0]
        present[site, rng.permutation(removable)[:lacking]] = False
    return present


def _scanners(config: PhantomConfig) -> Scanners:
    scanners = Scanners.draw(config.sites, config.shift, np.random.default_rng([config.seed, 1]))
    if config.cohort:
        unseen = Scanners.draw(1, COHORT_SHIFT * config.shift, np.random.default_rng([config.seed, 2]))
        scanners = scanners.joined(unseen)
    return scanners
