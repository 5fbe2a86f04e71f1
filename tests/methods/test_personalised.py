"""What all personalised methods bear: steps that a GPU can capture, sites of one image, missing classes, late sites."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from clients import SHORT, new_client, noise_batch
from equipoise.checks.host_reads import HostReads
from equipoise.data import Federation
from equipoise.engine.loop import Run
from equipoise.methods import get_method
from harness import all_state, events, run_tiny, tiny_config, tiny_federation

#: methods with the settings that keep a test short
METHODS = {
    "fedbn": (),
    "silobn": (),
    "fedrep": ("fedrep.head_epochs=1",),
    "fedrod": (),
    "fedbabu": ("fedbabu.finetune_epochs=1",),
    "fml": (),
    "perfedavg": (),
    "pfedme": ("pfedme.inner_steps=2",),
    "apfl": (),
    "ditto": (),
    "fedper": (),
}


@pytest.mark.parametrize("method", METHODS)
def test_no_step_reads_a_value_on_the_host(method):
    client = new_client(method)
    for phase in client.workplace.phases.values():
        with HostReads() as host:
            client.step([noise_batch(seed=seed) for seed in range(client.workplace.batches_per_step)], phase)
        assert host.seen == []


def with_one_image(federation: Federation) -> Federation:
    """The federation, its last site left with a single training image."""
    *others, last = federation.sites
    train = last.splits["train"]
    single = dataclasses.replace(train, rows=train.rows[:1], labels=train.labels[:1])
    return dataclasses.replace(
        federation, sites=(*others, dataclasses.replace(last, splits={**last.splits, "train": single}))
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_site_of_one_image_takes_part(tmp_path, method):
    config = tiny_config(method, *METHODS[method], "data.phantom.images=90", "train.rounds=1")
    federation = with_one_image(tiny_federation(config))
    Run(config, get_method(method), federation, tmp_path).execute()
    (first,) = events(tmp_path, "round")
    assert first["missing"] == {} and len(first["sites"]) == 3
    assert all(torch.isfinite(t).all() for t in all_state(tmp_path).values() if t.is_floating_point())


@pytest.mark.parametrize("method", METHODS)
def test_sites_that_join_late_and_lack_classes_take_part(tmp_path, method):
    few = ("train.participation=0.34", "train.rounds=3", "data.phantom.images=45", "data.phantom.missing=0.5")
    folder = run_tiny(tmp_path, method, *SHORT, *METHODS[method], *few)
    rounds = events(folder, "round")
    assert all(len(r["sites"]) == 1 and not r["missing"] for r in rounds)
    assert len({site for r in rounds for site in r["sites"]}) > 1
    assert all(torch.isfinite(t).all() for t in all_state(folder).values() if t.is_floating_point())


@pytest.mark.parametrize("method", METHODS)
def test_sites_weigh_by_their_images_or_alike_as_the_config_says(tmp_path, method):
    by_size, alike = (
        run_tiny(tmp_path / kind, method, *SHORT, *METHODS[method], "train.rounds=1", f"train.aggregation='{kind}'")
        for kind in ("size", "uniform")
    )
    one, two = all_state(by_size), all_state(alike)
    assert not torch.equal(one["server/model/body.0.weight"], two["server/model/body.0.weight"])
    assert all(torch.equal(one[name], two[name]) for name in one if not name.startswith("server/"))
