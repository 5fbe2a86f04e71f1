"""Differential privacy: the accountant, gradients of single images, and what leaves a site."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from scipy.stats import norm
from torch.nn import functional as F

from equipoise.components import component_names, get_component
from equipoise.contract.method import Batch, Setting
from equipoise.contract.private_steps import Budget, PrivateSteps, noisy_counts, source
from equipoise.core.errors import UserError
from equipoise.data.augment import build_augmentation
from equipoise.engine.gpu_place import CapturedSteps
from equipoise.engine.private import CERTIFICATE, PrivateSite, budget_of, epsilon_of_releases, epsilon_of_steps
from equipoise.engine.training import SiteData, _make_chunk
from equipoise.methods import get_method
from equipoise.nets import NetConfig, build_net
from harness import all_state, assert_same_bits, events, run_tiny, tiny_config, tiny_federation

PRIVATE = ("privacy.epsilon=8", "net.group_norm=true", "train.batch_size=16", "privacy.counts_noise=4")
pytest.importorskip("opacus")
pytest.importorskip("dp_accounting")


def budget(**changed: float) -> Budget:
    usual = {"images": 50, "rate": 0.2, "steps_of_epoch": 5, "steps": 5, "noise": 0.0, "counts_noise": 1.0}
    return Budget(**usual | {"releases": 1, "scores_noise": 1.0, "epsilon": 1.0, "scores_epsilon": 1.0} | changed)


# ---- the accountant ------------------------------------------------------------------------------------------------


def test_epsilon_of_a_gaussian_is_the_exact_one():
    """Balle and Wang 2018, Theorem 8: delta = Phi(1/2s - es) - exp(e) Phi(-1/2s - es)."""
    for noise in (0.8, 2.0, 9.0):
        epsilon = epsilon_of_releases(noise, 1e-5)
        delta = norm.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * norm.cdf(-0.5 / noise - epsilon * noise)
        assert delta <= 1e-5  # never better than the truth, and close to it
        looser = epsilon * 1.01
        assert norm.cdf(0.5 / noise - looser * noise) < delta * 1.01 or delta > 0.9e-5


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "published"),
    [
        (0.01, 4.0, 10_000, 1.26),  # Abadi et al. 2016, section 5.1: the moments accountant
        (256 / 60_000, 1.1, 14_062, 3.01),  # TensorFlow Privacy's tutorial on MNIST, 60 epochs: Renyi orders
    ],
)
def test_steps_cost_no_more_than_published_and_not_much_less(rate, noise, steps, published):
    epsilon = epsilon_of_steps(noise, 1e-5, rate, steps, counts_noise=1e6)
    assert 0.7 * published < epsilon <= published


def test_a_budget_keeps_to_epsilon_and_wastes_little():
    config = tiny_config("fedavg", *PRIVATE, "train.rounds=3")
    found = budget_of(config, 100)
    assert 0.9 * 8 < found.epsilon <= 8 and 0.9 * 8 < found.scores_epsilon <= 8
    assert found.steps == 3 * round(100 / 16)
    assert found.rate == 16 / 100


# ---- steps ---------------------------------------------------------------------------------------------------------


def private_client(method: str, *settings: str):
    """A client that has received its message, and a batch of its first site."""
    config = tiny_config(method, *PRIVATE, "train.batch_size=8", *settings)
    federation = tiny_federation(config)
    setting = Setting.of(config, get_method(method), federation)
    client = get_method(method).client_class(config)(setting)
    server = get_method(method).server_class(config)(setting)
    data = SiteData(federation.sites[0], setting.task, setting.device)
    message = {}
    conversation = server.round(1, [site.name for site in federation.sites])
    for ask in conversation:
        message = ask.message(federation.sites[0].name)
        break
    client.workplace.begin(message, None)
    client.workplace.site, client.workplace.round = federation.sites[0].name, 1
    client.class_counts.copy_(data.class_counts)
    private = client.workplace.private
    private.budget, private.noise = budget(rate=0.25), torch.Generator().manual_seed(1)
    return client, data["train"], build_augmentation(config.augment, setting.image_size, setting.channels)


MARKED = [name for name in component_names() if get_component(name).image_by_image]


@pytest.mark.parametrize("name", [None, *MARKED])
def test_a_private_gradient_is_the_mean_of_clipped_gradients_of_single_images(name):
    """So for every component that says so of itself: its loss is a mean over images."""
    client, part, augmentation = private_client("fedavg", *(() if name is None else (f"components=['{name}']",)))
    list(client.train({}))  # begins what components need
    client.workplace.set_mode(True)
    (batch,) = _make_chunk(client, part, augmentation, [torch.arange(6)], torch.Generator().manual_seed(0))
    parameters = client.workplace.phases["main"].optimiser.parameters
    private = client.workplace.private
    private.clip = 0.05
    found = private.gradients(client.loss(batch, client.outputs(batch)), parameters)
    expected = [torch.zeros_like(parameter) for parameter in parameters]
    longer = 0
    for index in range(6):
        one = type(batch)(**{key: value[index : index + 1] for key, value in vars(batch).items()})
        gradients = torch.autograd.grad(client.loss(one, client.outputs(one)), parameters, allow_unused=True)
        for parameter in parameters:
            parameter.grad = parameter.grad_sample = None
        norm_ = torch.stack([g.norm() for g in gradients if g is not None]).norm()
        longer += int(norm_ > private.clip)
        for total, g in zip(expected, gradients):
            if g is not None:
                total.add_(g, alpha=min(1.0, private.clip / (float(norm_) + 1e-6)) / (0.25 * 50))
    assert longer, "nothing was clipped"
    for got, wanted in zip(found, expected):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-6)


def test_the_noise_of_a_step_has_its_deviation():
    net = torch.nn.Linear(100, 100)
    private = PrivateSteps([net], clip=2.0)
    private.budget, private.noise = budget(noise=3.0), torch.Generator().manual_seed(0)
    (weight, _) = private.of_no_image(list(net.parameters()))
    assert float(weight.std()) == pytest.approx(3.0 * 2.0 / (0.2 * 50), rel=0.03)


def test_one_image_moves_a_step_by_no_more_than_the_clipping_norm():
    net = torch.nn.Linear(4, 3)
    private = PrivateSteps([net], clip=0.5)
    private.budget, private.noise = budget(), torch.Generator().manual_seed(0)
    images, labels = torch.randn(9, 4) * 100, torch.arange(9) % 3
    with torch.no_grad():
        labels[8] = net(images[8:]).argmin()  # a label that the net denies: a long gradient

    def gradient(count: int) -> torch.Tensor:
        loss = F.cross_entropy(net(images[:count]), labels[:count])
        return torch.cat([g.flatten() for g in private.gradients(loss, list(net.parameters()))]) * 0.2 * 50

    moved = (gradient(9) - gradient(8)).norm()
    assert 0.4 < float(moved) <= 0.5 + 1e-5


def test_each_image_is_drawn_with_its_chance_and_apart_from_all_others():
    private = PrivateSteps([torch.nn.Linear(1, 1)], clip=1.0)
    private.budget = budget(rate=0.3, steps_of_epoch=400)
    drawn = torch.zeros(400, 50)
    for step, chosen in enumerate(private.draw(50, torch.Generator().manual_seed(0))):
        drawn[step, chosen] = 1
    assert float(drawn.mean()) == pytest.approx(0.3, abs=0.01)
    assert float(drawn.sum(1).var()) == pytest.approx(50 * 0.3 * 0.7, rel=0.2)  # sizes of steps are binomial


@pytest.mark.parametrize("key", [3, bytes(range(32))], ids=["seed", "secret"])
def test_noise_of_one_deviation_tells_nothing_of_noise_of_another(key):
    """Two runs with two deviations would otherwise be two equations for the numbers of images."""
    counts = torch.full((200,), 1000.0)
    low, high = (noisy_counts(counts, deviation, key, "A") - counts for deviation in (4.0, 8.0))
    assert float(low.std()) == pytest.approx(4.0, rel=0.25) and float(high.std()) == pytest.approx(8.0, rel=0.25)
    assert abs(float(torch.corrcoef(torch.stack([low, high]))[0, 1])) < 0.3


def test_a_sites_secret_fills_the_whole_state_of_a_generator():
    """Of a seed torch uses 32 bits on the CPU, which a server could all try."""
    made = source("cpu", bytes(range(32)), "noise", 1)
    seeded = torch.Generator().manual_seed(made.initial_seed())
    noise = torch.randn(20_000, generator=made)
    assert not torch.equal(noise[:100], torch.randn(100, generator=seeded))
    assert float(noise.mean()) == pytest.approx(0, abs=0.03) and float(noise.std()) == pytest.approx(1, abs=0.03)
    assert torch.equal(noise, torch.randn(20_000, generator=source("cpu", bytes(range(32)), "noise", 1)))
    others = [source("cpu", bytes(range(32)), "noise", 2), source("cpu", bytes(range(1, 33)), "noise", 1)]
    for other in others:
        assert abs(float((noise * torch.randn(20_000, generator=other)).mean())) < 0.03


def test_at_a_hospital_its_secret_decides_which_images_are_in_a_step():
    """The accountant counts on draws that the server does not know, and the server knows the run's seed."""
    client, part, _ = private_client("fedavg")
    drawn = []
    for key in (bytes(32), bytes(range(32))):
        site = PrivateSite(client.setting)
        site.key, site.occasion = key, "run/message"
        site.begin(client, "site 1", 1, 0)
        drawn.append(client.workplace.private.draw(len(part), torch.Generator().manual_seed(0)))
        client.class_counts.fill_(30.0)
    assert any(not torch.equal(own, other) for own, other in zip(*drawn))


