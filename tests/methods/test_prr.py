"""PRR-Imbalance as a whole: a golden step of all its parts, limits that are other methods, settings and runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_close
from composed import client_of, server_of, setting_of
from equipoise.contract.method import Batch, Setting
from equipoise.core.errors import UserError
from equipoise.engine.opening import ineffective
from equipoise.engine.runs import make_config
from equipoise.losses import class_balanced, cross_entropy, focal
from equipoise.methods import get_method
from equipoise.nets import Net
from equipoise.tasks.classification import Classification
from harness import all_state, assert_same_bits, events, run_tiny, server_state, tiny_config

NO_CPA = ("prr.cpa_global=false", "prr.cpa_local=false")
FEDBN = ("prr.pfa=off", "prr.det=off", *NO_CPA)
GOLDEN_CLASSES = ("nv", "bkl", "mel")


# ---- golden numbers ------------------------------------------------------------------------------


class GoldenSetting(Setting):
    """The golden case's net: 5 inputs, 64 features after a ReLU, 3 classes, no bias and no batch norm."""

    def new_net(self) -> Net:
        body = nn.Sequential(nn.Flatten(), nn.Linear(5, 64, bias=False), nn.ReLU())
        return Net(body, nn.Linear(64, 3, bias=False))


def golden_client(g: Mapping[str, Tensor]) -> Any:
    config = tiny_config("prr", "train.optimiser.momentum=0", "prr.warmup=0")
    options = get_method("prr").options_of(config)
    client = client_of(GoldenSetting(config, options, Classification(GOLDEN_CLASSES), 1, 16, torch.device("cpu")))
    client.workplace.begin({"federation_counts": g["class_counts"], "prototypes": g["global_proto"]}, None)
    with torch.no_grad():
        for net, name in ((client.net, "personal"), (client.carrier, "deputy")):
            net.body[1].weight.copy_(g[f"{name}_f"])
            net.head.weight.copy_(g[f"{name}_c"])
    client.sides["cpa"].local_prototypes.copy_(g["local_proto"])
    client.workplace.round = 1
    client.workplace.phases["main"].optimiser.lr.fill_(float(g["lr"]))
    return client


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_of_each_stage_moves_both_models_as_the_golden_one(golden, stage):
    g = golden("prr/det_step")
    client = golden_client(g)
    cpa, deputy = client.sides["cpa"], client.sides["deputy"]
    batch = Batch(image=g["x"][:, None, None, :], label=g["y"])
    deputy.stage.fill_(stage)
    for side in (cpa, deputy):
        side.before_epoch()
    out = client.outputs(batch)
    assert_close(client.supervised(out.logits, batch.label), g[f"s{stage}_loss_personal_sup"])
    assert_close(client.supervised(out.deputy_output, batch.label), g[f"s{stage}_loss_deputy_sup"])
    client.step([batch], client.workplace.phases["main"])
    assert list(cpa.after_epoch(last=True)) == []
    assert_close(client.net.head.weight, g[f"s{stage}_personal_c"])
    assert_close(client.carrier.head.weight, g[f"s{stage}_deputy_c"])
    assert_close(cpa.local_prototypes, g[f"s{stage}_local_proto"])


