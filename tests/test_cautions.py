"""A run warns of weight decay that Adam would turn against classes which sites lack, and only then."""

from __future__ import annotations

import pytest
import torch

from clients import COUNTS, new_client, noise_batch
from equipoise.engine.contract import Setting
from equipoise.engine.opening import cautions
from equipoise.losses import SUPERVISED, difficulty_margins
from equipoise.methods import get_method
from harness import events, run_tiny, tiny_config, tiny_federation

ADAM = ("train.optimiser.name='adam'", "train.optimiser.weight_decay=5e-4")
CLASSES = ("nevus", "melanoma", "rare")
SITES = [{"name": "a", "train": [5, 2, 1]}, {"name": "b", "train": [9, 1, 0]}, {"name": "tests", "train": [0, 0, 0]}]


def told(method: str, *settings: str, sites=SITES) -> list[str]:
    """The cautions of a run with these settings."""
    config = tiny_config(method, *settings)
    known = get_method(method)
    setting = Setting.of(config, known, tiny_federation(config))
    return list(cautions(setting, known.client_class(config), CLASSES, sites))


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *(("fedavg", (f"train.loss={loss}",)) for loss in SUPERVISED),
        ("fedrep", ("train.loss=balanced_softmax",)),
        ("fedfocal", ("train.loss=balanced_softmax",)),
        ("fedeamc", ("train.loss=fedlc",)),
        ("fedlc", ()),
        ("fedlc", ("fedlc.tau=0",)),
        ("fedrs", ()),
        ("fedrs", ("fedrs.alpha=0",)),
        ("fedrod", ()),
        ("fedrod", ("fedrod.gamma=0",)),
        ("fediic", ("fediic.k1=0", "fediic.k2=0")),
        ("fediic", ("fediic.k1=0", "fediic.k2=0", "fediic.dala=false")),
    ],
)
def test_a_client_leaves_a_class_out_if_its_weights_get_no_gradient_to_speak_of(method, settings):
    client = new_client(method, *settings)
    if method == "fediic" and client.options.dala:
        client.margins.copy_(difficulty_margins(torch.tensor(COUNTS), torch.ones(4)))
    batch = noise_batch(size=12)
    (gradient,) = torch.autograd.grad(client.loss(batch, client.forward(batch)), [client.net.head.weight])
    *present, absent = gradient.norm(dim=1).tolist()
    assert (absent < 1e-6 * min(present)) == type(client).leaves_out_absent(client.setting)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fednh", ("train.loss=balanced_softmax",)),
        ("fedbabu", ("train.loss=balanced_softmax",)),
        ("fedetf", ()),
        ("fedbm", ()),
        ("pfedme", ("train.loss=balanced_softmax",)),
        ("fedavg", ()),
        ("prr", ()),
    ],
)
def test_no_caution_where_heads_do_not_learn_or_all_classes_take_part(method, settings):
    assert not told(method, *ADAM, *settings)


@pytest.mark.parametrize("method", ["fediic", "fedlc"])
def test_a_caution_names_the_classes_and_the_way_out(method):
    (text,) = told(method, *ADAM)
    assert "(rare at 1 of 2)" in text and method in text and '"adamw"' in text


@pytest.mark.parametrize(
    "settings",
    [
        (*ADAM, "train.optimiser.name='adamw'"),
        (*ADAM, "train.optimiser.weight_decay=0"),
        (*ADAM, "train.optimiser.name='sgd'"),
    ],
)
def test_no_caution_where_decay_is_no_full_step(settings):
    assert not told("fediic", *settings)


def test_no_caution_where_every_site_has_every_class():
    assert not told("fediic", *ADAM, sites=SITES[:1])


def test_a_run_tells_it_at_its_start(tmp_path):
    folder = run_tiny(tmp_path, "fedlc", *ADAM, "data.phantom.images=90", "train.rounds=1")
    start = events(folder, "start")[0]
    lacking = [site for site in start["sites"] if any(site["train"]) and not all(site["train"])]
    assert lacking and any("leave classes that they lack" in text for text in start["warnings"])
