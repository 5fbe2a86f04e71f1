"""PRR-Imbalance: golden numbers, limits that are other methods, and who learns what from whom."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeness import assert_close
from equipoise.components._prr_fourier import layer_kinds
from equipoise.contract.config import NetConfig
from equipoise.contract.method import Batch, Setting
from equipoise.contract.protocol import Ask, PerSite, Replies, Reply
from equipoise.core.errors import UserError
from equipoise.engine.local import new_slot
from equipoise.engine.runs import make_config
from equipoise.engine.slot import Outcome, Request, exhaust
from equipoise.engine.training import SiteData
from equipoise.losses import conjoint_prototype_aligned, supervised_loss
from equipoise.methods import get_method
from equipoise.methods.prr import PRRClient, PRRGlobalClient, PRRServer, next_stage
from equipoise.nets import Net, build_net, groups
from equipoise.tasks.classification import Classification
from harness import (
    all_state,
    assert_same_bits,
    events,
    run_tiny,
    server_state,
    site_states,
    tiny_config,
    tiny_federation,
)

NO_CPA = ("prr.cpa_global=false", "prr.cpa_local=false")
FEDBN = ("prr.pfa=off", "prr.det=off", *NO_CPA)
GOLDEN_CLASSES = ("nv", "bkl", "mel")


def setting_of(*settings: str) -> Setting:
    config = tiny_config("prr", *settings)
    return Setting.of(config, get_method("prr"), tiny_federation(config))


def client_of(*settings: str) -> PRRClient:
    setting = setting_of(*settings)
    client = get_method("prr").client_class(setting.config)(setting)
    assert isinstance(client, PRRClient)
    return client


def perform(action: str, message: Mapping[str, Any], *settings: str, site: int = 0, number: int = 1) -> Outcome:
    """One action at one site of the tiny phantom."""
    setting = setting_of(*settings)
    slot = new_slot(get_method("prr"), setting)
    place = tiny_federation(setting.config).sites[site]
    data = SiteData(place, setting.num_classes, setting.device)
    return exhaust(slot.perform(Request(action, place.name, number), message, None, data))


def answered(server: PRRServer, number: int, replies: Mapping[str, Mapping[str, Any]]) -> list[Ask]:
    """Lead the server through a round in which these sites give these answers to every ask."""
    conversation = server.round(number, tuple(replies))
    asks = [next(conversation)]
    while True:
        try:
            asks.append(conversation.send(Replies([Reply(site, payload) for site, payload in replies.items()])))
        except StopIteration:
            return asks


def started(*settings: str, roster: tuple[str, ...] = ("a", "b", "c")) -> PRRServer:
    """A server after its start, without CPA unless asked for."""
    server = PRRServer(setting_of(*NO_CPA, *settings))
    assert list(server.start(roster)) == []
    return server


def update(server: PRRServer, seed: int) -> dict[str, Any]:
    """A site's reply with random weights."""
    draws = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(t.shape, generator=draws) for name, t in server.state.model.items()}
    return {"model": model, "examples": 10 * seed + 10}


def sent(server: PRRServer, site: str) -> dict[str, Tensor]:
    """The deputy that a site would be sent next."""
    deputies = server.deputies([site])
    return deputies.values[site] if isinstance(deputies, PerSite) else deputies  # type: ignore[return-value]


# ---- golden numbers ------------------------------------------------------------------------------


def test_stages_follow_the_golden_table(golden):
    g = golden("prr/det_stage")
    rows = zip(g["stage_in"].tolist(), g["f1_deputy"].tolist(), g["f1_personal"].tolist(), g["stage_out"].tolist())
    for stage, deputy, personal, expected in rows:
        assert next_stage(stage, deputy, personal, float(g["alpha1"]), float(g["alpha2"])) == expected


class GoldenSetting(Setting):
    """The golden case's net: 5 inputs, 64 features after a ReLU, 3 classes, no bias and no batch norm."""

    def new_net(self) -> Net:
        body = nn.Sequential(nn.Flatten(), nn.Linear(5, 64, bias=False), nn.ReLU())
        return Net(body, nn.Linear(64, 3, bias=False))


