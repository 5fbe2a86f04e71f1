"""Builds packed stores from raw images: in parallel, checked, and resumable after a kill."""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from equipoise.core.errors import UserError, first_few
from equipoise.core.outside import short_name
from equipoise.core.plugins import is_plugin
from equipoise.core.storage import write_text
from equipoise.data import sources
from equipoise.data.data_config import DataConfig
from equipoise.data.dicom import check_keywords
from equipoise.data.duplicates import equal_rows
from equipoise.data.masks import decode_mask
from equipoise.data.preparation import PREPARATION, relight
from equipoise.data.raw import Archives, decode_fully
from equipoise.data.sources import Listing, Record
from equipoise.data.store import IMAGES, MASKS, Store, StoreIndex, claimed, with_masks, write_index

BATCH = 128  # images decoded between two notes of progress
CHANNELS = 3
LISTING, DONE = "listing.json", "done.txt"
#: settings of a user's own images, beside their classes, that change what is read
OF_FILES = ("layout", "columns", "plane", "header", "masks")
#: settings that only some sources heed, and why others ignore them
HEEDED_BY_SOME = {
    "classes": "whose classes are fixed (it lists the classes of folder:DIR and manifest:FILE)",
    "layout": "whose files are not read by the names of folders (it is for folder:DIR)",
    "plane": "which has no volumes (it is for NIfTI files of folder:DIR and manifest:FILE)",
    "header": "whose files are known (it is for DICOM of folder:DIR and manifest:FILE)",
    "masks": "whose task is known (it is for folder:DIR and manifest:FILE)",
    "columns": "which has no table with columns to name (it is for manifest:FILE)",
}
SKIP = "(data.skip_unreadable = true, or --skip-unreadable for run and data prepare, goes on without them)"


def open_store(config: DataConfig) -> Store:
    """The prepared store that `config` asks for; made now if it is missing and the raw images are known."""
    if hasattr(_source(config), "opened") or ":" in config.name or is_plugin("source", config.name):
        return prepare(config, progress=False)
    store = Store(store_folder(config))
    if store.exists():
        return store
    if config.root is None:
        raise UserError(
            f"no prepared images of {config.name} in {store.folder}; run `equipoise data prepare {config.name} "
            f"--from DIR{_prepare_options(config)}`, or set data.root to the folder of raw files"
        )
    return prepare(config, progress=False)


def _prepare_options(config: DataConfig) -> str:
    """The options of `data prepare` that make the store of `config`, where they are not the usual ones."""
    size = "" if config.size is None else f" --size {config.size}"
    usual = DataConfig()
    unusual = [name for name in PREPARATION if getattr(config, name) != getattr(usual, name)]
    given = [f"{name}={_as_setting(getattr(config, name))}" for name in unusual]
    if config.store is not None:
        given.append(f"store={config.store}")
    return size + "".join(f" --set {shlex.quote(setting)}" for setting in given)


def _as_setting(value: object) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def store_folder(config: DataConfig) -> Path:
    """Where the store of `config` lies: one folder per source, size and way of preparing."""
    kind, argument = _kind_and_argument(config.name)
    name = f"{kind}-{_size(config)}px"
    if config.crop != "centre":
        name += f"-{config.crop}"
    if config.window is not None:
        name += f"-window{config.window[0]:g},{config.window[1]:g}"
    if config.brightness:
        name += "-brightness"
    if config.colour_constancy:
        name += "-constancy"
    if argument:
        path = Path(argument).expanduser().resolve()
        usual, own = DataConfig(), [path, config.classes]
        own += [getattr(config, key) for key in OF_FILES if getattr(config, key) != getattr(usual, key)]
        name += f"-{path.stem}-{hashlib.sha256(''.join(map(str, own)).encode()).hexdigest()[:8]}"
    return config.store_root() / name


def _kind_and_argument(name: str) -> tuple[str, str]:
    """What a source is called in folders, and the path that its folder's digest covers; for a plug-in, its name."""
    if is_plugin("source", name):
        return short_name(name), name
    kind, _, argument = name.partition(":")
    return kind, argument


def prepare(
    config: DataConfig, from_dir: Path | None = None, workers: int | None = None, progress: bool = True
) -> Store:
    """Pack the images of a source into a store; returns at once if that is already done.

    A killed run leaves its decoded images under a temporary name, and the next one goes on from there.

    Args:
        from_dir: folder with the raw files, zipped or unpacked; default `config.root`
        workers: threads; default one per core (decoding and resizing release Python's lock)
        progress: show a progress bar

    Raises:
        UserError: for missing and unreadable images, unless `config.skip_unreadable`
    """
    source = _source(config)
    if hasattr(source, "opened"):
        if from_dir is not None:
            raise UserError(f"images of {config.name} are made, not read: leave --from out")
        return source.opened(config, config.store_root())
    root = from_dir or config.root
    if is_plugin("source", config.name):
        root = root or Path()
    elif argument := config.name.partition(":")[2]:
        root = Path(argument)
    if root is None:
        raise UserError(f"say where the raw files of {config.name} are: --from DIR or data.root")
    listing = source.listing(config, root.expanduser())
    missing = listing.missing()
    if missing and not config.skip_unreadable:
        found = f"{len(missing)} of {len(listing.records)} images of {config.name}"
        where = f"do not exist (paths start in {root.resolve().parent})" if root.is_file() else f"are not in {root}"
        raise UserError(f"{found} {where}: {first_few(missing)} {SKIP}{_windows_hint(missing)}")
    folder = store_folder(config)
    if not _up_to_date(folder, listing, config):
        with claimed(folder):
            if not _up_to_date(folder, listing, config):  # another process may have built it meanwhile
                _build(listing, folder, config, workers or os.cpu_count() or 1, progress)
    return Store(folder)


