"""Segmentation between hospitals, without the network: the bits and scores of the local engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("flwr")

from equipoise.core.errors import UserError
from equipoise.hospitals.descriptions import agreed_federation, describe, read_description
from harness import assert_same_bits, events, run_tiny, server_state, tiny_config, tiny_federation
from postbox import Hospitals, Postbox

MASKS = ("data.phantom.masks=true", "data.phantom.images=60", "net.name='small-unet'", "evaluation.metric='dice'")


@pytest.mark.parametrize("method", ["fedavg", "prr"])
def test_models_and_scores_are_those_of_the_local_engine(tmp_path, method):
    hospitals, seen = Hospitals(tmp_path, method, *MASKS), []

    class Watched(Postbox):
        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            seen.extend(name for counts in reply.header.get("measures", {}).values() for name in counts)
            return reply

    hospitals.post = Watched(hospitals.post.offices)
    local, apart = run_tiny(tmp_path / "local", method, *MASKS), hospitals.run()
    assert_same_bits(server_state(local), server_state(apart))
    assert events(local, "final") == events(apart, "final")
    assert "cases" not in seen, "numbers of single patients stay at their site"
    assert {"confusion", "volumes", "dice"} <= set(seen)


def test_descriptions_tell_pixels_and_are_read_as_images():
    federation = tiny_federation(tiny_config("fedavg", *MASKS))
    told = [read_description(site.name, describe(site.name, federation)) for site in federation.sites]
    agreed = agreed_federation("phantom", told)
    assert agreed.task == "segmentation"
    for mine, theirs in zip(federation.sites, agreed.sites):
        assert len(theirs.splits["train"]) == len(mine.splits["train"])
        assert (theirs.class_counts(3) == mine.class_counts(3)).all()


def test_sites_with_masks_and_sites_with_labels_do_not_agree():
    with_masks = tiny_federation(tiny_config("fedavg", *MASKS))
    classes = tiny_federation(tiny_config("fedavg"))
    told = [describe("site 1", with_masks), describe("site 2", classes)]
    with pytest.raises(UserError, match="segmentation"):
        agreed_federation("phantom", [read_description(own["site"], own) for own in told])


@pytest.mark.slow
def test_a_pilot_with_masks_ends_with_scores(tmp_path):
    settings = ("data.phantom.masks=true", "data.phantom.images=480", "data.phantom.size=16", "train.batch_size=32")
    call = [sys.executable, "-m", "equipoise", "pilot", "--sites", "2", "--rounds", "2", "--out", "pilot"]
    done = subprocess.run(
        [*call, *(word for text in settings for word in ("--set", text))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A site's policy holds back scores of few patients, which a pilot this small has.
    pooled = [event for event in events(tmp_path / "pilot", "final") if event["scope"] == "pooled"]
    assert pooled and all(event["metrics"]["loss"] > 0 and len(event["confusion"]) == 3 for event in pooled)
