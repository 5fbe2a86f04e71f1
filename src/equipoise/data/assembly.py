"""Turns a prepared store into a federation: parts, partition of the training images, sites, checks."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from equipoise.core.errors import UserError, first_few
from equipoise.core.streams import stream
from equipoise.data import partition, sources
from equipoise.data.apart import parts_with_apart
from equipoise.data.data_config import DataConfig
from equipoise.data.duplicates import equal_images_told, joined_groups
from equipoise.data.federation import Federation, Site, Split
from equipoise.data.preparation import PREPARATION
from equipoise.data.soundness import (
    check_classes,
    check_sites,
    classes_of_one_site,
    idle_sites,
    missing_training,
    scarce_classes,
)
from equipoise.data.splits import PARTS, count_leaks, grouped_folds, grouped_split, stratified_sample, whole_sites
from equipoise.data.store import Store, StoreIndex

VALIDATION_SHARE = 0.1  # of the training part, where a given split has no validation part
DEFAULT_SITES = 10
MOST_REDRAWS = 1000
OF_DRAWN_SITES = {"sites", "partition_seed"}
OF_DRAWN_PARTITIONS = {*OF_DRAWN_SITES, "alpha", "alphas", "removal", "redraw"}


@dataclass(frozen=True, eq=False)
class Images:
    """Columns over the images in use: label, row in the store, site, group and part of each (n,)."""

    labels: np.ndarray
    rows: np.ndarray
    sites: np.ndarray
    groups: np.ndarray
    parts: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, chosen: np.ndarray) -> "Images":
        """The images at some positions, or where a mask (n,) is true."""
        columns = (self.labels, self.rows, self.sites, self.groups, self.parts)
        return Images(*(column[chosen] for column in columns))

    def at(self, site: str) -> "Images":
        """The same images, all at one site."""
        return replace(self, sites=np.full(len(self), site))


def assemble(store: Store, config: DataConfig, seed: int, whole: bool = True) -> Federation:
    """The federation of a store, with the splits, the partition and the limits that `config` asks for.

    Args:
        whole: every class must have an image; one hospital of a federation may lack some, and its warnings, which
            reach the server, name no files
    """
    index = store.index
    _refuse_without_labels(index, config)
    scheme = config.partition or sources.load(config.name).PARTITION
    given = np.array(index.pooled if index.pooled and scheme != "source" else index.splits)
    everything = Images(index.labels, index.rows, np.array(index.sites), np.array(index.groups), given)
    if config.split == "grouped" or config.folds:
        everything = replace(everything, groups=joined_groups(index.groups, index.rows, index.equal))
    if config.images is not None:
        everything = everything.where(_drawn(everything, config))
    cohorts = index.cohorts
    if config.leave_out is not None:
        everything = _left_out(everything, config, scheme, index.cohorts)
        cohorts = (*index.cohorts, config.leave_out)
    unseen = np.isin(everything.sites, cohorts)
    if whole and config.leave_out is None:
        check_classes(index, index.positions(everything.rows[~unseen]))
    images, warnings = everything.where(~unseen), list[str]()
    if config.folds and config.split == "sites":
        raise UserError('data.folds draws folds within sites, but data.split = "sites" keeps sites whole: drop one')
    if config.split == "sites":
        images = _part_sites(images, index.ratios, scheme, config, seed)
    else:
        images, warnings = _assign_parts(images, np.array(index.clean)[index.positions(images.rows)], store, config)
    if config.kept_apart:
        images = _with_apart(images, store)
    warnings += _equal_images(images, store, by_site=scheme == "source", with_names=whole)
    images = _thin_long_tail(images, config, seed)
    redrawn: list[str] = []
    if scheme == "source":
        names = list(dict.fromkeys(images.sites.tolist()))
    else:
        images, names, redrawn = _partition(images, scheme, len(index.classes), config, seed)
    images = _choose_training_sites(images, names, config)
    shared = index.common or scheme != "source" or config.split == "sites"
    evaluation = images.where(images.parts != "train").at("common")
    sites = tuple(_site(name, images, store, config, train_only=shared) for name in names)
    if config.kept_apart == "any" and not shared:
        sites = _tested_by_all(sites, images, store)
    federation = Federation(
        name=config.name,
        classes=index.classes,
        sites=sites,
        image_size=store.shape[-1],
        channels=store.shape[0],
        common=_site("common", evaluation, store, config) if shared and len(evaluation) else None,
        cohorts=tuple(_site(name, everything, store, config) for name in cohorts),
        warnings=(*warnings, *redrawn, *_without_effect(scheme, config), *index.warnings(with_names=whole)),
        config=config,
        task=index.task,
    )
    federation = check_sites(federation, config)
    of_classes = (*missing_training(federation), *scarce_classes(federation)) if whole else ()
    if whole and scheme == "source" and sources.lists_own_files(config.name):
        of_classes += (*classes_of_one_site(federation),)
    idle = idle_sites(federation) if whole and config.training_sites is None and not shared else []
    return replace(federation, warnings=(*federation.warnings, *of_classes, *idle))


def _refuse_without_labels(index: StoreIndex, config: DataConfig) -> None:
    """Refuse settings that act on the class of an image where images have masks and no class."""
    asked = {"data.imbalance": config.imbalance is not None, "data.partition": config.partition == "concentration"}
    wrong = [name for name, set_ in asked.items() if set_]
    if index.task == "segmentation" and wrong:
        raise UserError(
            f"{wrong[0]} shares images out by their class, but images of {config.name} have masks instead of a class; "
            "leave it out (data.partition may be source, dirichlet_equal or dirichlet_per_class)"
        )


def _assign_parts(images: Images, clean: np.ndarray, store: Store, config: DataConfig) -> tuple[Images, list[str]]:
    """Give every image its part: the given split, a grouped one, or one drawn here where nothing is given."""
    if config.folds:
        folds = grouped_folds(_strata(images), images.groups, config.folds, config.split_seed)
        images = replace(images, parts=np.where(folds == config.fold, "test", "train"))
    elif config.split == "grouped" and (clean != "").all():
        images = replace(images, parts=clean)
    elif config.split == "grouped" or not (images.parts != "").any():
        images = replace(images, parts=_draw_parts(images, store.index.ratios, config))
    train = images.parts == "train"
    if train.any() and store.index.ratios[1] and not (images.parts == "valid").any():
        parts = images.parts.astype("<U5")
        parts[train] = _draw_parts(images.where(train), (1 - VALIDATION_SHARE, VALIDATION_SHARE, 0), config)
        images = replace(images, parts=parts)
    leaks = _leaks(images)
    return images, [f"the {config.split} split of {config.name} is not clean: {leaks}"] if leaks else []


def _with_apart(images: Images, store: Store) -> Images:
    """The images, with those kept apart for testing. Without a lesion in two parts, and without equal images in two."""
    index = store.index
    where = index.positions(images.rows)
    joined = joined_groups(index.groups, index.rows, index.equal)[where]
    images = replace(images, parts=parts_with_apart(images.parts, np.array(index.groups)[where], joined))
    return images.where(images.parts != "")


def _tested_by_all(sites: tuple[Site, ...], images: Images, store: Store) -> tuple[Site, ...]:
    """The sites, each with the test images of all of them."""
    test = images.where(images.parts == "test")
    every = Split(store, test.rows, test.labels)
    return tuple(replace(site, splits={**site.splits, "test": every}) for site in sites)


def _part_sites(
    images: Images, ratios: tuple[float, float, float], scheme: str, config: DataConfig, seed: int
) -> Images:
    """The images of sites that are drawn, each of which trains, validates or tests as a whole."""
    names = list(dict.fromkeys(images.sites.tolist()))
    count = config.sites or len(names)
    if scheme != "source":
        raise UserError('data.split = "sites" keeps sites whole, but data.partition shares their images out: drop one')
    if count > len(names):
        raise UserError(f"data.sites = {count}, but {config.name} has {len(names)} sites; draw fewer")
    part_of = whole_sites(names, ratios, count, _partition_seed(config, seed))
    images = images.where(np.isin(images.sites, list(part_of)))
    return replace(images, parts=np.array([part_of[site] for site in images.sites.tolist()]))


def _equal_images(images: Images, store: Store, by_site: bool, with_names: bool) -> list[str]:
    """A warning about equal images in several parts, at several sites or under several labels."""
    columns = {"parts": images.parts, "sites": images.sites, "classes": images.labels}
    if not by_site:
        del columns["sites"]
    rows, index = images.rows.tolist(), store.index
    names = dict(zip(index.rows.tolist(), index.names)) if with_names else None
    told = {what: dict(zip(rows, values.tolist())) for what, values in columns.items()}
    return equal_images_told(index.equal, told, names)


def _drawn(images: Images, config: DataConfig) -> np.ndarray:
    """The positions of `config.images` images, of each site and class as many as their shares."""
    strata = _strata(images)
    least = len(np.unique(strata))
    if config.images is not None and config.images < least:
        raise UserError(
            f"data.images = {config.images}, but {config.name} has images of {least} classes and sites; take {least} "
            "or more"
        )
    return stratified_sample(np.unique(strata, return_inverse=True)[1], config.images or 0, config.split_seed)


def _strata(images: Images) -> np.ndarray:
    """A number for the site and class of each image (n,)."""
    _, site = np.unique(images.sites, return_inverse=True)
    return np.asarray(site * (images.labels.max() + 1) + images.labels)


def _left_out(images: Images, config: DataConfig, scheme: str, cohorts: tuple[str, ...]) -> Images:
    """The images, those of one site all for testing."""
    names = [name for name in dict.fromkeys(images.sites.tolist()) if name not in cohorts]
    if scheme != "source":
        raise UserError("data.leave_out names a site, but data.partition draws sites anew: drop one")
    if config.leave_out not in names:
        raise UserError(f"data.leave_out = {config.leave_out!r}; the sites are {', '.join(names)}")
    if len(names) < 2:
        raise UserError(f"data.leave_out = {config.leave_out!r} leaves no site; it is the only one")
    return replace(images, parts=np.where(images.sites == config.leave_out, "test", images.parts))


def _draw_parts(images: Images, ratios: tuple[float, float, float], config: DataConfig) -> np.ndarray:
    """A split (n,) that keeps each site's class shares; a group seen at two sites is in one part, too."""
    return grouped_split(_strata(images), images.groups, ratios, config.split_seed)