def _windows_hint(missing: list[str]) -> str:
    """What to do with paths of another computer."""
    if not any(re.match(r"[A-Za-z]:[\\/]", name) for name in missing):
        return ""
    return (
        "; paths such as C:\\images\\1.png are those of one Windows computer: write them relative to the manifest's "
        "folder (images\\1.png or images/1.png)"
    )


def _source(config: DataConfig) -> Any:
    """The module of the source, once it is clear that it will heed the settings."""
    source = sources.load(config.name)
    heeded, usual = getattr(source, "HEEDS", ()), DataConfig()
    for name, reason in HEEDED_BY_SOME.items():
        if getattr(config, name) != getattr(usual, name) and name not in heeded:
            raise UserError(f"data.{name} has no effect on {config.name}, {reason}; leave it out")
    if config.header:
        check_keywords(config.header)
    return source


def _up_to_date(folder: Path, listing: Listing, config: DataConfig) -> bool:
    """Whether the folder holds a usable store of just these images; of all of them, unless some may be skipped."""
    try:
        if not Store(folder).exists():
            return False
        index = Store(folder).index
    except UserError:
        return False
    whole = config.skip_unreadable or len(index) == len(listing.records)
    return whole and index.checksum == listing.checksum()


def _build(listing: Listing, folder: Path, config: DataConfig, workers: int, progress: bool) -> None:
    """Decode every image into a draft beside the store's folder, then put the draft in its place."""
    records = [record for record in listing.records if listing.is_found(record)]
    size = _size(config)
    draft = folder.with_name(f"{folder.name}.partial")
    shapes: dict[str, tuple[int, ...]] = {IMAGES: (len(records), CHANNELS, size, size)}
    if listing.masks:
        shapes[MASKS] = (len(records), size, size)
    done = _open_draft(draft, listing.checksum(), shapes)
    unreadable, depths = _decode_all(records, listing, draft, done, config, workers, progress)
    if unreadable and not config.skip_unreadable:
        found = f"{len(unreadable)} of {len(records)} images of {config.name} cannot be read"
        raise UserError(f"{found}: {first_few(unreadable.values())} {SKIP}")
    if len(unreadable) == len(records):
        why = first_few(unreadable.values()) if records else f"none exists, {first_few(listing.missing())}"
        raise UserError(f"none of the {len(listing.records)} images of {config.name} can be read: {why}")
    index = store_index(listing, records, unreadable, depths)
    if sources.lists_own_files(config.name):
        index = replace(index, equal=equal_rows(np.load(draft / IMAGES, mmap_mode="r"), index.rows))
    if listing.masks:
        index = with_masks(index, np.load(draft / MASKS, mmap_mode="r"), listing.classes)
    write_index(draft, index)
    (draft / DONE).unlink()
    (draft / LISTING).unlink()
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)


def _open_draft(draft: Path, checksum: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[int, set[int]]:
    """Make the draft folder, or go on with one of the same listing; returns the batches already decoded.

    Each comes with the depths in bits that were guessed of its grey images.
    """
    wanted = {"checksum": checksum, "shape": list(shapes[IMAGES]), "batch": BATCH}
    if (draft / LISTING).is_file() and json.loads((draft / LISTING).read_text()) == wanted:
        notes = (map(int, line.split()) for line in (draft / DONE).read_text().splitlines())
        return {number: set(depths) for number, *depths in notes}
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for name, shape in shapes.items():
        with open(draft / name, "wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + math.prod(shape))
    (draft / DONE).touch()
    write_text(draft / LISTING, json.dumps(wanted))
    return {}


def _decode_all(
    records: list[Record],
    listing: Listing,
    draft: Path,
    done: dict[int, set[int]],
    config: DataConfig,
    workers: int,
    progress: bool,
) -> tuple[dict[int, str], set[int]]:
    """Decode the batches that are not done yet.

    Images are written with plain writes: those fail with an error on a full disk, where a memory map would
    kill the process.

    Returns:
        the rows that cannot be read, with the reason, and all depths in bits that were guessed of grey images
    """
    todo = [number for number in range(math.ceil(len(records) / BATCH)) if number not in done]
    unreadable: dict[int, str] = {}
    depths = set[int]().union(*done.values())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, disable=not progress) as bar,
        Archives() as archives,
        ThreadPoolExecutor(workers) as pool,
        _Packed(draft / IMAGES) as packed,
        _Packed(draft / MASKS) if (draft / MASKS).exists() else nullcontext() as of_masks,
        open(draft / DONE, "a") as notes,
    ):
        task = bar.add_task(config.name, total=len(records), completed=min(len(done) * BATCH, len(records)))
        batches = (records[number * BATCH : (number + 1) * BATCH] for number in todo)
        decoded = pool.map(lambda batch: _decode_batch(batch, archives, config, listing), batches)
        for number, (images, masks, failed, guessed) in zip(todo, decoded):
            packed.write(number * BATCH, images)
            if of_masks is not None:
                of_masks.write(number * BATCH, masks)
            unreadable |= {number * BATCH + row: reason for row, reason in failed.items()}
            depths |= guessed
            if not failed:  # a batch with a broken image is read again next time: it may be mended by then
                notes.write(" ".join(map(str, (number, *sorted(guessed)))) + "\n")
                notes.flush()
            bar.advance(task, len(images))
    return unreadable, depths