def golden_client(g: Mapping[str, Tensor]) -> PRRClient:
    config = tiny_config("prr", "train.optimiser.momentum=0")
    options = get_method("prr").options(warmup=0)
    client = PRRClient(GoldenSetting(config, options, Classification(GOLDEN_CLASSES), 1, 16, torch.device("cpu")))
    client.begin({"federation_counts": g["class_counts"], "prototypes": g["global_proto"]}, None)
    with torch.no_grad():
        for net, name in ((client.net, "personal"), (client.deputy, "deputy")):
            net.body[1].weight.copy_(g[f"{name}_f"])
            net.head.weight.copy_(g[f"{name}_c"])
    client.local_prototypes.copy_(g["local_proto"])
    client.round = 1
    client.phases["main"].optimiser.lr.fill_(float(g["lr"]))
    return client


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_of_each_stage_moves_both_models_as_the_golden_one(golden, stage):
    g = golden("prr/det_step")
    client = golden_client(g)
    batch = Batch(image=g["x"][:, None, None, :], label=g["y"])
    client.stage.fill_(stage)
    client.take_stage()
    client.align_prototypes()
    out = client.outputs(batch)
    assert_close(client.supervised(out.logits, batch.label), g[f"s{stage}_loss_personal_sup"])
    assert_close(client.supervised(out.deputy_logits, batch.label), g[f"s{stage}_loss_deputy_sup"])
    client.step([batch], client.phases["main"])
    client.renew_prototypes()
    assert_close(client.net.head.weight, g[f"s{stage}_personal_c"])
    assert_close(client.deputy.head.weight, g[f"s{stage}_deputy_c"])
    assert_close(client.local_prototypes, g[f"s{stage}_local_proto"])


# ---- limits --------------------------------------------------------------------------------------


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by site and entry, whatever the name under which they are kept."""
    return {f"{name.split('/')[0]}/{name.rpartition('/')[2]}": t for name, t in state.items() if "." in name}


@pytest.mark.parametrize("aggregation", ["uniform", "size"])
def test_without_its_parts_it_is_fedbn_bit_for_bit(tmp_path, aggregation):
    common = ("train.epochs=2", f"train.aggregation={aggregation}")
    first = run_tiny(tmp_path / "prr", "prr", *common, *FEDBN)
    second = run_tiny(tmp_path / "fedbn", "fedbn", *common)
    assert_same_bits(plain_names(all_state(first)), plain_names(all_state(second)))


def test_sites_weigh_the_same_unless_told_otherwise():
    assert make_config(None, (), method="prr").train.aggregation == "uniform"
    assert make_config(None, ["train.aggregation=size"], method="prr").train.aggregation == "size"


def even(tensor: Tensor) -> bool:
    """Whether the layer's spectrum has no odd axis, so that band 1 is all of it."""
    axes = {4: (tensor.shape[:1].numel() * tensor.shape[-1:].numel(), tensor.shape[1:3].numel())}
    return all(size % 2 == 0 for size in axes.get(tensor.dim(), tensor.shape[-1:]))


def test_pfa_with_the_full_band_and_complex_mean_is_plain_averaging():
    server = started("prr.pfa=complex", "prr.band_start=1", "prr.band_end=1")
    updates = {site: update(server, seed) for seed, site in enumerate("abc")}
    answered(server, 1, updates)
    compared = 0
    for site in "abc":
        for name, merged in sent(server, site).items():
            if even(merged) or merged.dim() == 1:
                mean = torch.stack([u["model"][name] for u in updates.values()]).mean(0)
                torch.testing.assert_close(merged, mean, rtol=0, atol=1e-6)
                compared += 1
    assert compared == 3 * (len(server.state.model) - 1)  # the first layer of a colour image has an axis of 9


@pytest.mark.parametrize("mode", ["both", "amplitude", "phase", "complex"])
def test_pfa_with_an_empty_band_shares_nothing_but_biases(mode):
    server = started(f"prr.pfa={mode}", "prr.band_start=0", "prr.band_end=0")
    updates = {site: update(server, seed) for seed, site in enumerate("ab")}
    answered(server, 1, updates)
    for site in "ab":
        for name, merged in sent(server, site).items():
            if merged.dim() > 1:
                torch.testing.assert_close(merged, updates[site]["model"][name], rtol=0, atol=1e-6)
            else:
                expected = torch.stack([u["model"][name] for u in updates.values()]).mean(0)
                torch.testing.assert_close(merged, expected)