# ---- limits --------------------------------------------------------------------------------------


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by site and entry, without the name under which they are kept."""
    return {f"{name.split('/')[0]}/{name.rpartition('/')[2]}": t for name, t in state.items() if "." in name}


@pytest.mark.parametrize("aggregation", ["uniform", "size"])
def test_without_its_parts_it_is_fedbn_bit_for_bit(tmp_path, aggregation):
    common = ("train.epochs=2", f"train.aggregation={aggregation}")
    first = run_tiny(tmp_path / "prr", "prr", *common, *FEDBN)
    second = run_tiny(tmp_path / "fedbn", "fedbn", *common)
    assert_same_bits(plain_names(all_state(first)), plain_names(all_state(second)))


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("ce", lambda logits, labels, counts: cross_entropy(logits, labels)),
        ("fedeamc", class_balanced),
        ("focal", lambda logits, labels, counts: focal(logits, labels)),
    ],
)
def test_without_cpa_any_supervised_loss_drives_the_transfer(name, loss):
    client = client_of(setting_of("prr", *NO_CPA, f"train.loss={name}"))
    client.workplace.begin({"model": client.net.state_dict()}, None)
    client.class_counts.copy_(torch.tensor([5.0, 4.0, 0.0, 2.0]))
    logits, labels = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4 // 2
    torch.testing.assert_close(client.supervised(logits, labels), loss(logits, labels, client.class_counts))


def test_sites_weigh_the_same_unless_told_otherwise():
    assert make_config(None, (), method="prr").train.aggregation == "uniform"
    assert make_config(None, ["train.aggregation=size"], method="prr").train.aggregation == "size"


# ---- partial participation -----------------------------------------------------------------------


def test_sites_that_come_and_go_leave_a_finite_model_at_every_site(tmp_path):
    settings = ("train.rounds=4", "train.participation=0.4", "prr.det=off", "prr.warmup=1")
    run = run_tiny(tmp_path, "prr", *settings)
    assert len({site for event in events(run, "round") for site in event["sites"]}) > 1
    assert all(t.isfinite().all() for t in all_state(run).values())


# ---- settings --------------------------------------------------------------------------------------


def test_its_parts_are_chosen_by_the_options_of_the_methods_own_table():
    """Under any name that a run gives it: `prr` is only the name of a file."""
    config = tiny_config("prr", "prr.global_view=true")
    other = config.model_copy(update={"method": "prr-again", "methods": {"prr-again": {"global_view": False}}})
    method = get_method("prr")
    assert method.client_class(config).views == ("global", "personal") and method.options_of(config).global_view
    assert method.client_class(other).views == ("personal",) and not method.options_of(other).global_view


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("train.rounds=4", "prr.warmup=15"), "none of 4 rounds is after prr.warmup = 15"),
        (("prr.warmup=0", "prr.prototype_exchange=released"), "train.epochs = 1 no epoch has prototypes but ones"),
        (("prr.warmup=0", "prr.prototype_exchange=released", "train.epochs=2"), ""),
        (("train.rounds=4", "prr.cpa_local=false"), ""),
        (("prr.warmup=0", "prr.det=ERS"), "prr is local training: sites receive nothing from each other"),
        (("prr.warmup=0", "prr.det=ER"), "prr is local training: sites receive nothing from each other"),
        (("prr.warmup=0", "prr.det=ERS", "train.epochs=2"), "never sublimates: with train.epochs = 2"),
        (("prr.warmup=0", "prr.det=ER", "train.epochs=2"), ""),
        (("prr.warmup=0", "prr.det=ERS", "train.epochs=3"), ""),
    ],
)
def test_a_run_says_what_of_prr_cannot_act(settings, told):
    setting = setting_of("prr", "train.epochs=1", "prr.det=E", *settings)
    sentences = list(ineffective(setting, get_method("prr"), (), "personal"))
    assert told in "".join(sentences) and len(sentences) == bool(told)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("train.loss=focal",), "prr.cpa_global"),
        (("train.steps=3",), "train.epochs"),
        (("prr.band_start=0.96",), "band_end"),
        (("prr.recover=0.95",), "sublimate"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, complaint):
    with pytest.raises(UserError, match=complaint):
        server_of(setting_of("prr", *settings))


@pytest.mark.parametrize(("preset", "split"), [("prr-dermoscopy", "authors"), ("prr-dermoscopy-grouped", "grouped")])
def test_the_presets_are_the_papers_setting(preset, split):
    config = make_config(preset)
    assert (config.method, config.data.name, config.data.split) == ("prr", "dermoscopy-prr", split)
    assert config.train.rounds * config.train.epochs == 250
    rates = [config.train.optimiser.lr * config.train.schedule.factor(r) for r in (0, 4, 5, 49)]
    assert rates == pytest.approx([0.01, 0.01, 0.005, 0.01 * 0.5**9])
    assert config.train.optimiser.momentum == 0
    assert (config.evaluation.metric, config.evaluation.first_round) == ("macro_f1", 41)


# ---- whole runs ------------------------------------------------------------------------------------


def mean_loss(run: Path, number: int) -> float:
    sites = events(run, "round")[number]["sites"].values()
    return sum(site["loss"] for site in sites) / len(sites)


def test_the_loss_falls_with_all_parts_at_work(tmp_path):
    run = run_tiny(tmp_path, "prr", "train.rounds=4", "train.epochs=2", "prr.warmup=1")
    assert mean_loss(run, -1) < 0.8 * mean_loss(run, 0)
    assert server_state(run)["prototypes"].any(1).all()


@pytest.mark.parametrize("phantom", [("sites=1",), ("sites=2", "images=16", "missing=0.5")], ids=["one site", "few"])
def test_one_site_and_classes_of_a_single_image_train(tmp_path, phantom):
    settings = [f"data.phantom.{setting}" for setting in phantom]
    run = run_tiny(tmp_path, "prr", "train.epochs=2", "prr.warmup=0", *settings)
    assert not [event for event in events(run, "round") if event["missing"]]
    assert all(t.isfinite().all() for t in all_state(run).values())
