"""What CReFF, BalanceFL, FedProto, FedNH and FedETF bear: steps that a GPU can capture, sites of one image, missing
classes, late sites, and NPR on top."""

from __future__ import annotations

import pytest
import torch
from test_personalised import with_one_image

from clients import SHORT
from equipoise.checks.host_reads import HostReads
from equipoise.contract.method import Setting
from equipoise.engine.local_engine import new_slot
from equipoise.engine.loop import Run
from equipoise.engine.slot import Request, exhaust
from equipoise.engine.training import EagerSteps, SiteData
from equipoise.methods import get_method
from harness import all_state, events, run_tiny, tiny_config, tiny_federation

#: methods with the settings that keep a test short
METHODS = {
    "creff": ("creff.features=4", "creff.feature_steps=2", "creff.classifier_epochs=2"),
    "balancefl": (),
    "fedproto": (),
    "fednh": (),
    "fedetf": ("fedetf.turns=1",),
}


class WatchedSteps(EagerSteps):
    """Runs steps at once and notes what they read on the host."""

    def __init__(self) -> None:
        self.steps = 0
        self.seen: list[str] = []

    def __call__(self, client, phase, batches, loss_sum) -> None:
        with HostReads() as host:
            super().__call__(client, phase, batches, loss_sum)
        self.steps += 1
        self.seen += host.seen


def assert_finite(folder) -> None:
    assert all(torch.isfinite(t).all() for t in all_state(folder).values() if t.is_floating_point())


@pytest.mark.parametrize("method", METHODS)
def test_no_step_reads_a_value_on_the_host(method):
    config = tiny_config(method, *METHODS[method], "train.steps=2")
    known, federation = get_method(method), tiny_federation(config)
    setting = Setting.of(config, known, federation)
    steps = WatchedSteps()
    site = federation.sites[0]
    data = SiteData(site, setting.task, setting.device)
    server = known.server_class(config)(setting)
    message = next(server.round(1, [site.name])).message(site.name)
    exhaust(new_slot(known, setting, steps).perform(Request("train", site.name, 1), message, None, data))
    assert steps.steps == 2 and steps.seen == []


@pytest.mark.parametrize("method", METHODS)
def test_a_site_of_one_image_takes_part(tmp_path, method):
    config = tiny_config(method, *METHODS[method], "data.phantom.images=90")
    Run(config, get_method(method), with_one_image(tiny_federation(config)), tmp_path).execute()
    assert all(r["missing"] == {} and len(r["sites"]) == 3 for r in events(tmp_path, "round"))
    assert_finite(tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_sites_that_join_late_and_lack_classes_take_part(tmp_path, method):
    few = ("train.participation=0.34", "train.rounds=3", "data.phantom.images=45", "data.phantom.missing=0.5")
    folder = run_tiny(tmp_path, method, *SHORT, *METHODS[method], *few)
    rounds = events(folder, "round")
    assert all(len(r["sites"]) == 1 and not r["missing"] for r in rounds)
    assert len({site for r in rounds for site in r["sites"]}) > 1
    assert_finite(folder)


@pytest.mark.parametrize("method", METHODS)
def test_npr_goes_on_top(tmp_path, method):
    folder = run_tiny(tmp_path, method, *SHORT, *METHODS[method], "npr.weight=0.1", "train.rounds=1")
    assert any("subclusters" in name for name in all_state(folder))
    assert_finite(folder)


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_falls_from_round_to_round(tmp_path, method):
    adam = ("train.optimiser.name='adam'", "train.optimiser.lr=0.003")
    folder = run_tiny(tmp_path, method, *SHORT, *METHODS[method], *adam, "train.rounds=6", "evaluation.every=6")
    losses = [sum(s["loss"] * s["examples"] for s in r["sites"].values()) for r in events(folder, "round")]
    assert losses[-1] < 0.9 * losses[0]