def test_pfa_shares_more_from_round_to_round():
    server = started("train.rounds=10", "prr.pfa=complex", "prr.band_start=0.2", "prr.band_end=1")
    updates = {site: update(server, seed) for seed, site in enumerate("ab")}
    gaps = []
    for number in (1, 5, 10):
        answered(server, number, updates)
        gaps.append(float((sent(server, "a")["body.4.weight"] - sent(server, "b")["body.4.weight"]).norm()))
    assert gaps[0] > gaps[1] > gaps[2] > 0


def test_the_classifier_is_merged_row_by_row():
    by_row, as_matrix = started(), started("prr.classifier_rows=false")
    updates = {site: update(by_row, seed) for seed, site in enumerate("ab")}
    for server in (by_row, as_matrix):
        answered(server, 1, updates)
    rows = sent(by_row, "a")["head.weight"]
    assert not torch.allclose(rows, sent(as_matrix, "a")["head.weight"], atol=1e-3)
    # A class of its own: changing another class's row changes nothing here.
    updates["b"]["model"]["head.weight"][1] += 1
    answered(by_row, 1, updates)
    changed = sent(by_row, "a")["head.weight"]
    torch.testing.assert_close(changed[[0, 2, 3]], rows[[0, 2, 3]])
    assert not torch.allclose(changed[1], rows[1], atol=1e-3)


def test_15_of_85_entries_of_the_slim_vgg_travel_each_in_its_way():
    net = build_net(NetConfig(name="vgg16-slim"), 3)
    kinds = list(layer_kinds(net).values())
    assert (len(kinds), len(net.state_dict())) == (15, 85)
    assert (kinds.count("conv"), kinds.count("linear"), kinds.count("classifier")) == (13, 1, 1)
    assert list(layer_kinds(net, classifier_rows=False).values()).count("linear") == 2


# ---- partial participation -----------------------------------------------------------------------


def test_a_site_that_sat_out_gets_what_it_was_last_sent_and_a_new_one_the_mean():
    server = started()
    answered(server, 1, {site: update(server, seed) for seed, site in enumerate("ab")})
    before = sent(server, "a")
    updates = {"b": update(server, 5)}
    answered(server, 2, updates)
    assert_same_bits(sent(server, "a"), before)
    assert_same_bits(sent(server, "c"), updates["b"]["model"])


def test_an_evaluating_site_gets_the_net_it_predicts_with_unless_it_keeps_it():
    single = started("prr.det=off")
    answered(single, 1, {site: update(single, seed) for seed, site in enumerate("ab")})
    message = single.message()["model"]
    assert isinstance(message, PerSite)
    for site in "abc":
        assert_same_bits(message.values[site], sent(single, site))  # type: ignore[arg-type]
    assert started().message() == {}


def test_sites_that_come_and_go_leave_a_finite_model_at_every_site(tmp_path):
    settings = ("train.rounds=4", "train.participation=0.4", "prr.det=off", "prr.warmup=1")
    run = run_tiny(tmp_path, "prr", *settings)
    assert len({site for event in events(run, "round") for site in event["sites"]}) > 1
    assert all(t.isfinite().all() for t in all_state(run).values())


# ---- DET -----------------------------------------------------------------------------------------


