"""How quick layers take the place of torch's: once kernels are proven, and not otherwise."""

import pytest
import torch
from torch import nn

from equipoise.nets import NetConfig, build_net
from equipoise.nets.kernels import proof, quicken
from equipoise.nets.kernels.convolution import QuickNet
from equipoise.nets.kernels.proof import Case, Kernels, assert_equal
from equipoise.nets.kernels.replacement import Replacement, exactly, layers_of_one_place


class QuickTanh(nn.Tanh):
    """Stands for a layer with kernels."""


def kernels(cases=(), file="proof"):
    """Kernels of a file that needs no Triton."""
    return Kernels(file, lambda module, device: cases, "by torch")


@pytest.fixture
def gpu(monkeypatch):
    """A machine that claims to have a GPU, so that kernels must prove themselves."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


def case(ours, torchs=torch.square, **options):
    return Case(ours, torchs, [torch.tensor([1.0, -2.0, 3.0])], **options)


def test_kernels_that_agree_with_torch_are_used(gpu, caplog):
    proven = kernels([case(lambda x: x * x)])
    net = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Tanh()), nn.ReLU())
    Replacement(QuickTanh, exactly(nn.Tanh), proven)(net)
    assert [type(layer) for layer in net.modules() if not isinstance(layer, nn.Sequential)] == [
        QuickTanh, QuickTanh, nn.ReLU
    ]  # fmt: skip
    assert proven.module is proof and not caplog.messages


def test_kernels_that_fail_are_not_used_and_a_warning_says_so_once(gpu, caplog):
    def fail(module, device):
        raise RuntimeError("no such instruction\nand much more")

    failing = Kernels("proof", fail, "by torch")
    layer = nn.Tanh()
    for _ in range(2):
        Replacement(QuickTanh, exactly(nn.Tanh), failing)(layer)
    assert type(layer) is nn.Tanh
    assert caplog.messages == ["by torch (RuntimeError: no such instruction)"]


def test_kernels_that_cannot_be_loaded_are_not_used(caplog):
    assert not kernels(file="no_such_kernels").usable()
    assert caplog.messages[0].startswith("by torch (ModuleNotFoundError")


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        (lambda x: x * x * 1.03, {}),
        (lambda x: x.detach() ** 2 + 0 * x, {}),
        (lambda x: (x * x, x), {"torchs": lambda x: (x * x, x * 1.03)}),
        (lambda x: x * x * 1.01, {"compare": assert_equal}),
        (lambda x: x * x * torch.tensor([1, 1, torch.nan]), {}),
    ],
    ids=["value", "gradient", "other result", "rounding where none is allowed", "NaN"],
)
def test_each_difference_from_torch_is_found(gpu, caplog, ours, options):
    assert not kernels([case(torch.square), case(ours, **options)]).usable()
    assert "AssertionError" in caplog.messages[0]


def test_rounding_is_no_difference(gpu):
    assert kernels([case(lambda x: (x * x).bfloat16())]).usable()


def test_kernels_are_not_asked_for_where_a_net_has_no_such_layer(caplog):
    Replacement(QuickTanh, exactly(nn.Tanh), kernels(file="no_such_kernels"))(nn.Sequential(nn.ReLU()))
    assert not caplog.messages


def test_a_net_is_settled_after_a_replacement_alone():
    settled = []
    replace = Replacement(QuickTanh, exactly(nn.Tanh), settle=settled.append)
    net = nn.Sequential(nn.Tanh())
    replace(nn.ReLU())
    replace(net)
    assert settled == [net]


def test_only_layers_that_belong_to_one_module_are_of_one_place():
    shared, alone = nn.ReLU(), nn.ReLU()
    inner = nn.Sequential(shared, alone)
    net = nn.Sequential(inner, shared)
    assert layers_of_one_place(net) == [(net, inner), (inner, alone)]


def test_a_quick_net_is_still_the_net_it_was():
    plain, quick = (build_net(NetConfig(name="small-cnn"), 3) for _ in range(2))
    quick.load_state_dict(plain.state_dict())
    quicken(quick)
    assert type(quick) is QuickNet and list(quick.state_dict()) == list(plain.state_dict())
    images = torch.randn(4, 3, 16, 16)
    assert torch.equal(quick(images), plain(images))
