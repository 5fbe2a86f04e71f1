"""FedIIC's margins: how hard classes are, which images tell it, and how margins change the loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composed import client_of, noise_of, server_of, setting_of
from equipoise.contract.protocol import Replies, Reply
from equipoise.data import load_federation
from equipoise.data.augment import build_augmentation
from equipoise.engine.training import SiteData, scan
from equipoise.methods import get_method
from harness import run_tiny, server_state, tiny_federation

NO_CONTRAST = ("fediic.k1=0", "fediic.k2=0")


def fresh_client(*settings: str) -> Any:
    """A client of FedIIC without contrasts, with three classes of four present."""
    client = client_of(setting_of("fediic", *NO_CONTRAST, *settings))
    client.class_counts.copy_(torch.tensor([6.0, 3.0, 1.0, 0.0]))
    return client


# ---- difficulty --------------------------------------------------------------------------------------


def test_difficulty_is_the_mean_loss_of_each_class_over_all_sites(tmp_path):
    folder = run_tiny(tmp_path, "fediic", "fediic.projection=32", "train.rounds=1")
    setting = setting_of("fediic", "train.rounds=1")
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
    setting = setting_of("fediic", "fediic.difficulty_view='augmented'", *NO_CONTRAST)
    client = client_of(setting)
    client.workplace.begin({"model": setting.new_net().state_dict()}, None)
    augmentation = build_augmentation(setting.config.augment, setting.image_size, setting.channels)
    part = SiteData(tiny_federation(setting.config).sites[0], setting.task, setting.device)["train"]
    surveyed = scan(client, part, augmentation, next(client.survey({})))["class_loss"].sum()
    pixels, _ = part.read(torch.arange(len(part)))

    def summed_loss(images):
        return F.cross_entropy(client.net(images), part.host_labels, reduction="sum")

    torch.testing.assert_close(surveyed, summed_loss(augmentation.view(0)(pixels, client.random("scan"))))
    assert not torch.equal(surveyed, summed_loss(augmentation.plain(pixels)))


def test_a_cached_difficulty_view_is_the_same_training_view_in_every_round():
    setting = setting_of("fediic", "fediic.difficulty_view='cached'", *NO_CONTRAST)
    client = client_of(setting)
    client.workplace.begin({"model": setting.new_net().state_dict()}, None)
    augmentation = build_augmentation(setting.config.augment, setting.image_size, setting.channels)
    data = [SiteData(site, setting.task, setting.device) for site in tiny_federation(setting.config).sites]

    def surveyed(number, view, site="site 1"):
        client.workplace.round, client.workplace.site = number, site
        survey = dataclasses.replace(next(client.survey({})), view=view)
        return scan(client, data[0]["train"], augmentation, survey)["class_loss"]

    assert next(client.survey({})).view == "cached"
    assert torch.equal(surveyed(1, "cached"), surveyed(7, "cached"))
    assert not torch.equal(surveyed(1, "cached"), surveyed(1, "cached", "site 2")), "each site draws its own"
    assert not torch.equal(surveyed(1, "augmented"), surveyed(7, "augmented"))
    assert not torch.equal(surveyed(1, "cached"), surveyed(1, "plain"))


@pytest.mark.parametrize(("method", "settings"), [("fediic", ()), ("fedprox", ("components=['margins']",))])
def test_a_site_that_did_not_answer_the_survey_is_not_asked_to_train(method, settings):
    conversation = server_of(setting_of(method, *settings)).round(1, ("a", "b"))
    survey = next(conversation)
    assert survey.sites == ("a", "b") and survey.payload.keys() == {"model"}
    answer = {"class_loss": torch.ones(4), "class_count": torch.ones(4)}
    assert conversation.send(Replies([Reply("b", answer)])).sites == ("b",)


def test_where_all_classes_are_equally_hard_nobody_is_asked():
    setting = setting_of("fedavg", "components=['margins']", "margins.difficulty=none")
    ask = next(server_of(setting).round(1, ("a", "b")))
    client = client_of(setting)
    assert ask.action == "train" and ask.payload.keys() == {"model"}
    assert client.discloses == get_method("fedavg").client.discloses


# ---- the loss ------------------------------------------------------------------------------------------


def test_margins_of_equal_counts_and_losses_change_nothing():
    client = fresh_client()
    client.class_counts.fill_(7.0)
    client.sides["margins"].difficulty.fill_(1.3)
    next(client.train({}))
    batch = noise_of(8)
    out = client.outputs(batch)
    torch.testing.assert_close(client.loss(batch, out), F.cross_entropy(out.logits, batch.label))


def test_a_class_that_a_site_lacks_gets_no_gradient_from_the_margins():
    client = fresh_client()
    client.sides["margins"].difficulty.fill_(1.0)
    next(client.train({}))
    batch = noise_of(6)
    (gradient,) = torch.autograd.grad(client.loss(batch, client.outputs(batch)), client.net.head.weight)
    assert not gradient[3].any() and gradient[:3].any(dim=1).all()
