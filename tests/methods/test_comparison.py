"""What all comparison methods with one global model bear: steps that a GPU can capture, sites of one image, missing
classes, late sites."""

from __future__ import annotations

import pytest
import torch
from test_personalised import with_one_image

from clients import new_client, noise_batch
from equipoise.checks.host_reads import HostReads
from equipoise.contract.method import Batch
from equipoise.engine.loop import Run
from equipoise.methods import get_method
from harness import all_state, events, run_tiny, tiny_config, tiny_federation

METHODS = (
    *("fedprox", "scaffold", "feddyn", "moon", "fedproc", "fedrs", "fedlc", "fedfocal", "fedeamc", "ida", "climb"),
    *("fedntd", "feddisco", "fednova", "fedvls"),
)


@pytest.mark.parametrize("method", METHODS)
def test_no_step_reads_a_value_on_the_host(method):
    client = new_client(method)
    batch = noise_batch()
    with torch.no_grad():
        batch = Batch(**vars(batch), **client.prepare(batch))
    with HostReads() as host:
        client.step([batch], client.workplace.phases["main"])
    assert host.seen == []


@pytest.mark.parametrize("method", METHODS)
def test_a_site_of_one_image_takes_part(tmp_path, method):
    config = tiny_config(method, "data.phantom.images=90", "train.rounds=2")
    Run(config, get_method(method), with_one_image(tiny_federation(config)), tmp_path).execute()
    assert all(r["missing"] == {} and len(r["sites"]) == 3 for r in events(tmp_path, "round"))
    assert all(torch.isfinite(t).all() for t in all_state(tmp_path).values() if t.is_floating_point())


@pytest.mark.parametrize("method", METHODS)
def test_sites_that_join_late_and_lack_classes_take_part(tmp_path, method):
    few = ("train.participation=0.34", "train.rounds=3", "data.phantom.images=45", "data.phantom.missing=0.5")
    folder = run_tiny(tmp_path, method, *few)
    rounds = events(folder, "round")
    trained = [[site for site, facts in r["sites"].items() if "steps" in facts] for r in rounds]
    assert all(len(sites) == 1 for sites in trained) and not any(r["missing"] for r in rounds)
    assert len({sites[0] for sites in trained}) > 1
    assert all(torch.isfinite(t).all() for t in all_state(folder).values() if t.is_floating_point())
