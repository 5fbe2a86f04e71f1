"""PRR's CPA: how classes compete and weigh, where prototypes come from, and how often they travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composed import answered, client_of, perform, server_of, setting_of
from equipoise.engine.local_engine import new_slot
from equipoise.losses import conjoint_prototype_aligned
from equipoise.methods import get_method
from harness import all_state, assert_same_bits, events, run_tiny, server_state, tiny_federation

LOGITS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 0, 1, 1, 3, 0, 1, 3])


def update(server: Any) -> dict[str, Any]:
    """A site's reply with random weights."""
    draws = torch.Generator().manual_seed(1)
    model = {name: torch.randn(t.shape, generator=draws) for name, t in server.state.model.items()}
    return {"model": model, "examples": 20}


# ---- prototypes at a site --------------------------------------------------------------------------


def test_prototypes_are_the_mean_features_of_the_personal_model_and_zero_for_absent_classes():
    settings = ("train.batch_size=512", "augment.name=none", "train.optimiser.lr=1e-9", "prr.det=off")
    setting = setting_of("prr", *settings)
    sites = tiny_federation(setting.config).sites
    site = next(i for i, s in enumerate(sites) if (s.class_counts(4) == 0).any())
    message = {"federation_counts": torch.ones(4), "prototypes": torch.zeros(4, 128), "epoch": 0}
    reply = perform(setting, "train", message | {"model": setting.new_net().state_dict()}, site=site).payload
    split = sites[site].splits["train"]
    slot = new_slot(get_method("prr"), setting)
    images = slot.augmentation.plain(split.images(torch.arange(len(split))))
    with torch.no_grad():
        features = setting.new_net().train().features(images)
    labels = torch.from_numpy(split.labels)
    for label in range(4):
        members = features[labels == label]
        assert int(reply["prototype_counts"][label]) == len(members)
        expected = members.mean(0) if len(members) else torch.zeros(128)
        torch.testing.assert_close(reply["prototypes"][label], expected, rtol=1e-4, atol=1e-5)


# ---- the loss --------------------------------------------------------------------------------------


def cpa_client(*settings: str) -> tuple[Any, Any]:
    """A client of PRR after two rounds of warm-up, and its side of CPA."""
    client = client_of(setting_of("prr", "prr.det=off", "prr.warmup=2", *settings))
    side = client.sides["cpa"]
    draws = torch.Generator().manual_seed(0)
    sent_prototypes = torch.rand(4, 128, generator=draws)
    sent_prototypes[3] = 0  # no site has sent class 3
    message = {"model": client.net.state_dict(), "prototypes": sent_prototypes}
    client.workplace.begin(message | {"federation_counts": torch.tensor([90.0, 30.0, 6.0, 4.0])}, None)
    side.local_prototypes.copy_(torch.rand(4, 128, generator=draws))
    side.local_prototypes[2] = 0  # the site has not seen class 2
    client.class_counts.copy_(torch.tensor([5.0, 4.0, 0.0, 2.0]))
    return client, side


def test_prototypes_weigh_after_the_warm_up_and_only_where_both_sides_know_the_class():
    client, side = cpa_client()
    for number, weighed in ((2, ()), (3, (0, 1))):
        client.workplace.round = number
        side.before_epoch()
        for label in range(4):
            labels = torch.full((8,), label)
            plain = conjoint_prototype_aligned(LOGITS, labels, side.federation_counts)
            cosine = torch.cosine_similarity(side.local_prototypes, side.global_prototypes)[label]
            gamma = 4 / (cosine + 3) if label in weighed else 1.0
            torch.testing.assert_close(client.supervised(LOGITS, labels), gamma * plain, rtol=1e-5, atol=0)


def test_the_refinement_alone_weighs_cross_entropy():
    client, side = cpa_client("prr.cpa_global=false")
    client.workplace.round = 3
    side.before_epoch()
    cosine = torch.cosine_similarity(side.local_side, side.global_side)
    expected = (4 / (cosine + 3))[LABELS] * torch.nn.functional.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(client.supervised(LOGITS, LABELS), expected.mean(), rtol=1e-5, atol=0)


def test_the_global_objective_alone_knows_no_prototypes():
    setting = setting_of("prr", "prr.cpa_local=false")
    client = client_of(setting)
    counts = torch.tensor([90.0, 30.0, 6.0, 4.0])
    message = {"model": client.net.state_dict(), "federation_counts": counts, "epoch": 0}
    client.workplace.begin(message, None)
    torch.testing.assert_close(client.supervised(LOGITS, LABELS), conjoint_prototype_aligned(LOGITS, LABELS, counts))
    assert perform(setting, "train", message).payload.keys() == {"model", "examples"}


def test_the_counts_of_the_site_can_stand_in_for_the_federations():
    """Then nothing of the federation is needed, and nothing leaves a site that did not before."""
    settings = ("components=['cpa']", "cpa.counts=site", "cpa.prototypes=false")
    setting = setting_of("fedavg", *settings)
    client = client_of(setting)
    client.workplace.begin({"model": client.net.state_dict()}, None)
    client.class_counts.copy_(torch.tensor([5.0, 4.0, 0.0, 2.0]))
    expected = conjoint_prototype_aligned(LOGITS, LABELS, client.class_counts)
    torch.testing.assert_close(client.supervised(LOGITS, LABELS), expected)
    assert client.discloses == get_method("fedavg").client.discloses


