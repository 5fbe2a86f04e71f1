"""The optimisers: steps as torch has them; clipping by one norm for each model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clients import new_client
from equipoise.contract.config import OptimiserConfig
from equipoise.contract.optimiser import Optimiser, _laid_out_like, clip_by_norm

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
