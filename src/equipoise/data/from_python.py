"""Federations from what a program holds: arrays, tables of files, torch datasets.

The images become a packed store in the data folder, named after their content, as files do. So runs in worker
processes, resumed runs and the command line find them again, and equal images make equal runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.core.errors import UserError, first_few
from equipoise.core.validation import validated
from equipoise.data import load_federation
from equipoise.data.data_config import DataConfig
from equipoise.data.federation import Federation
from equipoise.data.masks import USUAL_CLASSES, as_classes, square_mask
from equipoise.data.pixels import Images, Layout, own_size, picture, squares, whole
from equipoise.data.sources import refuse_similar
from equipoise.data.sources.manifest import PARTS as WORDS
from equipoise.data.splits import MULTI_LABEL, PARTS
from equipoise.data.store import IMAGES, MASKS, Store, StoreIndex, claimed, with_masks, write_index

Column = Sequence[Any] | np.ndarray | torch.Tensor

#: how training images go to sites where only a number of sites is given
DRAWN = "dirichlet_per_class"
#: the seed that a partition is shown with; a run draws it with its own seed
SHOWN_SEED = 1
ALONE = "site 1"


def loaded(source: str, settings: Mapping[str, Any]) -> Federation:
    """The federation of a source under settings of the table `data`, whose keys may have dots."""
    return load_federation(data_config(source, settings), SHOWN_SEED)


def data_config(source: str, settings: Mapping[str, Any]) -> DataConfig:
    """The table `data` of a source and its settings."""
    raw: dict[str, Any] = {"name": str(source)}
    for key, value in settings.items():
        *tables, name = key.removeprefix("data.").split(".")
        place = raw
        for table in tables:
            place = place.setdefault(table, {})
        place[name] = value
    return validated(DataConfig, raw, "data settings")


def from_arrays(
    images: Images,
    labels: Column | None = None,
    sites: Column | int | None = None,
    split: Column | None = None,
    group: Column | None = None,
    classes: Sequence[str] | None = None,
    *,
    masks: Images | None = None,
    names: Sequence[str] | None = None,
    subgroups: Mapping[str, Column] | None = None,
    layout: Layout | None = None,
    **settings: Any,
) -> Federation:
    """See `Federation.from_arrays`."""
    if (labels is None) == (masks is None):
        raise UserError("give labels, one class for each image, or masks, one class for each pixel, and not both")
    if isinstance(sites, int):
        settings = {"partition": DRAWN, "sites": sites} | settings
    config = data_config("arrays:", settings)
    images = whole(images)
    count = len(images)
    if not count:
        raise UserError("images are empty, so there is nothing to train on; give one image or more")
    if labels is not None:
        named, targets = _classes(labels, classes, count)
    else:
        named, targets = tuple(classes or USUAL_CLASSES), np.zeros(count, dtype=np.int64)
    identifiers = _names(names, count)
    index = StoreIndex(
        source="arrays",
        classes=named,
        names=identifiers,
        labels=targets,
        sites=(ALONE,) * count if sites is None or isinstance(sites, int) else _texts(sites, "sites", count),
        groups=identifiers if group is None else _texts(group, "group", count),
        splits=("",) * count if split is None else _parts(split, count),
        clean=("",) * count,
        rows=np.arange(count),
        extra={str(title): _known(column, f"subgroup {title!r}", count) for title, column in (subgroups or {}).items()},
        facts={"description": "images given from Python"},
    )
    for what, values in (("sites", index.sites), ("classes", named)):
        if what == "sites" or (classes is None and masks is None):
            refuse_similar(Path("the data"), what, {value: f"image {n}" for n, value in reversed([*enumerate(values)])})
    size = config.size or own_size(images, layout)
    if size < 8:
        raise UserError(f"images have {size} pixels per side, fewer than nets take; enlarge them with size=32, say")
    packed = None if masks is None else _squares_of_masks(masks, images, size, config, named, layout)
    digest = _pack(squares(images, size, config, layout), packed, index, size, config.store_root())
    return load_federation(config.model_copy(update={"name": f"arrays:{digest}"}), SHOWN_SEED)


def _squares_of_masks(
    masks: Images, images: Images, size: int, config: DataConfig, classes: Sequence[str], layout: Layout | None
) -> np.ndarray:
    """Masks as class indices, uint8 (n, size, size), made square as the images are."""
    if len(masks) != len(images):
        raise UserError(f"there are {len(images)} images but {len(masks)} masks; give one mask per image")
    packed = np.zeros((len(masks), size, size), dtype=np.uint8)
    for number, mask in enumerate(masks):
        values = np.asarray(mask.detach().cpu() if isinstance(mask, torch.Tensor) else mask)
        try:
            if values.ndim != 2:
                raise ValueError(f"the mask has the shape {values.shape}; give (height, width)")
            whole_size = picture(images[number], layout).size
            packed[number] = square_mask(as_classes(values, classes), size, config.crop, whole_size)
        except ValueError as error:
            raise UserError(f"image {number}: {error}") from None
    return packed


def from_frame(
    table: Any,
    path: str = "path",
    label: str = "label",
    site: str | None = None,
    group: str | None = None,
    split: str | None = None,
    root: Path | str | None = None,
    classes: Sequence[str] | None = None,
    mask: str | None = None,
    subgroups: Sequence[str] = (),
    **settings: Any,
) -> Federation:
    """See `Federation.from_frame`."""
    if not hasattr(table, "columns"):
        raise UserError(f"table is {type(table).__name__} and no pandas DataFrame; read your list with pandas.read_csv")
    targets = {"label": label} if mask is None else {"mask": mask}
    columns = {"path": path, **targets, "site": site, "group": group, "split": split}
    given = {name: column for name, column in columns.items() if column is not None}
    kept = [column for column in subgroups if column not in given.values()]
    absent = [f"{name}={column!r}" for name, column in given.items() if column not in table.columns]
    absent += [f"subgroups={column!r}" for column in kept if column not in table.columns]
    if absent:
        raise UserError(
            f"the table has no column for {', '.join(absent)}; it has {first_few(map(str, table.columns), 12)}: name "
            "one of these"
        )
    for name, column in given.items():
        empty = table.index[table[column].isna()]
        if len(empty):
            raise UserError(f"the column {column!r} ({name}) is empty in row {empty[0]!r}; fill it or drop the row")
    if not len(table):
        raise UserError("the table has no row, so there is nothing to train on; give one row or more")
    frame = table[[*given.values()]].astype(str).set_axis([*given], axis=1)
    frame = frame.join(table[kept].astype(object).where(table[kept].notna(), ""))
    for name in {"path", "mask"} & {*frame.columns}:
        frame[name] = [os.path.abspath(os.path.join(root or "", file)) for file in frame[name]]
    text = frame.to_csv(index=False)
    raw = dict(settings) | ({} if classes is None else {"classes": tuple(classes)})
    folder = data_config("manifest:", raw).store_root() / "frames"
    manifest = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.csv"
    if not manifest.exists():
        from equipoise.core.storage import write_text

        write_text(manifest, text)
    return load_federation(data_config(f"manifest:{manifest}", raw), SHOWN_SEED)


def from_datasets(
    datasets: Mapping[str, Any], classes: Sequence[str] | None = None, *, layout: Layout | None = None, **settings: Any
) -> Federation:
    """See `Federation.from_datasets`."""
    images: list[Any] = []
    labels: list[Any] = []
    sites: list[str] = []
    splits: list[str] = []
    for site, given in datasets.items():
        for part, dataset in _datasets_of(site, given).items():
            for image, label in _pairs(dataset, f"{site}, {part or 'all images'}"):
                images.append(image)
                labels.append(label.item() if isinstance(label, torch.Tensor) else label)
                sites.append(str(site))
                splits.append(part)
    told = {bool(part) for part in splits}
    if len(told) > 1:
        raise UserError(
            "some sites have one dataset and others have several, so the test data is unclear; give each site (train, "
            "valid, test), with None for missing parts, or one dataset"
        )
    split = splits if told == {True} else None
    return from_arrays(images, labels, sites, split, None, classes, layout=layout, **settings)


def _datasets_of(site: str, given: Any) -> dict[str, Any]:
    """The datasets of a site by part; "" where a split is to be drawn."""
    if isinstance(given, Mapping):
        unknown = [part for part in given if str(part).lower() not in WORDS]
        if unknown:
            raise UserError(f"site {site}: unknown split {unknown[0]!r}; use train, valid or test")
        return {WORDS[str(part).lower()]: dataset for part, dataset in given.items() if dataset is not None}
    if isinstance(given, tuple | list):
        if len(given) > len(PARTS):
            raise UserError(f"site {site} has {len(given)} datasets; give (train, valid, test)")
        return {part: dataset for part, dataset in zip(PARTS, given) if dataset is not None}
    return {"": given}


def _pairs(dataset: Any, where: str) -> Iterator[tuple[Any, Any]]:
    """The images and labels of a torch dataset."""
    items = (dataset[position] for position in range(len(dataset))) if hasattr(dataset, "__getitem__") else dataset
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise UserError(f"{where}: an item is {type(item).__name__}, not (image, label); wrap the dataset")
        yield item[0], item[1]


def _plain(values: Column, what: str, count: int) -> list[Any]:
    """A column as a list of one value per image."""
    tolist = getattr(values.cpu() if isinstance(values, torch.Tensor) else values, "tolist", None)
    if isinstance(values, str) or not (callable(tolist) or isinstance(values, Iterable)):
        raise UserError(f"{what} = {values!r}: give a column with one value for each of the {count} images")
    column = tolist() if callable(tolist) else list(values)
    if not isinstance(column, list) or len(column) != count:
        raise UserError(f"there are {count} images but {len(column)} values of {what}; give one value per image")
    if column and isinstance(column[0], list | tuple):
        several = any(sum(map(bool, row)) > 1 for row in column)
        remedy = MULTI_LABEL if several else "Give one value each (labels.argmax(1) of one-hot labels)"
        raise UserError(f"{what} have one row per image. {remedy}")
    return column


def _present(column: list[Any], what: str) -> list[Any]:
    """The same column, in which no value is missing."""
    for number, value in enumerate(column):
        if value is None or value != value:
            raise UserError(f"{what} of image {number} is missing; fill it or leave the image out")
    return column


def _known(values: Column, what: str, count: int) -> tuple[str, ...]:
    """A column as texts, which are empty where nothing is known."""
    column = _plain(values, what, count)
    return tuple("" if value is None or value != value else str(value).strip() for value in column)


def _texts(values: Column, what: str, count: int) -> tuple[str, ...]:
    """A column as names."""
    found = tuple(str(value).strip() for value in _present(_plain(values, what, count), what))
    if "" in found:
        raise UserError(f"{what} of image {found.index('')} is empty; name it or leave the image out")
    return found


def _names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """What images are called: as given, or by their position."""
    if names is None:
        return tuple(f"{number:07d}" for number in range(count))
    found = _texts(names, "names", count)
    if len(set(found)) < count:
        twice = first_few(sorted({name for name in found if found.count(name) > 1}))
        raise UserError(f"names of images come more than once, though each image belongs in one split: {twice}")
    return found


def _parts(split: Column, count: int) -> tuple[str, ...]:
    """The split of each image, in the words of Equipoise."""
    found = _texts(split, "split", count)
    unknown = next((word for word in found if word.lower() not in WORDS), None)
    if unknown is not None:
        raise UserError(f"unknown split {unknown!r} (image {found.index(unknown)}); use train, valid or test")
    return tuple(WORDS[word.lower()] for word in found)


def _classes(labels: Column, classes: Sequence[str] | None, count: int) -> tuple[tuple[str, ...], np.ndarray]:
    """The names of the classes, and the class of each image (n,).

    Whole numbers are positions in `classes`, where these are given. All other labels are names.
    """
    values = _present(_plain(labels, "labels", count), "labels")
    if any(isinstance(value, float) for value in values):
        if not all(float(value).is_integer() for value in values):
            raise UserError("labels are fractions, but a class is a whole number or a name; give one class per image")
        values = [int(value) for value in values]
    numbers = all(isinstance(value, int) for value in values)
    if classes is None:
        order = sorted(set(values)) if numbers else sorted({str(value).strip() for value in values})
        named = tuple(map(str, order))
    else:
        named = tuple(map(str, classes))
        order = list(range(len(named))) if numbers else list(named)
        if len(set(named)) < len(named):
            raise UserError(f"classes name one class twice: {', '.join(named)}")
    if len(named) < 2:
        raise UserError(f"labels name one class only ({named[0]}); a classifier needs two")
    place: dict[Any, int] = {value: position for position, value in enumerate(order)}
    found = values if numbers else [str(value).strip() for value in values]
    unknown = next((number for number, value in enumerate(found) if value not in place), None)
    if unknown is not None:
        raise UserError(
            f"image {unknown} has the label {found[unknown]!r}, which classes do not name: {', '.join(named)}; add the "
            "class or leave the image out"
        )
    return named, np.array([place[value] for value in found], dtype=np.int64)


def _pack(batches: Iterator[np.ndarray], masks: np.ndarray | None, index: StoreIndex, size: int, root: Path) -> str:
    """Write the images and what each is into a store under `root`; returns the digest that names it."""
    from dataclasses import asdict, replace

    facts = asdict(index)
    del facts["pixels"]  # they follow from the masks, and are unknown to names of earlier versions
    about = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in facts.items()}
    hashed = hashlib.sha256(repr(sorted(about.items())).encode())
    with claimed(root / "arrays"):
        draft = Path(tempfile.mkdtemp(prefix="arrays-", suffix=".partial", dir=root))
        try:
            with open(draft / IMAGES, "wb") as packed:
                shape = (len(index), 3, size, size)
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(packed, header)
                for batch in batches:
                    hashed.update(batch.tobytes())
                    packed.write(batch.tobytes())
            if masks is not None:
                hashed.update(masks.tobytes())
                np.save(draft / MASKS, masks)
                index = with_masks(index, masks, index.classes)
            digest = hashed.hexdigest()
            folder = root / f"arrays-{digest[:16]}"
            if not Store(folder).exists():
                write_index(draft, replace(index, checksum=digest))
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return digest[:16]