def test_a_site_whose_noisy_numbers_are_all_zero_takes_finite_steps():
    net = torch.nn.Linear(3, 2)
    private = PrivateSteps([net], clip=1.0)
    private.budget, private.noise = budget(images=0, rate=1.0), torch.Generator().manual_seed(0)
    assert all(bool(gradient.isfinite().all()) for gradient in private.of_no_image(list(net.parameters())))


def test_private_steps_are_never_captured():
    """A graph would keep one site's noise and budget."""
    client, _, _ = private_client("fedavg")
    steps = CapturedSteps.__new__(CapturedSteps)
    steps.enabled, steps._graphs, steps._seen = True, {}, {}
    full = [Batch(label=torch.zeros(client.setting.config.train.batch_size))]
    assert not steps._worth_capturing("key", client, full)
    client.workplace.private = None
    assert steps._worth_capturing("key", client, full)


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_is_certified_told_and_repeatable(tmp_path):
    run_tiny(tmp_path / "whole", "fedavg", *PRIVATE)
    certificate = json.loads((tmp_path / "whole" / CERTIFICATE).read_text())
    assert all(site["epsilon"] <= 8 and site["scores_epsilon"] <= 8 for site in certificate["sites"].values())
    (start,) = events(tmp_path / "whole", "start")
    assert start["certificate"] == certificate
    assert all("loss" not in site for event in events(tmp_path / "whole", "round") for site in event["sites"].values())
    run_tiny(tmp_path / "workers", "fedavg", *PRIVATE, "compute.workers=2")
    assert_same_bits(all_state(tmp_path / "whole"), all_state(tmp_path / "workers"))