class _Packed:
    """A packed file of rows of one shape, written in place with plain writes."""

    def __init__(self, path: Path) -> None:
        shape = np.load(path, mmap_mode="r").shape
        self._row = math.prod(shape[1:])
        self._header = path.stat().st_size - shape[0] * self._row
        self._file = open(path, "r+b")  # noqa: SIM115

    def __enter__(self) -> "_Packed":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, first: int, rows: np.ndarray) -> None:
        """Put rows from `first` on in their place."""
        self._file.seek(self._header + first * self._row)
        self._file.write(rows.tobytes())
        self._file.flush()


def _decode_batch(
    batch: list[Record], archives: Archives, config: DataConfig, listing: Listing
) -> tuple[np.ndarray, np.ndarray, dict[int, str], set[int]]:
    """Images (b, C, size, size) and masks (b, size, size) of a batch, zeros where images have none.

    And why some could not be read, and the depths guessed of grey ones.
    """
    size = _size(config)
    images = np.zeros((len(batch), CHANNELS, size, size), dtype=np.uint8)
    masks = np.zeros((len(batch), size, size), dtype=np.uint8)
    failed = {}
    guessed = set()
    for row, record in enumerate(batch):
        assert record.location is not None
        try:
            where = record.location
            found = decode_fully(archives.read(where), size, config.crop, config.window, where.frame)
            if record.mask is not None:
                content, how = archives.read(record.mask), (record.mask.frame, listing.threshold)
                masks[row] = decode_mask(content, size, config.crop, found.whole, listing.classes, *how)
            images[row] = found.pixels
            guessed.add(found.bits)
        except Exception as error:  # Pillow raises errors of many kinds on broken files
            failed[row] = f"{record.location} ({error})"
    lit = relight(torch.from_numpy(images), config).numpy()
    return lit, masks, failed, {bits for bits in guessed if bits is not None}


def store_index(
    listing: Listing, records: list[Record], unreadable: dict[int, str], depths: Collection[int] = ()
) -> StoreIndex:
    """The index of a store whose row i holds `records[i]`, without those that could not be read.

    Args:
        depths: in bits, as `equipoise.data.raw.decode_with_depth` guessed them
    """
    rows = [row for row in range(len(records)) if row not in unreadable]
    kept = [records[row] for row in rows]
    warnings = list(listing.facts.get("warnings", ()))
    names = {record.name for record in kept}
    left_out = [record.name for record in listing.records if record.name not in names]
    if len(depths) > 1:
        found = ", ".join(map(str, sorted(depths)))
        warnings.append(
            f"the brightest pixels of grey images suggest different depths ({found} bits), and each image is scaled "
            "by its depth; if all have the same depth, dark images become too bright: save them with 8 bits"
        )
    return StoreIndex(
        source=listing.source,
        classes=listing.classes,
        names=tuple(record.name for record in kept),
        labels=np.array([record.label for record in kept], dtype=np.int64),
        sites=tuple(record.site for record in kept),
        groups=tuple(record.group for record in kept),
        splits=tuple(record.split for record in kept),
        clean=tuple(record.clean for record in kept),
        rows=np.array(rows, dtype=np.int64),
        ratios=listing.ratios,
        cohorts=listing.cohorts,
        common=listing.common,
        pooled=tuple(record.pooled for record in kept) if any(record.pooled for record in kept) else (),
        extra={title: tuple(record.extra[place] for record in kept) for place, title in enumerate(listing.columns)},
        facts={**listing.facts, "warnings": warnings, "left_out": left_out},
        checksum=listing.checksum(),
    )


def _size(config: DataConfig) -> int:
    """Pixels per side: the wanted size, else the source's own."""
    return config.size or sources.load(config.name).SIZE
