"""A run warns of settings that do nothing, and of weight decay that harms classes which sites lack."""

from __future__ import annotations

import pytest
import torch

from clients import COUNTS, new_client, noise_batch
from equipoise.contract.method import Setting
from equipoise.engine.opening import approximate, cautions, ineffective, without_own_loss
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
    return list(cautions(setting, known, sites))


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
    sides = getattr(client, "sides", {})
    if "margins" in sides:
        sides["margins"].margins.copy_(difficulty_margins(torch.tensor(COUNTS), torch.ones(4)))
    batch = noise_batch(size=12)
    (gradient,) = torch.autograd.grad(client.loss(batch, client.forward(batch)), [client.net.head.weight])
    *present, absent = gradient.norm(dim=1).tolist()
    warned = told(method, *ADAM, *settings)
    assert min(present) > 0 and (absent == 0) == bool(warned)


@pytest.mark.parametrize("method", method_names())
def test_by_their_defaults_only_losses_that_leave_classes_out_are_warned_of(method):
    assert bool(told(method, *ADAM)) == (method in ("fediic", "fedlc", "fednpr", "fednpr-per", "fedrod"))


@pytest.mark.parametrize(("gamma", "left_out"), [(1.0, True), (0.5, True), (0.2, False)])
def test_balanced_softmax_is_warned_of_where_decay_outweighs_what_it_teaches_of_absent_classes(gamma, left_out):
    """With gamma = 1 the share of such a class is 1e-9: its row's gradient is far below the decay of a usual weight."""
    settings = ("train.loss='balanced_softmax'", f"balanced-softmax.gamma={gamma}")
    client, batch = new_client("fedavg", *settings), noise_batch(size=12)
    (gradient,) = torch.autograd.grad(client.loss(batch, client.forward(batch)), [client.net.head.weight])
    decayed = 5e-4 * client.net.head.weight[3].detach().norm()
    assert (gradient[3].norm() < decayed) == left_out == bool(told("fedavg", *ADAM, *settings))


@pytest.mark.parametrize(("method", "settings"), WARNED.items())
def test_a_caution_names_the_method_and_the_ways_out(method, settings):
    (text,) = told(method, *ADAM, *settings)
    assert method in text and "decay_absent = false" in text and '"adamw"' in text and "weight_decay = 0" in text


@pytest.mark.parametrize(
    "settings",
    [
        (*ADAM, "train.optimiser.name='adamw'"),
        (*ADAM, "train.optimiser.weight_decay=0"),
        (*ADAM, "train.optimiser.decay_absent=false"),
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


# ---- settings that do nothing --------------------------------------------------------------------------------------


def useless(*settings: str, method: str = "fedavg") -> list[str]:
    """What a run with these settings says of settings without effect."""
    config, known = tiny_config(method, *settings), get_method(method)
    return list(ineffective(Setting.of(config, known, tiny_federation(config)), known, ["site 1"], "global"))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (("train.optimiser.name=adamw", "train.optimiser.momentum=0.8"), "train.optimiser.momentum = 0.8"),
        (("train.optimiser.betas=[0.8, 0.9]",), "train.optimiser.betas = (0.8, 0.9)"),
        (("train.steps=3", "train.epochs=2"), "train.epochs = 2"),
        (("train.schedule.gamma=0.1",), "train.schedule.gamma = 0.1"),
        (("train.schedule.name=multistep", "train.schedule.every=3"), "train.schedule.every = 3"),
        (("npr.temperature=0.5",), "npr.temperature = 0.5"),
        (("npr.weight=0.1", "npr.temperature=0.5"), "npr.temperature = 0.5"),
        (("evaluation.last=3",), "evaluation.last = 3"),
        (("train.optimiser.decay_absent=false",), "train.optimiser.decay_absent = False"),
        (("npr.classes=all",), "npr.classes = 'all'"),
        (("evaluation.rule=last", "evaluation.first_round=2"), "evaluation.first_round = 2"),
    ],
)
def test_a_setting_that_does_nothing_is_told(settings, key):
    (text,) = useless(*settings)
    assert text.startswith(f"{key} has no effect: ")


@pytest.mark.parametrize(
    "settings",
    [
        ("train.optimiser.momentum=0.8", "train.schedule.name=step", "train.schedule.every=3", "train.epochs=2"),
        ("train.optimiser.name=adam", "train.optimiser.betas=[0.8, 0.9]", "train.schedule.name=exponential"),
        ("npr.weight=0.1", "npr.clusters=2", "npr.normalise=temperature", "npr.temperature=0.5"),
        ("evaluation.rule=mean_last", "evaluation.last=2", "evaluation.first_round=2"),
    ],
)
def test_settings_that_act_are_not(settings):
    assert not useless(*settings)