def stages_taken(monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[tuple[int, float, float]]:
    """(stage, gate of the deputy's lesson, gate of the personal model's) of each local epoch of one round."""
    taken: list[tuple[int, float, float]] = []
    take = PRRClient.take_stage

    def note(client: PRRClient) -> None:
        take(client)
        taken.append((int(client.stage), float(client.deputy_learns), float(client.personal_learns)))

    monkeypatch.setattr(PRRClient, "take_stage", note)
    model = setting_of(*settings).new_net().state_dict()
    counts, prototypes = torch.ones(4), torch.zeros(4, 128)
    message = {"model": model, "epoch": 0, "federation_counts": counts, "prototypes": prototypes}
    perform("train", message, "train.epochs=4", *settings)
    return taken


RECOVER, EXCHANGE, SUBLIMATE = (1, 1.0, 0.0), (2, 1.0, 1.0), (3, 0.0, 1.0)


@pytest.mark.parametrize("metric", ["valid", "train", "released"])
def test_a_good_deputy_recovers_exchanges_and_sublimates(monkeypatch, metric):
    settings = (f"prr.det_metric={metric}", "prr.recover=0", "prr.sublimate=0")
    assert stages_taken(monkeypatch, *settings) == [RECOVER, EXCHANGE, SUBLIMATE, SUBLIMATE]


@pytest.mark.parametrize(("metric", "part"), [("valid", "valid"), ("train", "train"), ("released", "train")])
def test_steps_move_by_the_predictions_of_all_images_of_a_part(monkeypatch, metric, part):
    judged = []
    monkeypatch.setattr("equipoise.methods.prr.macro_f1", lambda confusion: judged.append(int(confusion.sum())) or 1.0)
    stages_taken(monkeypatch, f"prr.det_metric={metric}")
    site = tiny_federation(setting_of("train.epochs=4").config).training_sites()[0]
    assert judged == [len(site.splits[part])] * 2 * 3


def test_without_sublimation_the_exchange_goes_on(monkeypatch):
    taken = stages_taken(monkeypatch, "prr.det=ER", "prr.recover=0", "prr.sublimate=0")
    assert taken == [RECOVER, EXCHANGE, EXCHANGE, EXCHANGE]


def test_a_bad_deputy_goes_on_recovering(monkeypatch):
    scores = iter([0.6, 1.0] * 3)  # the deputy is judged first
    monkeypatch.setattr("equipoise.methods.prr.macro_f1", lambda confusion: next(scores))
    assert stages_taken(monkeypatch) == [RECOVER] * 4


def test_a_run_reaches_the_last_stage_by_its_own_scores(tmp_path):
    lenient = ("prr.recover=0.0", "prr.sublimate=0.0")  # on so few images scores are noise: any deputy is good enough
    run = run_tiny(tmp_path, "prr", "train.epochs=3", "train.rounds=1", *lenient)
    assert [int(t) for name, t in site_states(run).items() if name.endswith("stage/")] == [3, 3, 3]


def random_batch(size: int = 12) -> Batch:
    draws = torch.Generator().manual_seed(3)
    return Batch(image=torch.randn(size, 3, 16, 16, generator=draws), label=torch.arange(size) % 3)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(1)[range(len(logits)), labels].mean()


def lesson(student: Tensor, teacher: Tensor) -> Tensor:
    taught = teacher.softmax(1).detach()
    return (taught * (taught.log() - student.log_softmax(1))).sum(1).mean()


@pytest.mark.parametrize(("stage", "personal_learns", "deputy_learns"), [(1, 0, 1), (2, 1, 1), (3, 1, 0)])
def test_each_model_gets_the_gradient_of_its_own_loss(stage, personal_learns, deputy_learns):
    client = client_of(*NO_CPA)
    client.begin({"model": client.net.state_dict()}, None)
    with torch.no_grad():
        for index, parameter in enumerate(client.deputy.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    client.stage.fill_(stage)
    client.take_stage()
    client.set_mode(False)
    batch = random_batch()
    parameters = [*client.net.parameters(), *client.deputy.parameters()]
    found = torch.autograd.grad(client.loss(batch, client.outputs(batch)), parameters)
    personal, deputy = client.net(batch.image), client.deputy(batch.image)
    personal_loss = cross_entropy(personal, batch.label) + personal_learns * lesson(personal, deputy)
    deputy_loss = cross_entropy(deputy, batch.label) + deputy_learns * lesson(deputy, personal)
    expected = [
        *torch.autograd.grad(personal_loss, list(client.net.parameters())),
        *torch.autograd.grad(deputy_loss, list(client.deputy.parameters())),
    ]
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_step_that_det_does_not_have_is_refused():
    with pytest.raises(UserError, match="stage=4"):
        next_stage(4, 0.9, 0.9)


def test_only_while_recovering_does_the_personal_model_train_as_if_alone(tmp_path):
    """With nothing learnt from the deputy, the personal model is the one that `local` trains, bit for bit."""
    one_epoch = ("train.epochs=1",)  # a round of one epoch never gets past recovering
    first = run_tiny(tmp_path / "prr", "prr", *one_epoch, *NO_CPA)
    second = run_tiny(tmp_path / "local", "local", *one_epoch)
    personal = {name: t for name, t in site_states(first).items() if "/personal/" in name}
    assert_same_bits(plain_names(personal), plain_names(site_states(second)))


# ---- CPA -----------------------------------------------------------------------------------------


def test_prototypes_are_the_mean_features_of_the_personal_model_and_zero_for_absent_classes():
    settings = ("train.batch_size=512", "augment.name=none", "train.optimiser.lr=1e-9", "prr.det=off")
    setting = setting_of(*settings)
    site = next(i for i, s in enumerate(tiny_federation(setting.config).sites) if (s.class_counts(4) == 0).any())
    place = tiny_federation(setting.config).sites[site]
    message = {"federation_counts": torch.ones(4), "prototypes": torch.zeros(4, 128), "epoch": 0}
    reply = perform("train", message | {"model": setting.new_net().state_dict()}, *settings, site=site).payload
    split = place.splits["train"]
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


def cpa_client(*settings: str) -> PRRClient:
    client = client_of("prr.det=off", "prr.warmup=2", *settings)
    draws = torch.Generator().manual_seed(0)
    sent_prototypes = torch.rand(4, 128, generator=draws)
    sent_prototypes[3] = 0  # nobody has told of class 3
    message = {"model": client.net.state_dict(), "prototypes": sent_prototypes}
    client.begin(message | {"federation_counts": torch.tensor([90.0, 30.0, 6.0, 4.0])}, None)
    client.local_prototypes.copy_(torch.rand(4, 128, generator=draws))
    client.local_prototypes[2] = 0  # the site has not seen class 2
    client.class_counts.copy_(torch.tensor([5.0, 4.0, 0.0, 2.0]))
    return client


def test_prototypes_weigh_after_the_warm_up_and_only_where_both_sides_know_the_class():
    client = cpa_client()
    logits, counts = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), client.federation_counts
    for number, weighed in ((2, ()), (3, (0, 1))):
        client.round = number
        client.align_prototypes()
        for label in range(4):
            labels = torch.full((8,), label)
            plain = conjoint_prototype_aligned(logits, labels, counts)
            cosine = torch.cosine_similarity(client.local_prototypes, client.global_prototypes)[label]
            gamma = 4 / (cosine + 3) if label in weighed else 1.0
            torch.testing.assert_close(client.supervised(logits, labels), gamma * plain, rtol=1e-5, atol=0)


LOGITS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 0, 1, 1, 3, 0, 1, 3])


