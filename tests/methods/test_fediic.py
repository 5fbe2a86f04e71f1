"""FedIIC does what its paper says, and without its parts it is FedAvg bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from equipoise.contract.method import Batch, Setting
from equipoise.contract.protocol import Ask, Replies, Reply
from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.data.augment import build_augmentation
from equipoise.engine.runs import make_config
from equipoise.engine.training import SiteData, scan
from equipoise.methods.fediic import METHOD, FedIICClient, FedIICServer
from harness import all_state, assert_same_bits, events, run_tiny, server_state, tiny_config, tiny_federation

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")
SMALL = ("fediic.projection=32",)
NO_CONTRAST = ("fediic.k1=0", "fediic.k2=0")


def setting_of(*settings: str) -> Setting:
    """The setting of a tiny FedIIC run."""
    config = tiny_config("fediic", *SMALL, *settings)
    return Setting.of(config, METHOD, tiny_federation(config))


def fresh_client(*settings: str) -> FedIICClient:
    """A client whose tensors hold their first values, with three classes of four present."""
    client = FedIICClient(setting_of(*settings))
    client.class_counts.copy_(torch.tensor([6.0, 3.0, 1.0, 0.0]))
    return client


def batch_of(size: int, views: int = 2) -> Batch:
    """A batch of noise with labels 0, 1, 2, 0, 1, ..."""
    generator = torch.Generator().manual_seed(size)
    images = {name: torch.randn(size, 3, 16, 16, generator=generator) for name in ("image", "second")[:views]}
    return Batch(label=torch.arange(size) % 3, **images)


def actions_asked(server: FedIICServer, sites: tuple[str, ...] = ("a", "b")) -> list[Ask]:
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


def test_margins_of_equal_counts_and_losses_change_nothing():
    client = fresh_client(*NO_CONTRAST)
    client.class_counts.fill_(7.0)
    client.difficulty.fill_(1.3)
    next(client.train({}))
    batch = batch_of(8, views=1)
    out = client.outputs(batch)
    torch.testing.assert_close(client.loss(batch, out), F.cross_entropy(out.logits, batch.label))


def test_a_kept_second_view_changes_batch_norm_alone(tmp_path):
    """With `two_views = always` the second view is forwarded, but no loss reads it."""
    once = run_tiny(tmp_path / "one", "fediic", *NO_CONTRAST)
    twice = run_tiny(tmp_path / "two", "fediic", *NO_CONTRAST, "fediic.two_views='always'")
    one, two = server_state(once), server_state(twice)
    assert one.keys() == two.keys()
    assert not torch.equal(one["model/body.1.running_var"], two["model/body.1.running_var"])
    client = fresh_client(*NO_CONTRAST, "fediic.two_views='always'", "fediic.dala=false")
    client.set_mode(False)
    batch = batch_of(4)
    expected = F.cross_entropy(client.net(batch.image), batch.label)
    torch.testing.assert_close(client.loss(batch, client.outputs(batch)), expected)


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
    asks = actions_asked(FedIICServer(setting_of(*settings)))
    assert [ask.action for ask in asks] == asked
    assert asks[-1].payload.keys() == sent


def test_a_site_that_did_not_answer_the_survey_is_not_asked_to_train():
    server = FedIICServer(setting_of())
    conversation = server.round(1, ("a", "b"))
    next(conversation)
    answer = {"class_loss": torch.ones(4), "class_count": torch.ones(4)}
    assert conversation.send(Replies([Reply("b", answer)])).sites == ("b",)


@pytest.mark.parametrize(
    ("settings", "views"),
    [
        ((), ["image", "second"]),
        (("fediic.k2=0",), ["image", "second"]),
        (("fediic.k1=0",), ["image", "second"]),
        (NO_CONTRAST, ["image"]),
        ((*NO_CONTRAST, "fediic.two_views='always'"), ["image", "second"]),
    ],
    ids=["both", "intra", "inter", "none", "kept"],
)
def test_a_second_view_is_drawn_only_where_it_is_wanted(tmp_path, monkeypatch, settings, views):
    seen: set[str] = set()
    forward = FedIICClient.forward

    def spy(client, batch):
        if client.net.training:
            seen.update({"image", "second"} & vars(batch).keys())
        return forward(client, batch)

    monkeypatch.setattr(FedIICClient, "forward", spy)
    run_tiny(tmp_path, "fediic", *SMALL, "train.rounds=1", *settings)
    assert sorted(seen) == views


# ---- difficulty ----------------------------------------------------------------------------------------


def test_difficulty_is_the_mean_loss_of_each_class_over_all_sites(tmp_path):
    folder = run_tiny(tmp_path, "fediic", *SMALL, "train.rounds=1")
    setting = setting_of("train.rounds=1")
    federation = load_federation(setting.config.data, setting.config.seed)
    splits = [site.splits["train"] for site in federation.training_sites()]
    pixels = torch.cat([split.images(torch.arange(len(split))) for split in splits])
    labels = torch.cat([torch.from_numpy(split.labels) for split in splits])
    plain = build_augmentation(setting.config.augment, setting.image_size, setting.channels).plain
    with torch.no_grad():
        losses = F.cross_entropy(setting.new_net().eval()(plain(pixels)), labels, reduction="none")
    expected = torch.stack([losses[labels == label].mean() for label in range(setting.num_classes)])
    torch.testing.assert_close(server_state(folder)["difficulty"], expected, rtol=1e-4, atol=0)


def test_difficulty_may_be_measured_on_a_training_view():
    setting = setting_of("fediic.difficulty_view='augmented'", *NO_CONTRAST)
    client = FedIICClient(setting)
    client.begin({"model": setting.new_net().state_dict()}, None)
    augmentation = build_augmentation(setting.config.augment, setting.image_size, setting.channels)
    part = SiteData(tiny_federation(setting.config).sites[0], setting.num_classes, setting.device)["train"]
    surveyed = scan(client, part, augmentation, next(client.survey({})))["class_loss"].sum()
    pixels, _ = part.read(torch.arange(len(part)))

    def summed_loss(images):
        return F.cross_entropy(client.net(images), part.labels, reduction="sum")

    torch.testing.assert_close(surveyed, summed_loss(augmentation.view(0)(pixels, client.random("scan"))))
    assert not torch.equal(surveyed, summed_loss(augmentation.plain(pixels)))


def test_a_cached_difficulty_view_is_the_same_training_view_in_every_round():
    setting = setting_of("fediic.difficulty_view='cached'", *NO_CONTRAST)
    client = FedIICClient(setting)
    client.begin({"model": setting.new_net().state_dict()}, None)
    augmentation = build_augmentation(setting.config.augment, setting.image_size, setting.channels)
    data = [SiteData(site, setting.num_classes, setting.device) for site in tiny_federation(setting.config).sites]

    def surveyed(number, view, site="site 1"):
        client.round, client.site = number, site
        survey = dataclasses.replace(next(client.survey({})), view=view)
        return scan(client, data[0]["train"], augmentation, survey)["class_loss"]

    assert next(client.survey({})).view == "cached"
    assert torch.equal(surveyed(1, "cached"), surveyed(7, "cached"))
    assert not torch.equal(surveyed(1, "cached"), surveyed(1, "cached", "site 2")), "each site draws its own"
    assert not torch.equal(surveyed(1, "augmented"), surveyed(7, "augmented"))
    assert not torch.equal(surveyed(1, "cached"), surveyed(1, "plain"))


# ---- prototypes ----------------------------------------------------------------------------------------


def largest_cosine(prototypes: torch.Tensor) -> float:
    """The largest cosine between two different prototypes (C, D) of unit norm."""
    torch.testing.assert_close(prototypes.norm(dim=1), torch.ones(len(prototypes)))
    cosines = prototypes @ prototypes.T
    return float(cosines.fill_diagonal_(-1.0).max())


def test_prototypes_become_orthogonal_in_a_run(tmp_path):
    apart = server_state(run_tiny(tmp_path / "apart", "fediic", *ADAM))["prototypes"]
    raw = server_state(run_tiny(tmp_path / "raw", "fediic", "fediic.orthogonalise=false", *ADAM))["prototypes"]
    assert abs(largest_cosine(apart)) < 0.02
    assert largest_cosine(raw) > 0.5


def test_prototypes_with_the_diagonal_left_out_form_a_simplex(tmp_path):
    folder = run_tiny(tmp_path, "fediic", "fediic.diagonal='exclude'", *ADAM)
    assert largest_cosine(server_state(folder)["prototypes"]) == pytest.approx(-1 / 3, abs=0.05)


@pytest.mark.parametrize("relu", [False, True])
def test_prototypes_are_the_projected_weights_of_the_classifier(relu):
    server = FedIICServer(setting_of("fediic.orthogonalise=false", f"fediic.projector_relu={str(relu).lower()}"))
    weights, projector = server.state.model["head.weight"], server.state.projector
    hidden = weights @ projector["hidden.weight"].T + projector["hidden.bias"]
    hidden = hidden.clamp(min=0) if relu else hidden
    expected = hidden @ projector["output.weight"].T + projector["output.bias"]
    torch.testing.assert_close(server.prototypes(), expected / expected.norm(dim=1, keepdim=True))


def test_server_and_sites_start_from_the_same_projector():
    setting = setting_of()
    assert_same_bits(FedIICServer(setting).state.projector, FedIICClient(setting).projector.state_dict())


# ---- the step --------------------------------------------------------------------------------------------


def test_both_views_pass_through_the_net_at_once_and_keep_their_places():
    client, batch = fresh_client(), batch_of(5)
    client.set_mode(True)
    client.outputs(batch)
    assert client.net.body[1].num_batches_tracked == 1
    client.set_mode(False)
    out = client.outputs(batch)
    for place, images in enumerate((batch.image, batch.second)):
        expected = client.projector(client.net.features(images))
        torch.testing.assert_close(out.projections[:, place], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.logits, client.net(batch.image))


def test_the_loss_is_the_weighted_sum_of_its_three_parts():
    """Parts measured one at a time, with the others off, add up to the whole (Eq. 7)."""
    batch = batch_of(6)
    prototypes = F.normalize(torch.randn(4, 32, generator=torch.Generator().manual_seed(1)), dim=1)

    def measured(*settings):
        client = fresh_client(*settings)
        if client.options.dala:
            client.difficulty.copy_(torch.tensor([0.5, 1.0, 2.0, 0.0]))
            next(client.train({}))
        if client.options.k2:
            client.prototypes.copy_(prototypes)
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
    client.difficulty.copy_(torch.tensor([0.5, 1.0, 0.0, 0.0]))
    client.prototypes.copy_(F.normalize(torch.ones(4, 32), dim=1))
    next(client.train({}))
    assert client.margins[3] == -torch.inf
    batch = batch_of(size)
    client.set_mode(True, "eval")
    gradients = torch.autograd.grad(
        client.loss(batch, client.outputs(batch)), client.phases["main"].optimiser.parameters, allow_unused=True
    )
    assert all(g is None or g.isfinite().all() for g in gradients)


def test_a_class_that_a_site_lacks_gets_no_gradient_from_the_margins():
    client = fresh_client(*NO_CONTRAST)
    client.difficulty.fill_(1.0)
    next(client.train({}))
    batch = batch_of(6, views=1)
    (gradient,) = torch.autograd.grad(client.loss(batch, client.outputs(batch)), client.net.head.weight)
    assert not gradient[3].any() and gradient[:3].any(dim=1).all()


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