def test_noise_and_secure_sums_go_together(tmp_path):
    """The loss stays at the sites, and its place in the sum is empty."""
    folder = run_tiny(tmp_path, "fedavg", *PRIVATE, "privacy.secure_sums=true")
    (final,) = [row for row in events(folder, "final") if row["scope"] == "pooled"]
    assert final["n"] and final["metrics"]["balanced_accuracy"] is not None and final["metrics"]["loss"] is None


def test_counts_that_leave_a_site_or_reach_a_loss_carry_noise(tmp_path):
    counts = torch.tensor([40.0, 9.0, 0.0, 3.0])
    noisy = noisy_counts(counts, 5.0, 1, "A")
    assert not torch.equal(noisy, counts) and bool((noisy >= 0).all())
    assert torch.equal(noisy, noisy_counts(counts, 5.0, 1, "A"))
    assert not torch.equal(noisy, noisy_counts(counts, 5.0, 2, "A"))  # another secret
    client, _, _ = private_client("fedavg")
    before = client.class_counts.clone()
    PrivateSite(client.setting).begin(client, "site 1", 1, 0)
    assert not torch.equal(client.class_counts, before)
    assert client.update()["examples"] == int(client.class_counts.sum())


@pytest.mark.parametrize(
    ("method", "settings", "told"),
    [
        ("fedavg", ("net.group_norm=false",), "batch norm"),
        ("fediic", (), "margins"),
        ("fedrep", (), "fedrep"),
        ("fedavg", ("components=['npr']",), "npr"),
        ("fedavg", ("evaluation.metric='balanced_auc'",), "confusion"),
        ("fedavg", ("privacy.counts_noise=0.1",), "counts_noise"),
    ],
)
def test_what_would_break_the_promise_is_refused_by_name(tmp_path, method, settings, told):
    with pytest.raises(UserError, match=told):
        run_tiny(tmp_path / "run", method, *PRIVATE, *settings, known_as=method)
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_finished_run_does_not_go_on_beyond_its_budget(tmp_path):
    run_tiny(tmp_path, "fedavg", *PRIVATE)
    with pytest.raises(UserError, match="reveal more"):
        run_tiny(tmp_path, "fedavg", *PRIVATE, "train.rounds=3", resume=True)


def test_group_norm_replaces_every_batch_norm():
    net = build_net(NetConfig(name="resnet18", group_norm=True), 3)
    kinds = {type(layer).__name__ for layer in net.modules()}
    assert "GroupNorm" in kinds and "BatchNorm2d" not in kinds


def test_the_page_names_the_components_that_keep_images_private():
    page = " ".join((Path(__file__).parents[2] / "docs" / "privacy.md").read_text().split())
    listed = page.partition("loss is a mean over images: ")[2].partition(" and the server steps")[0]
    assert set(re.findall(r"`([\w-]+)`", listed)) == {name for name in MARKED if not name.startswith("server-")}
