"""Per-FedAvg descends the loss after an adaptation step, and takes that step at evaluation; without it it is FedAvg."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from clients import SHORT, changed, copied, new_client, noise_batch
from equipoise.contract.method import Client, Setting
from equipoise.contract.protocol import Train
from equipoise.engine.local_engine import new_slot
from equipoise.engine.slot import Request, exhaust
from equipoise.engine.training import SiteData
from equipoise.methods import get_method
from harness import all_state, assert_same_bits, events, run_tiny, tiny_config, tiny_federation

ALPHA = 0.05


def test_without_adaptation_it_is_fedavg(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    limit = run_tiny(tmp_path / "perfedavg", "perfedavg", *SHORT, "perfedavg.alpha=0")
    assert_same_bits(all_state(plain), all_state(limit))
    finals = [e for e in events(limit, "final") if e["scope"] == "mean"]
    assert finals[0]["metrics"] == finals[1]["metrics"]


def precise_client(variant: str, *more: str) -> Client:
    """A client in float64 whose norm layers use running statistics: its loss is a fixed, smooth function of weights."""
    settings = (f"perfedavg.alpha={ALPHA}", f"perfedavg.variant='{variant}'", "perfedavg.delta=1e-5")
    client = new_client("perfedavg", *settings, *more)
    client.net.double()
    client.workplace.set_mode(True, "eval")
    return client


def batches_of(count: int) -> list:
    """Batches in float64, all different."""
    batches = [noise_batch(seed=seed) for seed in range(count)]
    for batch in batches:
        batch.image = batch.image.double()
    return batches


def meta_gradient(client: Client, batches: list) -> list[torch.Tensor]:
    """What the optimiser is handed in one step."""
    handed: list[torch.Tensor] = []
    phase = client.workplace.phases["main"]
    phase.optimiser.update = handed.extend
    client.step(batches, phase)
    return handed


def loss_at(client: Client, batch):
    """The loss of a batch as a function of weights."""
    names = [name for name, _ in client.net.named_parameters()]
    return lambda *weights: F.cross_entropy(
        functional_call(client.net, dict(zip(names, weights)), (batch.image,)), batch.label
    )


@pytest.mark.parametrize("variant", ["fo", "hf", "exact"])
def test_a_step_follows_the_gradient_through_the_adaptation(variant):
    """(I - alpha H(w; D'')) g(w - alpha g(w; D); D') with an exact Hessian; first order without it."""
    client = precise_client(variant)
    batches = batches_of(client.workplace.batches_per_step)
    weights = tuple(p.detach().clone().requires_grad_() for p in client.net.parameters())
    inner = torch.autograd.grad(loss_at(client, batches[0])(*weights), weights)
    adapted = tuple((w - ALPHA * g).detach().requires_grad_() for w, g in zip(weights, inner))
    expected = torch.autograd.grad(loss_at(client, batches[1])(*adapted), adapted)
    if variant != "fo":
        _, curvature = torch.autograd.functional.hvp(loss_at(client, batches[2]), weights, expected)
        first_order, expected = expected, [g - ALPHA * c for g, c in zip(expected, curvature)]
        assert not torch.allclose(first_order[0], expected[0], rtol=1e-2)
    for found, wanted in zip(meta_gradient(client, batches), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("variant", "batches"), [("fo", 2), ("hf", 3), ("exact", 3)])
def test_every_gradient_has_a_batch_of_its_own_and_weights_come_back(variant, batches):
    client = precise_client(variant)
    assert client.workplace.batches_per_step == batches
    before = copied(client.net.state_dict())
    gradients = [meta_gradient(client, batches_of(batches))]
    assert not changed(before, client.net.state_dict())
    for position in range(batches):
        other = batches_of(batches)
        other[position].image = -other[position].image
        gradients.append(meta_gradient(client, other))
    assert len({g[0].sum().item() for g in gradients}) == batches + 1


def test_differences_are_taken_without_dropout_and_in_full_precision(monkeypatch):
    """Noise of size s in a gradient would be s / delta in the product: here a hundred thousand times as much."""
    client = precise_client("hf", "net.dropout=0.5")
    batch, other = batches_of(2)
    parameters = list(client.net.parameters())
    direction = client.gradients(other, parameters)[1]
    entered: list[str] = []
    monkeypatch.setattr(Setting, "autocasts", True)
    monkeypatch.setattr(Setting, "precision", lambda setting: entered.append("bf16") or nullcontext())
    found = client.gradient_difference(batch, parameters, direction)
    assert entered == [] and client.net.dropout.training
    monkeypatch.setattr(Setting, "autocasts", False)
    client.net.dropout.eval()
    for one, exact in zip(found, client.hessian_product(batch, parameters, direction), strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", ["hf", "exact"])
def test_norm_layers_stay_in_the_mode_of_the_phase_in_every_pass(variant):
    client = precise_client(variant)
    client.workplace.set_mode(True)
    before = client.net.body[1].num_batches_tracked.item()
    meta_gradient(client, batches_of(3))
    assert client.net.body[1].num_batches_tracked.item() - before == {"hf": 4, "exact": 3}[variant]


def test_alpha_does_not_follow_the_schedule_of_the_learning_rate(monkeypatch):
    """In round 3 of a schedule that halves each round, beta is a quarter and alpha what it was."""
    settings = ("train.schedule.name='step'", "train.schedule.every=1", "train.schedule.gamma=0.5")
    config = tiny_config("perfedavg", "perfedavg.alpha=0.3", *settings)
    method, federation = get_method("perfedavg"), tiny_federation(config)
    setting = Setting.of(config, method, federation)
    slot, site = new_slot(method, setting), federation.sites[0]
    rates: dict[str, float] = {}
    monkeypatch.setattr(
        type(slot.client),
        "step",
        lambda client, batches, phase: (
            rates.update({name: p.optimiser.lr.item() for name, p in client.workplace.phases.items()})
            or torch.zeros(())
        ),
    )
    data = SiteData(site, setting.task, setting.device)
    exhaust(slot.perform(Request("train", site.name, 3), {"model": setting.new_net().state_dict()}, None, data))
    assert rates == pytest.approx({"main": config.train.optimiser.lr / 4, "adapt": 0.3})


def test_a_site_adapts_by_one_plain_gradient_step():
    client = new_client("perfedavg", f"perfedavg.alpha={ALPHA}", "train.optimiser.weight_decay=0.1")
    assert list(client.adapt()) == [Train(steps=1, phase="adapt")]
    client.workplace.set_mode(True, "eval")
    batch, weights = noise_batch(), list(client.net.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(client.net(batch.image), batch.label), weights)
    expected = [w.detach() - ALPHA * g for w, g in zip(weights, gradients)]
    client.step([batch, noise_batch(seed=1), noise_batch(seed=2)], client.workplace.phases["adapt"])
    for found, wanted in zip(weights, expected):
        torch.testing.assert_close(found.detach(), wanted)


def test_personal_models_are_the_adapted_ones_and_nothing_of_them_is_kept(tmp_path):
    settings = ("perfedavg.alpha=0.5", "perfedavg.variant='fo'", "train.rounds=1")
    once = run_tiny(tmp_path / "once", "perfedavg", *SHORT, *settings)
    more = run_tiny(tmp_path / "more", "perfedavg", *SHORT, *settings, "perfedavg.adapt_steps=3")
    assert_same_bits(all_state(once), all_state(more))
    finals = [{e["view"]: e["metrics"] for e in events(f, "final") if e["scope"] == "pooled"} for f in (once, more)]
    assert finals[0]["global"] == finals[1]["global"]
    assert finals[0]["personal"] != finals[0]["global"] and finals[0]["personal"] != finals[1]["personal"]