def _leaks(images: Images) -> str | None:
    """Groups shared between parts, over all sites and then site by site."""
    overall, names = _count_leaks(images), dict.fromkeys(images.sites.tolist())
    if overall is None or len(names) == 1:
        return overall
    by_site = ((name, _count_leaks(images.where(images.sites == name))) for name in names)
    details = first_few(f"site {name}: {message}" for name, message in by_site if message)
    return f"{overall} ({details})" if details else overall


def _count_leaks(images: Images) -> str | None:
    return count_leaks({part: set(images.groups[images.parts == part].tolist()) for part in PARTS})


def _thin_long_tail(images: Images, config: DataConfig, seed: int) -> Images:
    """Drop training images so that class counts fall to the wanted imbalance ratio."""
    if config.imbalance is None:
        return images
    train = np.flatnonzero(images.parts == "train")
    kept = partition.long_tail(images.labels[train], config.imbalance, _partition_seed(config, seed))
    return images.where(np.sort(np.concatenate([train[kept], np.flatnonzero(images.parts != "train")])))


def _partition(
    images: Images, scheme: str, num_classes: int, config: DataConfig, seed: int
) -> tuple[Images, list[str], list[str]]:
    """Send the training images to new sites; returns the images, the sites' names, and a warning if it took redraws."""
    count = config.sites or DEFAULT_SITES
    names = [f"site {number + 1}" for number in range(count)]
    train = images.parts == "train"
    if train.sum() < count * config.min_images:
        raise UserError(
            f"data.sites = {count}: there are only {train.sum()} training images to divide, too few to give each "
            f"data.min_images = {config.min_images}"
        )
    first = _partition_seed(config, seed)
    for attempt in range(MOST_REDRAWS if config.redraw else 1):
        # With the next seed, two seeds of a study would end at one partition.
        drawn = stream(first, "redraw", attempt) % 2**32 if attempt else first
        chosen = _draw_partition(images.labels[train], scheme, count, num_classes, config, drawn)
        smallest = np.bincount(chosen, minlength=count).min()
        if smallest >= config.min_images:
            break
    else:
        tried = f"all {MOST_REDRAWS} draws of seed {first} leave" if config.redraw else f"seed {first} leaves"
        redraw = "" if config.redraw else ", or set data.redraw = true to draw again"
        raise UserError(
            f"{scheme} with {count} sites, alpha {config.alpha:g} and {tried} a site with {smallest} training "
            f"images, fewer than data.min_images = {config.min_images}; take another data.partition_seed, a "
            f"larger data.alpha or fewer data.sites{redraw}"
        )
    sites = np.full(len(images), "", dtype=f"<U{max(map(len, names))}")
    sites[train] = np.array(names)[chosen]
    too_small = f"left a site with fewer training images than data.min_images = {config.min_images}"
    draws = "the first draw" if attempt == 1 else f"the first {attempt} draws"
    redrawn = [f"{draws} of seed {first} {too_small}: the sites are those of the next"] if attempt else []
    return replace(images, sites=sites), names, redrawn