PRR = ("train.epochs=3", "prr.warmup=1")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ((*PRR, "prr.pfa=off", "prr.band_start=0.5"), "prr.band_start = 0.5"),
        ((*PRR, "prr.pfa=off", "prr.classifier_rows=false"), "prr.classifier_rows = False"),
        ((*PRR, "prr.det=off", "prr.recover=0.5"), "prr.recover = 0.5"),
        ((*PRR, "prr.det=E", "prr.det_metric=train"), "prr.det_metric = 'train'"),
        ((*PRR, "prr.det=ER", "prr.sublimate=0.8"), "prr.sublimate = 0.8"),
        ((*PRR, "prr.cpa_global=false", "prr.beta=1.0"), "prr.beta = 1.0"),
        (("train.epochs=3", "prr.cpa_local=false", "prr.spread=none"), "prr.spread = 'none'"),
        (("fediic.dala=false", "fediic.exponent=0"), "fediic.exponent = 0.0"),
        (("fediic.k1=0", "fediic.power=0"), "fediic.power = 0.0"),
        (("fediic.k2=0", "fediic.orthogonalise=false"), "fediic.orthogonalise = False"),
        (("fediic.orthogonalise=false", "fediic.diagonal=exclude"), "fediic.diagonal = 'exclude'"),
        (("fediic.k1=0", "fediic.k2=0", "fediic.projection=8"), "fediic.projection = 8"),
        (("fedbm.cgde=false", "fedbm.lambda_dis=1"), "fedbm.lambda_dis = 1.0"),
        (("fedbm.cgde=false", "fedbm.generator_width=8"), "fedbm.generator_width = 8"),
        (("fedbm.cgde=false", "fedbm.classifier=learned", "fedbm.temperature=5"), "fedbm.temperature = 5.0"),
    ],
)
def test_an_option_of_a_part_that_is_off_is_told(settings, key):
    method = key.partition(".")[0]
    (text,) = useless(*settings, method=method)
    assert text.startswith(f"{key} has no effect: {method}.")


@pytest.mark.parametrize(
    "settings",
    [
        (*PRR, "prr.band_start=0.5", "prr.recover=0.5", "prr.sublimate=0.8", "prr.beta=1", "prr.tau=2"),
        (*PRR, "prr.det=ER", "prr.recover=0.5", "prr.det_metric=train"),
        ("fediic.exponent=0", "fediic.power=0", "fediic.diagonal=exclude", "fediic.projection=8"),
        ("fediic.k1=0", "fediic.projection=8", "fediic.orthogonal_steps=5"),
        ("train.rounds=3", "fedbm.every=2", "fedbm.lambda_dis=1", "fedbm.temperature=5", "fedbm.condition=gaussian"),
    ],
)
def test_options_that_act_are_not(settings):
    method = settings[-1].partition(".")[0]
    assert not useless(*settings, method=method)


@pytest.mark.parametrize(("rounds", "told"), [(4, True), (5, True), (6, False)])
def test_a_generator_that_no_round_would_use_is_told(rounds, told):
    assert bool(useless(f"train.rounds={rounds}", method="fedbm")) == told


@pytest.mark.parametrize(
    ("method", "loss", "warned"), [("fednpr-per", "ce", 1), ("fednpr", "focal", 1), ("fedavg", "ce", 0)]
)
def test_a_loss_that_a_preset_takes_away_is_named(method, loss, warned):
    config = tiny_config(method, f"train.loss={loss}")
    found = list(without_own_loss(Setting.of(config, get_method(method), tiny_federation(config)), get_method(method)))
    assert len(found) == warned
    assert all(f"train.loss = '{loss}'" in text and "balanced_softmax" in text for text in found)
    usual = tiny_config(method)
    setting = Setting.of(usual, get_method(method), tiny_federation(usual))
    assert not list(without_own_loss(setting, get_method(method)))


def test_a_class_that_no_site_may_tell_of_is_named_for_its_scores_are_missing():
    sites = [{"name": "A", "valid": [9, 0], "test": [9, 7]}, {"name": "B", "valid": [8, 0], "test": [6, 0]}]
    told = {"classes": ["nevus", "rare"], "sites": sites}
    assert not list(approximate(0, told)) and not list(approximate(1, told))
    first, *named = approximate(5, told)
    assert "approximate" in first and len(named) == 1
    assert "validation images of rare" in named[0] and "nevus" not in named[0]
    nobody = {"classes": ["nevus", "rare"], "sites": [{"name": "A", "valid": [0, 0], "test": [5, 5]}]}
    assert len(list(approximate(5, nobody))) == 1, "without any validation image there are no such scores"