def test_the_refinement_alone_weighs_cross_entropy():
    client = cpa_client("prr.cpa_global=false")
    client.round = 3
    client.align_prototypes()
    cosine = torch.cosine_similarity(client.local_side, client.global_side)
    expected = (4 / (cosine + 3))[LABELS] * torch.nn.functional.cross_entropy(LOGITS, LABELS, reduction="none")
    torch.testing.assert_close(client.supervised(LOGITS, LABELS), expected.mean(), rtol=1e-5, atol=0)


def test_the_global_objective_alone_knows_no_prototypes():
    client = client_of("prr.cpa_local=false")
    counts = torch.tensor([90.0, 30.0, 6.0, 4.0])
    client.begin({"model": client.net.state_dict(), "federation_counts": counts}, None)
    expected = conjoint_prototype_aligned(LOGITS, LABELS, counts)
    torch.testing.assert_close(client.supervised(LOGITS, LABELS), expected)
    assert not any("prototype" in name for name in client.update())


@pytest.mark.parametrize("name", ["ce", "fedeamc", "focal"])
def test_without_cpa_any_supervised_loss_drives_the_transfer(name):
    client = client_of(*NO_CPA, f"train.loss={name}")
    client.begin({"model": client.net.state_dict()}, None)
    client.class_counts.copy_(torch.tensor([5.0, 4.0, 0.0, 2.0]))
    expected = supervised_loss(name)(LOGITS, LABELS, client.class_counts)
    torch.testing.assert_close(client.supervised(LOGITS, LABELS), expected)