def _draw_partition(
    labels: np.ndarray, scheme: str, count: int, num_classes: int, config: DataConfig, seed: int
) -> np.ndarray:
    """The site of each training image (n,), by one of the schemes of `equipoise.data.partition`."""
    if scheme == "dirichlet_equal":
        return partition.dirichlet_equal(labels, count, config.alpha, seed)
    if scheme == "dirichlet_per_class":
        return partition.dirichlet_per_class(labels, count, config.alpha, seed)
    alphas = config.alphas or (config.alpha,) * num_classes
    if len(alphas) != num_classes:
        raise UserError(f"data.alphas has {len(alphas)} values for {num_classes} classes")
    return partition.concentration(labels, count, alphas, config.removal, seed)


def _choose_training_sites(images: Images, names: list[str], config: DataConfig) -> Images:
    """Keep training images only at the sites that are to train."""
    if config.training_sites is None:
        return images
    for name in config.training_sites:
        if name not in names:
            raise UserError(f"data.training_sites names {name!r}; the sites are {', '.join(names)}")
        if not ((images.sites == name) & (images.parts == "train")).any():
            raise UserError(f"data.training_sites names {name!r}, which has no training image")
    return images.where((images.parts != "train") | np.isin(images.sites, config.training_sites))


def _site(name: str, images: Images, store: Store, config: DataConfig, train_only: bool = False) -> Site:
    """A site with its parts, each limited to `config.limit` images."""
    own, splits = images.where(images.sites == name), {}
    for part in PARTS[:1] if train_only else PARTS:
        chosen = own.where(own.parts == part)
        if config.limit is not None:
            chosen = chosen.where(stratified_sample(chosen.labels, config.limit, config.split_seed))
        splits[part] = Split(store, chosen.rows, chosen.labels)
    return Site(name, splits)


def _without_effect(scheme: str, config: DataConfig) -> Iterator[str]:
    """Warnings about settings of prepared images where they are made, and of drawn partitions where none is drawn."""
    if sources.is_drawn(config.name):
        for name in PREPARATION:
            if getattr(config, name) != DataConfig.model_fields[name].default:
                yield f"data.{name} = {getattr(config, name)} has no effect: images of {config.name} are made, not read"
    if scheme == "source":
        idle = OF_DRAWN_PARTITIONS - (OF_DRAWN_SITES if config.split == "sites" else set())
        for name in sorted(idle & config.model_fields_set):
            if getattr(config, name) != DataConfig.model_fields[name].default:
                yield (
                    f"data.{name} = {getattr(config, name)} has no effect: every site keeps its own images unless "
                    "data.partition says how to draw them"
                )


def _partition_seed(config: DataConfig, seed: int) -> int:
    return seed if config.partition_seed is None else config.partition_seed
