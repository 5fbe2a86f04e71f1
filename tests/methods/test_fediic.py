"""FedIIC as a whole: what its paper says, and without its parts it is FedAvg bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composed import client_of, noise_of, server_of, setting_of
from equipoise.contract.protocol import Ask, Replies, Reply
from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.engine.runs import make_config
from harness import all_state, assert_same_bits, events, run_tiny, server_state

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")
SMALL = ("fediic.projection=32",)
NO_CONTRAST = ("fediic.k1=0", "fediic.k2=0")


def fresh_client(*settings: str) -> Any:
    """A client whose tensors hold their first values, with three classes of four present."""
    client = client_of(setting_of("fediic", *SMALL, *settings))
    client.class_counts.copy_(torch.tensor([6.0, 3.0, 1.0, 0.0]))
    return client


def actions_asked(server: Any, sites: tuple[str, ...] = ("a", "b")) -> list[Ask]:
    """The asks of one round, every site answering with what it was sent."""
    asked: list[Ask] = []
    conversation = server.round(1, sites)
    ask = next(conversation)
    try:
        while True:
            asked.append(ask)
            counts = torch.ones(server.setting.num_classes)
            answer = {"class_loss": counts, "class_count": counts, "examples": 1}
            ask = conversation.send(Replies([Reply(site, answer | ask.message(site)) for site in ask.sites]))
    except StopIteration:
        return asked


# ---- limits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", [(), ADAM], ids=["sgd", "adam"])
def test_without_margins_and_contrasts_it_is_fedavg_bit_for_bit(tmp_path, optimiser):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *optimiser)
    limit = run_tiny(tmp_path / "fediic", "fediic", "fediic.dala=false", *NO_CONTRAST, *optimiser)
    assert_same_bits(all_state(plain), all_state(limit))


def test_the_configured_loss_takes_the_place_of_the_margins(tmp_path):
    loss = "train.loss='balanced_softmax'"
    plain = run_tiny(tmp_path / "fedavg", "fedavg", loss)
    limit = run_tiny(tmp_path / "fediic", "fediic", "fediic.dala=false", *NO_CONTRAST, loss)
    assert_same_bits(all_state(plain), all_state(limit))


# ---- the conversation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "asked", "sent"),
    [
        ((), ["survey", "train"], {"model", "difficulty", "projector", "prototypes"}),
        (NO_CONTRAST, ["survey", "train"], {"model", "difficulty"}),
        (("fediic.dala=false",), ["train"], {"model", "projector", "prototypes"}),
        (("fediic.k2=0",), ["survey", "train"], {"model", "difficulty", "projector"}),
        (("fediic.dala=false", *NO_CONTRAST), ["train"], {"model"}),
    ],
    ids=["all", "dala", "contrasts", "dala+intra", "fedavg"],
)
def test_only_what_a_switch_needs_is_asked_and_sent(settings, asked, sent):
    asks = actions_asked(server_of(setting_of("fediic", *SMALL, *settings)))
    assert [ask.action for ask in asks] == asked
    assert asks[-1].payload.keys() == sent


# ---- the step --------------------------------------------------------------------------------------------


def test_the_loss_is_the_weighted_sum_of_its_three_parts():
    """Parts measured one at a time, with the others off, add up to the whole (Eq. 7)."""
    batch = noise_of(6, "image", "second")
    prototypes = F.normalize(torch.randn(4, 32, generator=torch.Generator().manual_seed(1)), dim=1)

    def measured(*settings):
        client = fresh_client(*settings)
        if "margins" in client.sides:
            client.sides["margins"].difficulty.copy_(torch.tensor([0.5, 1.0, 2.0, 0.0]))
            next(client.train({}))
        if "inter-contrast" in client.sides:
            client.sides["inter-contrast"].prototypes.copy_(prototypes)
        return client.loss(batch, client.outputs(batch)).item()

    views = "fediic.two_views='always'"
    dala = measured("fediic.k1=0", "fediic.k2=0", views)
    intra = measured("fediic.k1=1", "fediic.k2=0", views) - dala
    inter = measured("fediic.k1=0", "fediic.k2=1", views) - dala
    assert min(dala, intra, inter) > 0
    assert measured("fediic.k1=3", "fediic.k2=0.5") == pytest.approx(dala + 3 * intra + 0.5 * inter, rel=1e-5)


@pytest.mark.parametrize("size", [1, 3], ids=["one image", "one image of each class"])
def test_a_batch_without_companions_gives_finite_gradients(size):
    client = fresh_client()
    client.sides["margins"].difficulty.copy_(torch.tensor([0.5, 1.0, 0.0, 0.0]))
    client.sides["inter-contrast"].prototypes.copy_(F.normalize(torch.ones(4, 32), dim=1))
    next(client.train({}))
    assert client.sides["margins"].margins[3] == -torch.inf
    batch = noise_of(size, "image", "second")
    client.workplace.set_mode(True, "eval")
    gradients = torch.autograd.grad(
        client.loss(batch, client.outputs(batch)),
        client.workplace.phases["main"].optimiser.parameters,
        allow_unused=True,
    )
    assert all(g is None or g.isfinite().all() for g in gradients)


# ---- whole runs ------------------------------------------------------------------------------------------


def test_the_loss_falls_from_round_to_round(tmp_path):
    folder = run_tiny(tmp_path, "fediic", *SMALL, *ADAM, "train.rounds=6", "evaluation.trained=false")
    rounds = events(folder, "round")
    losses = [sum(s["loss"] * s["examples"] for s in r["sites"].values()) for r in rounds]
    assert losses[-1] < 0.9 * losses[0]


def test_sites_that_join_late_and_lack_classes_take_part(tmp_path):
    """One site a round, and few images: some classes are then nowhere in a round."""
    few = ("train.participation=0.34", "train.rounds=4", "data.phantom.images=24", "data.phantom.missing=0.5")
    folder = run_tiny(tmp_path, "fediic", *SMALL, *few)
    rounds = events(folder, "round")
    assert all(len(r["sites"]) == 1 and not r["missing"] for r in rounds)
    assert len({site for r in rounds for site in r["sites"]}) > 1
    assert all(value.isfinite().all() for value in server_state(folder).values() if value.is_floating_point())


# ---- presets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "source", "rounds", "lr", "rule"),
    [
        ("fediic-isic2019", "isic2019", 200, 3e-4, "best"),
        ("fediic-ich", "rsna-ich", 200, 3e-4, "best"),
        ("fediic-real", "fediic-real", 30, 1e-4, "mean_last"),
    ],
)
def test_presets_hold_the_papers_settings_and_name_a_source_that_is_not_built(preset, source, rounds, lr, rule):
    config = make_config(preset)
    assert (config.method, config.train.rounds, config.train.optimiser.lr) == ("fediic", rounds, lr)
    assert (config.evaluation.rule, config.evaluation.last) == (rule, 5)
    assert (config.train.batch_size, config.net.name, config.net.weights) == (32, "efficientnet-b0", "imagenet")
    with pytest.raises(UserError, match=source):
        load_federation(config.data, config.seed)