def test_global_prototypes_are_the_mean_of_those_who_have_the_class_and_stay_where_nobody_has_it():
    server = PRRServer(setting_of("prr.spread=none"))
    local = {site: torch.rand(4, 128, generator=torch.Generator().manual_seed(seed)) for seed, site in enumerate("ab")}
    counts = {"a": torch.tensor([5.0, 2.0, 0.0, 1.0]), "b": torch.tensor([5.0, 0.0, 0.0, 3.0])}
    server.state.prototypes = old = torch.full((4, 128), 7.0)
    replies = {s: update(server, 1) | {"prototypes": local[s], "prototype_counts": counts[s]} for s in "ab"}
    answered(server, 1, replies)
    merged = server.state.prototypes
    torch.testing.assert_close(merged[[0, 3]], (local["a"] + local["b"])[[0, 3]] / 2)
    torch.testing.assert_close(merged[1], local["a"][1])
    torch.testing.assert_close(merged[2], old[2])


def test_the_noise_of_global_prototypes_is_the_servers_and_new_in_every_round():
    servers = [PRRServer(setting_of()) for _ in range(2)]
    for server in servers:
        replies = {
            site: update(server, 1)
            | {"prototypes": torch.full((4, 128), float(seed)), "prototype_counts": torch.ones(4)}
            for seed, site in enumerate("ab")
        }
        answered(server, 1, replies)
    first = servers[0].state.prototypes
    assert torch.equal(first, servers[1].state.prototypes)
    assert abs(float(first.mean()) - 0.5) < 0.1 and abs(float(first.std()) - 0.5) < 0.1
    answered(servers[0], 2, replies)
    assert not torch.equal(first, servers[0].state.prototypes)


def test_prototypes_that_travel_every_epoch_change_nothing_as_long_as_they_do_not_weigh(tmp_path):
    """A round in several asks goes on where it stopped: deputy, stage, order of the images and their augmentation."""
    common = ("train.epochs=2", "train.optimiser.momentum=0", "prr.spread=none", "data.phantom.images=80")
    by_round = run_tiny(tmp_path / "round", "prr", *common)
    by_epoch = run_tiny(tmp_path / "epoch", "prr", *common, "prr.prototype_exchange=epoch")
    # All epochs count, whether in one ask or in two.
    trained = [[e["sites"]["site 1"] for e in events(folder, "round")] for folder in (by_round, by_epoch)]
    for one, two in zip(*trained, strict=True):
        assert (one["examples"], one["steps"]) == (two["examples"], two["steps"])
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
    expected, found = all_state(by_round), all_state(by_epoch)
    assert_same_bits(expected, {name: t for name, t in found.items() if "/parked/" not in name})


def test_prototypes_that_travel_every_epoch_are_newer():
    server = PRRServer(setting_of("train.epochs=3", "prr.prototype_exchange=epoch", "prr.spread=none"))
    reply = update(server, 1) | {"prototypes": torch.ones(4, 128), "prototype_counts": torch.ones(4)}
    asks = answered(server, 1, {"a": reply, "b": reply})
    assert [(ask.action, ask.payload["epoch"]) for ask in asks] == [("epoch", 0), ("epoch", 1), ("train", 2)]
    assert ["model" in ask.payload for ask in asks] == [True, False, False]
    assert [float(ask.payload["prototypes"].mean()) for ask in asks] == [0.0, 1.0, 1.0]  # type: ignore[union-attr]


def test_prototypes_as_released_are_ones_with_unit_noise_when_a_round_begins():
    options = ("train.epochs=2", "prr.prototype_exchange=released", "prr.spread=clamped")
    server = PRRServer(setting_of(*options))
    reply = update(server, 1) | {"prototypes": torch.full((4, 128), 7.0), "prototype_counts": torch.ones(4)}
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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("train.rounds=4",), "none of 4 rounds is after prr.warmup = 15"),
        (("prr.warmup=0", "prr.prototype_exchange=released"), "train.epochs = 1 no epoch has prototypes but ones"),
        (("prr.warmup=0", "prr.prototype_exchange=released", "train.epochs=2"), ""),
        (("train.rounds=4", "prr.cpa_local=false"), ""),
        (("prr.warmup=0", "prr.det=ERS"), "train.epochs = 1 personal models learn alone"),
        (("prr.warmup=0", "prr.det=ER"), "train.epochs = 1 personal models learn alone"),
        (("prr.warmup=0", "prr.det=ERS", "train.epochs=2"), "never sublimates: with train.epochs = 2"),
        (("prr.warmup=0", "prr.det=ER", "train.epochs=2"), ""),
        (("prr.warmup=0", "prr.det=ERS", "train.epochs=3"), ""),
    ],
)
def test_a_run_says_what_of_prr_cannot_act(settings, told):
    sentences = PRRClient.in_vain(setting_of("train.epochs=1", "prr.det=E", *settings))
    assert told in "".join(sentences) and len(sentences) == bool(told)


