"""The optimisers: steps as torch has them; clipping by one norm for each model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clients import new_client, noise_batch
from equipoise.contract.optimiser import Optimiser, _laid_out_like, clip_by_norm
from equipoise.contract.tables import OptimiserConfig

CLIP = 1.0


def moved(models: list[str] | None, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """How far parameters at 0 go in one plain step at rate 1."""
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    config = OptimiserConfig(lr=1.0, momentum=0, clip=CLIP)
    optimiser = Optimiser([(str(i), p) for i, p in enumerate(parameters)], config, models)
    optimiser.lr.fill_(1.0)
    optimiser.update(gradients)
    return [-parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(
    ("name", "torchs"),
    [
        ("sgd", lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.3)),
        ("adam", lambda parameters: torch.optim.Adam(parameters, 0.1, weight_decay=0.3)),
        ("adamw", lambda parameters: torch.optim.AdamW(parameters, 0.1, weight_decay=0.3)),
    ],
)
def test_steps_are_torchs(name, torchs):
    torch.manual_seed(0)
    ours, others = ([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.full((4,), -2.0))] for _ in range(2))
    optimiser = Optimiser([("a", ours[0]), ("b", ours[1])], OptimiserConfig(name=name, lr=0.1, weight_decay=0.3))
    optimiser.lr.fill_(0.1)
    usual = torchs(others)
    for _ in range(5):
        gradients = [torch.randn_like(parameter) for parameter in ours]
        optimiser.update(gradients)
        for parameter, gradient in zip(others, gradients):
            parameter.grad = gradient
        usual.step()
    for one, other in zip(ours, others):
        torch.testing.assert_close(one, other)


def test_adam_makes_weight_decay_as_long_as_any_gradient_and_adamw_does_not():
    def after_a_step(name):
        parameter = nn.Parameter(torch.ones(2))
        optimiser = Optimiser([("a", parameter)], OptimiserConfig(name=name, weight_decay=5e-4))
        optimiser.lr.fill_(0.01)
        optimiser.update([torch.zeros(2)])
        return parameter.detach()

    torch.testing.assert_close(after_a_step("adam"), torch.full((2,), 1 - 0.01), rtol=1e-4, atol=0)
    torch.testing.assert_close(after_a_step("adamw"), torch.full((2,), 1 - 0.01 * 5e-4))


def one_step(name: str, spared: bool, gradient: torch.Tensor) -> torch.Tensor:
    """A head (3, 2) of ones after a step with decay, at a site without images of the last class."""
    head, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
    config = OptimiserConfig(name=name, lr=0.1, momentum=0.9, weight_decay=0.3, decay_absent=not spared)
    counts = torch.tensor([4.0, 1.0, 0.0])
    optimiser = Optimiser([("head.weight", head), ("body", other)], config, rows=[0], class_counts=counts)
    optimiser.lr.fill_(0.1)
    for _ in range(3):
        optimiser.update([gradient, torch.ones(2)])
    return torch.cat([head.detach(), other.detach()[None]])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_decay_spares_the_rows_of_absent_classes_and_nothing_else(name):
    gradient = torch.tensor([[0.1, -0.2], [0.3, 0.1], [0.0, 0.0]])
    usual, spared = (one_step(name, kind, gradient) for kind in (False, True))
    assert torch.equal(spared[2], torch.ones(2)) and not torch.equal(usual[2], torch.ones(2))
    torch.testing.assert_close(spared[[0, 1, 3]], usual[[0, 1, 3]])


@pytest.mark.parametrize("method", ["fedavg", "fedrod", "prr", "fediic", "fednpr-per"])
def test_the_rows_of_classes_are_those_of_linear_heads(method):
    optimiser = new_client(method).workplace.phases["main"].optimiser
    named = {name for place, name in enumerate(optimiser.names) if place in optimiser.rows}
    assert named == {name for name in optimiser.names if "head." in name}
    assert all(optimiser.parameters[place].shape[0] == 4 for place in optimiser.rows)


@pytest.mark.parametrize("method", ["fedbm", "fedetf", "fednh"])
def test_a_head_whose_outputs_are_not_classes_has_no_such_rows(method):
    assert not new_client(method).workplace.phases["main"].optimiser.rows


def test_in_a_run_absent_classes_keep_the_rows_that_a_site_received():
    settings = ("train.loss='balanced_softmax'", "train.optimiser.name='adam'", "train.optimiser.weight_decay=0.01")
    moved = {}
    for spared in (False, True):
        client = new_client("fedavg", *settings, f"train.optimiser.decay_absent={str(not spared).lower()}")
        before = client.net.head.weight.detach().clone()
        for _ in range(3):
            client.step([noise_batch()], client.workplace.phases["main"])
        moved[spared] = (client.net.head.weight.detach() - before).abs().amax(1)
    assert moved[True][3] < 0.1 * moved[False][3] and moved[True][:3].min() > moved[True][3]


def test_each_model_is_clipped_as_if_the_others_were_not_there():
    large, small = [torch.full((2,), 3.0), torch.full((3,), 4.0)], [torch.full((2,), 0.1), torch.full((1,), 0.2)]
    found = moved(["a", "b", "a", "b"], [large[0], small[0], large[1], small[1]])
    expected = clip_by_norm(large, CLIP)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[1])
    assert torch.equal(found[1], small[0]) and torch.equal(found[3], small[1])


def test_one_model_has_one_norm():
    found = moved(None, [torch.full((2,), 3.0), torch.full((3,), 4.0)])
    assert torch.cat(found).norm().item() == pytest.approx(CLIP, abs=1e-5)


@pytest.mark.parametrize(
    ("method", "models"),
    [
        ("fedavg", {""}),
        ("fediic", {""}),  # net and projector are one model: one loss trains both
        ("fml", {"net", "personal"}),
        ("apfl", {"net", "personal"}),
        ("fedrod", {"net", "personal_head"}),
        ("prr", {"personal", "deputy"}),
    ],
)
def test_methods_of_two_models_say_so(method, models):
    assert set(new_client(method).workplace.phases["main"].optimiser.models) == models


def test_a_gradient_of_one_pixel_kernels_is_not_copied_however_its_single_entries_lie():
    parameter = nn.Parameter(torch.zeros(4, 3, 1, 1).contiguous(memory_format=torch.channels_last))
    gradient = torch.randn(4, 3).reshape(4, 3, 1, 1)
    laid_out = _laid_out_like(gradient, parameter)
    assert laid_out.stride() == parameter.stride() and laid_out.data_ptr() == gradient.data_ptr()
    assert torch.equal(laid_out, gradient)
    turned = torch.randn(3, 4, 1, 1).transpose(0, 1)
    copied = _laid_out_like(turned, parameter)
    assert copied.stride() == parameter.stride() and torch.equal(copied, turned)