# ---- prototypes on the server ------------------------------------------------------------------------


def test_global_prototypes_are_the_mean_of_those_who_have_the_class_and_stay_where_nobody_has_it():
    server = server_of(setting_of("prr", "prr.spread=none"))
    local = {site: torch.rand(4, 128, generator=torch.Generator().manual_seed(seed)) for seed, site in enumerate("ab")}
    counts = {"a": torch.tensor([5.0, 2.0, 0.0, 1.0]), "b": torch.tensor([5.0, 0.0, 0.0, 3.0])}
    server.state.prototypes = old = torch.full((4, 128), 7.0)
    replies = {s: update(server) | {"prototypes": local[s], "prototype_counts": counts[s]} for s in "ab"}
    answered(server, 1, replies)
    merged = server.state.prototypes
    torch.testing.assert_close(merged[[0, 3]], (local["a"] + local["b"])[[0, 3]] / 2)
    torch.testing.assert_close(merged[1], local["a"][1])
    torch.testing.assert_close(merged[2], old[2])


def test_the_noise_of_global_prototypes_is_the_servers_and_new_in_every_round():
    servers = [server_of(setting_of("prr")) for _ in range(2)]
    for server in servers:
        replies = {
            site: update(server) | {"prototypes": torch.full((4, 128), float(seed)), "prototype_counts": torch.ones(4)}
            for seed, site in enumerate("ab")
        }
        answered(server, 1, replies)
    first = servers[0].state.prototypes
    assert torch.equal(first, servers[1].state.prototypes)
    assert abs(float(first.mean()) - 0.5) < 0.1 and abs(float(first.std()) - 0.5) < 0.1
    answered(servers[0], 2, replies)
    assert not torch.equal(first, servers[0].state.prototypes)


# ---- how often prototypes travel -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["prr", "fedavg"])
def test_prototypes_that_travel_every_epoch_change_nothing_as_long_as_they_do_not_weigh(tmp_path, method):
    """A round in several asks goes on where it stopped: deputy, stage, order of the images and their augmentation."""
    table, exchange = ("prr", "prototype_exchange") if method == "prr" else ("cpa", "exchange")
    common = ["train.epochs=2", "train.optimiser.momentum=0", f"{table}.spread=none", f"{table}.warmup=15"]
    common += ["data.phantom.images=80"]
    common += [] if method == "prr" else ["components=['cpa']"]
    by_round = run_tiny(tmp_path / "round", method, *common)
    by_epoch = run_tiny(tmp_path / "epoch", method, *common, f"{table}.{exchange}=epoch")
    # All epochs count, whether in one ask or in two.
    trained = [[e["sites"]["site 1"] for e in events(folder, "round")] for folder in (by_round, by_epoch)]
    for one, two in zip(*trained, strict=True):
        assert (one["examples"], one["steps"]) == (two["examples"], two["steps"])
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
    expected, found = all_state(by_round), all_state(by_epoch)
    assert_same_bits(expected, {name: t for name, t in found.items() if "/parked/" not in name})


def test_prototypes_that_travel_every_epoch_are_newer():
    server = server_of(setting_of("prr", "train.epochs=3", "prr.prototype_exchange=epoch", "prr.spread=none"))
    reply = update(server) | {"prototypes": torch.ones(4, 128), "prototype_counts": torch.ones(4)}
    asks = answered(server, 1, {"a": reply, "b": reply})
    assert [(ask.action, ask.payload["epoch"]) for ask in asks] == [("epoch", 0), ("epoch", 1), ("train", 2)]
    assert ["model" in ask.payload for ask in asks] == [True, False, False]
    assert [float(ask.payload["prototypes"].mean()) for ask in asks] == [0.0, 1.0, 1.0]  # type: ignore[union-attr]


def test_prototypes_as_released_are_ones_with_unit_noise_when_a_round_begins():
    options = ("train.epochs=2", "prr.prototype_exchange=released", "prr.spread=clamped")
    server = server_of(setting_of("prr", *options))
    reply = update(server) | {"prototypes": torch.full((4, 128), 7.0), "prototype_counts": torch.ones(4)}
    sent = [[ask.payload["prototypes"] for ask in answered(server, n, {"a": reply, "b": reply})] for n in (1, 2)]
    for first, second in sent:
        assert abs(float(first.mean()) - 1) < 0.2 and abs(float(first.std()) - 1) < 0.2
        assert abs(float(second.mean()) - 7) < 0.2, "the epoch before has said what they are"
    assert not torch.equal(sent[0][0], sent[1][0])


def test_a_site_begins_a_round_with_prototypes_of_ones_as_released(tmp_path):
    """With one epoch a round and no noise both sides are ones every time, so that no class weighs more than another."""
    common = ("train.epochs=1", "train.rounds=3", "data.phantom.images=80", "prr.spread=none")
    weightless = run_tiny(tmp_path / "weightless", "prr", *common, "prr.warmup=9")
    exchanges = ("round", "released")
    kept, forgotten = (
        run_tiny(tmp_path / way, "prr", *common, "prr.warmup=0", f"prr.prototype_exchange={way}") for way in exchanges
    )
    expected = server_state(weightless)["model/head.weight"]
    assert torch.equal(server_state(forgotten)["model/head.weight"], expected)
    assert not torch.equal(server_state(kept)["model/head.weight"], expected)