def test_with_one_epoch_a_round_personal_models_learn_alone_as_the_warning_says(tmp_path):
    without_cpa = ("prr.cpa_global=false", "prr.cpa_local=false")
    paired = site_states(run_tiny(tmp_path / "prr", "prr", "train.epochs=1", *without_cpa))
    alone = site_states(run_tiny(tmp_path / "local", "local", "train.epochs=1"))
    personal = {name.replace("/personal/", "/"): value for name, value in paired.items() if "/personal/" in name}
    own = {name.replace("/net/", "/"): value for name, value in alone.items() if "/net/" in name}
    assert personal and personal.keys() == own.keys()
    assert all(torch.equal(personal[name], own[name]) for name in own)


# ---- what leaves a site ----------------------------------------------------------------------------


@pytest.mark.parametrize("det", ["off", "ERS"])
def test_only_the_deputy_leaves_and_no_batch_norm(det):
    setting = setting_of(f"prr.det={det}")
    net = setting.new_net()
    message = {"model": net.state_dict(), "epoch": 0, "federation_counts": torch.ones(4)}
    outcome = perform("train", message | {"prototypes": torch.zeros(4, 128)}, f"prr.det={det}")
    assert set(outcome.payload["model"]) == {*groups(net)["body"], *groups(net)["head"]}  # type: ignore[arg-type]
    assert outcome.kept is not None
    private = {name.removeprefix("norm/") for name in outcome.kept if name.startswith("norm/")}
    assert private == {*groups(net)["norm"], *groups(net)["statistics"]}
    if det != "off":
        personal = outcome.kept["personal/head.weight"]
        assert not torch.equal(personal, outcome.payload["model"]["head.weight"])  # type: ignore[index, call-overload]


def test_whatever_leaves_is_on_the_disclosure_sheet_and_batch_norm_only_with_a_global_view():
    method = get_method("prr")
    plain, with_global = (
        method.client_class(tiny_config("prr", f"prr.global_view={wanted}")) for wanted in ("false", "true")
    )
    assert set(plain.discloses["train"]) == {"model", "examples", "prototypes", "prototype_counts"}
    assert set(with_global.discloses["train"]) - set(plain.discloses["train"]) == {"norm"}
    assert (plain.views, with_global.views) == (("personal",), ("global", "personal"))
    assert (plain, with_global) == method.clients


def test_the_client_is_chosen_by_the_options_of_the_methods_own_table():
    """Under whatever name it runs: `prr` here is only the name of a file."""
    config = tiny_config("prr", "prr.global_view=true")
    other = config.model_copy(update={"method": "prr-again", "methods": {"prr-again": {"global_view": False}}})
    method = get_method("prr")
    assert method.client_class(config) is PRRGlobalClient and method.options_of(config).global_view
    assert method.client_class(other) is PRRClient and not method.options_of(other).global_view


def test_the_global_model_is_the_mean_of_all_deputies_and_costs_the_personal_ones_nothing(tmp_path):
    plain = run_tiny(tmp_path / "plain", "prr", "train.rounds=1")
    (start,) = events(plain, "start")
    assert start["model_bytes"] > 4 * start["parameters"], "the size of the net, though each site has its own message"
    viewed = run_tiny(tmp_path / "viewed", "prr", "train.rounds=1", "prr.global_view=true")
    assert_same_bits(site_states(plain), site_states(viewed))
    means = {
        name.removeprefix("global_model/"): t for name, t in server_state(viewed).items() if "global_model" in name
    }
    norms = [t for name, t in site_states(viewed).items() if name.endswith("norm/body.1.running_var")]
    torch.testing.assert_close(means["body.1.running_var"], torch.stack(norms).mean(0))
    torch.testing.assert_close(means["head.weight"], server_state(viewed)["model/head.weight"])
    assert {event["view"] for event in events(viewed, "final")} == {"global", "personal"}


# ---- settings --------------------------------------------------------------------------------------


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
        PRRServer(setting_of(*settings))


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
