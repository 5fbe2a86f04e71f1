"""A run warns of weight decay that Adam would turn against classes which sites lack, and only then."""

from __future__ import annotations

import pytest
import torch

from clients import COUNTS, new_client, noise_batch
from equipoise.engine.contract import Setting
from equipoise.engine.opening import cautions
from equipoise.losses import difficulty_margins
from equipoise.methods import get_method, method_names
from harness import events, run_tiny, tiny_config, tiny_federation

ADAM = ("train.optimiser.name='adam'", "train.optimiser.weight_decay=5e-4")
SITES = [{"name": "a", "train": [5, 2, 1]}, {"name": "b", "train": [9, 1, 0]}, {"name": "tests", "train": [0, 0, 0]}]
WARNED = {"fediic": (), "fedlc": (), "fedrs": ("fedrs.alpha=0",), "balancefl": ("balancefl.inherit=0",)}


def told(method: str, *settings: str, sites=SITES) -> list[str]:
    """The cautions of a run with these settings."""
    config = tiny_config(method, *settings)
    known = get_method(method)
    setting = Setting.of(config, known, tiny_federation(config))
    return list(cautions(setting, known.client_class(config), sites))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", ()),
        ("fedlc", ()),
        ("fedlc", ("fedlc.tau=0",)),
        ("fedrs", ()),
        ("fedrs", ("fedrs.alpha=0",)),
        ("balancefl", ("balancefl.inherit=0", "balancefl.feature_noise=false")),
        ("balancefl", ("balancefl.inherit=0", "balancefl.feature_noise=false", "balancefl.present_only=false")),
        ("fediic", ("fediic.k1=0", "fediic.k2=0")),
        ("fediic", ("fediic.k1=0", "fediic.k2=0", "fediic.dala=false")),
    ],
)
def test_a_client_says_whether_a_class_that_its_site_lacks_gets_a_gradient(method, settings):
    client = new_client(method, *settings)
    if method == "fediic" and client.options.dala:
        client.margins.copy_(difficulty_margins(torch.tensor(COUNTS), torch.ones(4)))
    batch = noise_batch(size=12)
    (gradient,) = torch.autograd.grad(client.loss(batch, client.forward(batch)), [client.net.head.weight])
    *present, absent = gradient.norm(dim=1).tolist()
    assert min(present) > 0 and (absent == 0) == type(client).decays_absent(client.setting)


@pytest.mark.parametrize("method", method_names())
def test_by_their_defaults_only_losses_that_leave_classes_out_are_warned_of(method):
    assert bool(told(method, *ADAM)) == (method in ("fediic", "fedlc"))


@pytest.mark.parametrize(("method", "settings"), WARNED.items())
def test_a_caution_names_the_method_and_the_ways_out(method, settings):
    (text,) = told(method, *ADAM, *settings)
    assert method in text and '"adamw"' in text and "weight_decay = 0" in text


@pytest.mark.parametrize(
    "settings",
    [
        (*ADAM, "train.optimiser.name='adamw'"),
        (*ADAM, "train.optimiser.weight_decay=0"),
        (*ADAM, "train.optimiser.name='sgd'"),
        (*ADAM, "npr.weight=0.1", "npr.supervised=false"),
    ],
)
def test_no_caution_where_decay_is_no_full_step_or_no_head_learns(settings):
    assert not told("fediic", *settings)


@pytest.mark.parametrize("counts", [[[5, 2, 1]], [[5, 2, 0], [9, 1, 0]]], ids=["everyone has all", "nobody has one"])
def test_no_caution_where_no_site_lacks_what_another_has(counts):
    assert not told("fediic", *ADAM, sites=[{"name": "site", "train": train} for train in counts])


def test_a_run_tells_it_at_its_start(tmp_path):
    folder = run_tiny(tmp_path, "fedlc", *ADAM, "data.phantom.images=90", "train.rounds=1")
    start = events(folder, "start")[0]
    assert any("some sites lack classes that others have" in text for text in start["warnings"])
