"""Checkpoints: which data a run may go on with, and what becomes of one that is damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equipoise.contract.config import Config
from equipoise.core.errors import UserError
from equipoise.data.federation import Federation, Site, Split
from equipoise.data.store import SAMPLED, Store
from equipoise.engine import selection, states
from equipoise.engine.checkpoint import fingerprint
from equipoise.engine.loop import Run
from equipoise.engine.prediction import load_predictor
from equipoise.methods import get_method
from harness import all_state, assert_same_bits, events, run_tiny, tiny_config, tiny_federation


def with_labels(site: Site, part: str) -> Site:
    """The site with other labels in one part."""
    split = site.splits[part]
    changed = Split(split.store, split.rows, np.zeros_like(split.labels))
    return Site(site.name, {**site.splits, part: changed})


def test_a_fingerprint_knows_common_sets_and_cohorts():
    known = tiny_federation(tiny_config("fedavg", "data.phantom.common=true", "data.phantom.cohort=20"))
    assert known.common and known.cohorts
    others: list[Federation] = [
        replace(known, common=with_labels(known.common, "valid")),
        replace(known, cohorts=(with_labels(known.cohorts[0], "test"),)),
        replace(known, sites=(with_labels(known.sites[0], "train"), *known.sites[1:])),
    ]
    assert len({fingerprint(federation) for federation in (known, *others)}) == 4


@pytest.mark.parametrize(("images", "row", "noticed"), [(20, 7, True), (2 * SAMPLED, 0, True), (2 * SAMPLED, 1, False)])
def test_pixels_are_known_by_all_of_a_few_images_and_by_some_of_many(tmp_path: Path, images, row, noticed):
    np.save(tmp_path / "images.npy", np.zeros((images, 3, 4, 4), np.uint8))
    before = Store(tmp_path).sample_digest(np.arange(images))
    changed = np.zeros((images, 3, 4, 4), np.uint8)
    changed[row, 0, 0, 0] = 1
    np.save(tmp_path / "images.npy", changed)
    assert (Store(tmp_path).sample_digest(np.arange(images)) != before) == noticed


def until(folder: Path, config: Config, number: int) -> Path:
    """Run a config until the checkpoint of a round is there; gives its folder."""
    checkpoint = folder / "checkpoints" / f"round-{number:05d}"
    turns = Run(config, get_method(config.method), tiny_federation(config), folder).steps()
    next(turn for turn in turns if checkpoint.exists())
    turns.close()
    return checkpoint


@pytest.mark.parametrize("scores", [(4, 3, 2, 1, 0, 0), (2, 1, 0, 3, 0, 0)], ids=["the first stands", "a later one"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it_and_is_cleared_away(tmp_path: Path, monkeypatch, scores):
    monkeypatch.setattr(selection, "_merit", lambda choice: scores[choice["round"] - 1])
    config = tiny_config("fedavg", "train.rounds=6", "checkpoint.every=2")
    latest = until(tmp_path / "run", config, 4)
    (latest / "manifest.json").write_text("{")
    again = Run(config, get_method("fedavg"), tiny_federation(config), tmp_path / "run")
    again.after_round = lambda number: number == 3
    again.execute(resume=True)
    whole = run_tiny(tmp_path / "whole", "fedavg", "train.rounds=6", "checkpoint.every=2")
    assert_same_bits(all_state(tmp_path / "run"), all_state(whole))


def test_an_older_checkpoint_that_tells_nothing_is_cleared_away_with_a_word(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(selection, "_merit", lambda choice: choice["round"])
    config = tiny_config("fedavg", "train.rounds=4", "checkpoint.keep=3")
    until(tmp_path / "run", config, 3)
    (tmp_path / "run" / "checkpoints" / "round-00002" / "manifest.json").write_text("{")
    Run(config, get_method("fedavg"), tiny_federation(config), tmp_path / "run").execute(resume=True)
    told = [event["text"] for event in events(tmp_path / "run", "warning")]
    assert told == ["damaged checkpoints were deleted when the run went on: round 2"]
    whole = run_tiny(tmp_path / "whole", "fedavg", "train.rounds=4", "checkpoint.keep=3")
    assert_same_bits(all_state(tmp_path / "run"), all_state(whole))


def flip(path: Path) -> None:
    """Damage one byte of a file, far from its head."""
    content = bytearray(path.read_bytes())
    content[3 * len(content) // 4] ^= 0xFF
    path.unlink()  # tensors of others may be mapped from it
    path.write_bytes(content)


@pytest.mark.parametrize("damaged", ["server.safetensors", "a site's state"])
def test_a_damaged_byte_makes_a_checkpoint_give_way_to_the_one_before_it(tmp_path: Path, damaged):
    settings = ("train.rounds=4", "checkpoint.keep=2")
    config = tiny_config("fedbn", *settings)
    latest = until(tmp_path / "run", config, 3)
    states = sorted((tmp_path / "run" / "sites").glob("*/00003-*.safetensors"))
    flip(states[0] if damaged == "a site's state" else latest / damaged)
    Run(config, get_method("fedbn"), tiny_federation(config), tmp_path / "run").execute(resume=True)
    assert [event["round"] for event in events(tmp_path / "run", "resumed")] == [2]
    whole = run_tiny(tmp_path / "whole", "fedbn", *settings)
    assert_same_bits(all_state(tmp_path / "run"), all_state(whole))


def test_a_model_with_a_damaged_byte_does_not_predict(tmp_path: Path):
    run = run_tiny(tmp_path / "run", "fedbn", "train.rounds=1")
    load_predictor(run, "site 1")
    flip(run / "models" / "personal" / "site 1.safetensors")
    with pytest.raises(UserError, match=r"is damaged .*does not hold what was written"):
        load_predictor(run, "site 1")


def test_a_state_that_may_not_be_read_deletes_no_checkpoint(tmp_path: Path, monkeypatch):
    config = tiny_config("fedbn", "train.rounds=4")
    latest = until(tmp_path / "run", config, 3)

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "a state")

    monkeypatch.setattr(states, "read_state", forbidden)
    with pytest.raises(PermissionError):
        Run(config, get_method("fedbn"), tiny_federation(config), tmp_path / "run").execute(resume=True)
    assert latest.exists()
