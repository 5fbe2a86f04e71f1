"""What the tests of published data sets share: small made-up copies of them, and their listings."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.data import DataConfig, Federation, load_federation, sources
from equipoise.data.sources import Listing, Record

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def made_up() -> SimpleNamespace:
    """The functions of benchmarks/made_up.py."""
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "made_up.py")))


@pytest.fixture
def listed() -> Callable[..., Listing]:
    """Lists a copy of a data set, which need not be complete."""

    def listing(name: str, root: Path, **settings: Any) -> Listing:
        settings = {"skip_unreadable": True} | settings
        return sources.load(name).listing(DataConfig(name=name, **settings), root)

    return listing


@pytest.fixture
def federated(tmp_path) -> Callable[..., Federation]:
    """Prepares a copy of a data set at 16 px and makes a federation of it."""

    def load(name: str, root: Path, seed: int = 0, **settings: Any) -> Federation:
        settings = {"skip_unreadable": True, "size": 16, "store": tmp_path / "stores"} | settings
        return load_federation(DataConfig(name=name, root=root, **settings), seed)

    return load


@pytest.fixture
def by_part() -> Callable[..., dict[str, int]]:
    """Images of each part of a listing or a federation."""

    def count(whole: Listing | Federation) -> dict[str, int]:
        if isinstance(whole, Federation):
            return {part: int(whole.class_counts(part).sum()) for part in ("train", "valid", "test")}
        return {part: sum(record.split == part for record in whole.records) for part in ("train", "valid", "test")}

    return count


@pytest.fixture
def groups_in() -> Callable[[list[Record], str], set[str]]:
    """The groups of a part of some records."""
    return lambda records, part: {record.group for record in records if record.split == part}
