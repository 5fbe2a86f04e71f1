"""How to divide a data set among sites: the partitions of FedIIC (after CReFF), FedBM and FedNPR; long tails.

Labels are a numpy array (n,) of class numbers; a partition is an array (n,) with the site of each sample.
Each function draws from its own `numpy.random.RandomState(seed)`, whose streams are frozen, so partitions are
too.
"""

from collections.abc import Sequence

import numpy as np
from numpy.random import RandomState
from numpy.typing import ArrayLike, NDArray

from equipoise.core.arguments import whole_numbers
from equipoise.core.errors import UserError

GROUP = 10
"""Sites that share one Dirichlet draw in FedIIC's partition, which therefore needs as many."""

MAX_DRAWS = 10_000
"""Attempts at a partition without empty sites before the request is called impossible."""

MAX_EQUAL_DRAWS = 200_000
"""Attempts at sites of at least half an equal share, of which a small concentration needs many: most of a minute."""

Partition = NDArray[np.int64]


def dirichlet_equal(labels: ArrayLike, num_sites: int, alpha: float, seed: int) -> Partition:
    """FedIIC's partition: classes by Dirichlet(alpha), then sites of equal size (to within one sample).

    Groups of ten sites divide equal shares of the shuffled samples, each class by a separate Dirichlet draw. Full sites
    get nothing more. The sites' lists are then laid end to end and cut into equal parts.
    """
    classes = _checked(labels, num_sites, alpha=alpha)
    if num_sites < GROUP:
        raise UserError(f"num_sites={num_sites}: the equal-size Dirichlet partition needs at least {GROUP} sites")
    random = _random(seed)
    # A list, shuffled by swapping its entries: the draws that an array would take differ.
    shuffled = np.argsort(classes, kind="stable").tolist()
    random.shuffle(shuffled)
    samples = np.array(shuffled, dtype=np.int64)
    num_groups = -(-num_sites // GROUP)
    group_size = int(GROUP / num_sites * len(samples))
    ends = [group_size * (group + 1) for group in range(num_groups - 1)]
    order = np.concatenate(
        [
            _divide_group(group, classes, min(GROUP, num_sites - GROUP * index), alpha, random)
            for index, group in enumerate(np.split(samples, ends))
        ]
    )
    return _owned(np.empty_like(classes), np.array_split(order, num_sites))


def _divide_group(
    samples: NDArray[np.int64], classes: NDArray[np.int64], num_sites: int, alpha: float, random: RandomState
) -> NDArray[np.int64]:
    """The samples of one group in the order of its sites, each of which gets at least half an equal share."""
    full, least = len(samples) / num_sites, int(0.5 * len(samples) / num_sites)
    members = [samples[classes[samples] == label] for label in range(classes.max() + 1)]
    for _ in range(MAX_EQUAL_DRAWS):
        sites: list[list[NDArray[np.int64]]] = [[] for _ in range(num_sites)]
        sizes = np.zeros(num_sites, dtype=np.int64)
        for member in members:
            shares = np.where(sizes < full, _shares(random, alpha, num_sites), 0.0)
            if not len(member):
                continue
            if not shares.sum() > 0:  # a small alpha gave everything to sites that are full
                break
            cuts = (np.cumsum(shares / shares.sum()) * len(member)).astype(int)[:-1]
            pieces = np.split(member, cuts)
            sizes += [len(piece) for piece in pieces]
            for site, piece in zip(sites, pieces, strict=True):
                site.append(piece)
        else:
            if sizes.min() >= least:
                return np.concatenate([piece for site in sites for piece in site])
    raise UserError(
        f"alpha={alpha}: no draw in {MAX_EQUAL_DRAWS} gave each of {num_sites} sites {least} of "
        f"{len(samples)} samples; raise alpha, take fewer sites, or try another seed"
    )


def dirichlet_per_class(labels: ArrayLike, num_sites: int, alpha: float, seed: int) -> Partition:
    """FedBM's partition: each class is divided among all sites by one draw from Dirichlet(alpha).

    Nothing keeps a site from being empty where alpha is small or samples are few; another seed may do better.
    """
    classes = _checked(labels, num_sites, alpha=alpha)
    random = _random(seed)
    num_classes = int(classes.max()) + 1
    members = [np.flatnonzero(classes == label).tolist() for label in range(num_classes)]
    for member in members:
        random.shuffle(member)
    owners = np.empty_like(classes)
    for member in members:
        shares = _proper(_shares(random, alpha, num_sites), alpha)
        ends = np.cumsum([round(share * len(member)) for share in shares[:-1]], dtype=np.int64)
        _owned(owners, np.split(np.array(member, dtype=np.int64), ends))
    return owners


def concentration(labels: ArrayLike, num_sites: int, alphas: Sequence[float], removal: float, seed: int) -> Partition:
    """FedNPR's recipe for RSNA-ICH: class c by Dirichlet(alphas[c]), removed at a site with chance `removal`.

    The share of the sites that lose a class goes to those that keep it, at least one. Drawn again until no
    site is empty.
    """
    classes = _checked(labels, num_sites, **{f"alphas[{label}]": alpha for label, alpha in enumerate(alphas)})
    num_classes = int(classes.max()) + 1
    if len(classes) < num_sites:
        raise UserError(f"num_sites={num_sites}: {len(classes)} samples cannot leave every site one")
    if len(alphas) < num_classes:
        raise UserError(f"alphas holds {len(alphas)} values, but the labels hold {num_classes} classes")
    if not 0 <= removal < 1:
        raise UserError(f"removal={removal}: the chance that a site lacks a class must be in [0, 1)")
    random = _random(seed)
    for _ in range(MAX_DRAWS):
        owners = np.empty_like(classes)
        for label in range(num_classes):
            shares = _proper(_shares(random, alphas[label], num_sites), alphas[label])
            keeps = random.random_sample(num_sites) >= removal
            keeps[random.randint(num_sites)] |= not keeps.any()
            kept = np.where(keeps, shares, 0.0)
            kept = kept if kept.sum() > 0 else keeps.astype(float)
            member = random.permutation(np.flatnonzero(classes == label))
            cuts = np.round(np.cumsum(kept / kept.sum())[:-1] * len(member)).astype(int)
            _owned(owners, np.split(member, cuts))
        if len(np.unique(owners)) == num_sites:
            return owners
    raise UserError(
        f"num_sites={num_sites}: no draw in {MAX_DRAWS} left every site a sample; "
        "raise alphas, lower removal or take fewer sites"
    )


def long_tail(labels: ArrayLike, ratio: float, seed: int) -> NDArray[np.int64]:
    """Indices (sorted) of a long-tailed subset: the largest class whole, the smallest 1 / ratio of it.

    Between them, in order of size, class sizes fall exponentially. A class that is already smaller stays
    whole.
    """
    classes = whole_numbers("labels", labels)
    if not (ratio >= 1 and np.isfinite(ratio)):
        raise UserError(f"ratio={ratio}: the largest class cannot be smaller than the smallest; give at least 1")
    random = _random(seed)
    present, counts = np.unique(classes, return_counts=True)
    kept = []
    for rank, index in enumerate(np.argsort(-counts, kind="stable")):
        target = round(counts.max() * ratio ** (-rank / max(len(present) - 1, 1)))
        member = random.permutation(np.flatnonzero(classes == present[index]))
        kept.append(member[: max(target, 1)])
    return np.sort(np.concatenate(kept)) if kept else np.empty(0, dtype=np.int64)


def _checked(labels: ArrayLike, num_sites: int, **alphas: float) -> NDArray[np.int64]:
    """The labels as an array (n,), once they, the number of sites and the concentrations make sense."""
    classes = whole_numbers("labels", labels)
    if num_sites < 1:
        raise UserError(f"num_sites={num_sites}: a partition needs at least one site")
    if not len(classes):
        raise UserError("labels is empty: there are no samples to divide")
    if classes.min() < 0:
        raise UserError(f"labels holds {classes.min()}, but classes are numbered from 0")
    for name, alpha in alphas.items():
        if not alpha > 0:
            raise UserError(f"{name}={alpha}: a Dirichlet concentration must be above 0")
    return classes


def _random(seed: int) -> RandomState:
    """The draws of a seed."""
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed}: expected a number from 0 to {2**32 - 1}")
    return RandomState(seed)


def _shares(random: RandomState, alpha: float, num_sites: int) -> NDArray[np.float64]:
    """One draw (sites,) from a Dirichlet distribution. A single site gets all images, even under a tiny alpha."""
    drawn = random.dirichlet([alpha] * num_sites)
    return drawn if num_sites > 1 else np.ones(1)


def _proper(shares: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """Shares (sites,) that add up to one; extreme concentrations draw what floating point cannot hold."""
    if not np.isclose(shares.sum(), 1):
        side, remedy = ("small", "raise") if alpha < 1 else ("large", "lower")
        raise UserError(f"alpha={alpha}: too {side} to draw shares from a Dirichlet distribution; {remedy} it")
    return shares


def _owned(owners: Partition, parts: Sequence[NDArray[np.int64]]) -> Partition:
    """`owners` with the samples of each part given to the site of its place."""
    for site, part in enumerate(parts):
        owners[part] = site
    return owners
