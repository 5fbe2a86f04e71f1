"""Nets for segmentation: logits of the size of the images, heads that are 1x1 convolutions, nets from outside."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.core.errors import UserError
from equipoise.nets import NetConfig, build_net, class_rows, groups
from equipoise.nets.architectures import dense_names
from equipoise.nets.dense import enlarged


def net_of(name, classes=3, **more):
    torch.manual_seed(0)
    return build_net(NetConfig(name=name, **more), classes, 3, dense=True)


@pytest.mark.parametrize("name", dense_names())
def test_logits_have_the_size_of_the_images_and_come_of_the_features(name):
    net, images = net_of(name).eval(), torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        features = net.features(images)
        assert features.shape[1] == net.feature_size
        assert net(images).shape == (2, 3, 32, 48)
        assert torch.equal(net.classify(features), net(images))


@pytest.mark.parametrize("name", dense_names())
def test_the_head_is_a_1x1_convolution_with_a_row_for_each_class(name):
    net = net_of(name)
    assert groups(net)["head"] == ("head.weight", "head.bias")
    assert class_rows(net, 3) == ("head.weight", "head.bias") and not class_rows(net, 4)
    assert net.another_head().weight.shape == net.head.weight.shape


@pytest.mark.parametrize("name", dense_names())
def test_a_step_on_made_up_slices_lowers_the_loss(name):
    net = net_of(name)
    images, masks = torch.randn(2, 3, 32, 32), torch.randint(3, (2, 32, 32))
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(net(images), masks)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert losses[-1] < losses[0]


def test_deeplab_sees_far_and_keeps_an_eighth_of_the_size():
    net = net_of("deeplab-resnet18").eval()
    images = torch.randn(1, 3, 256, 256, requires_grad=True)
    features = net.features(images)
    assert features.shape == (1, 512, 32, 32)
    features[0, :, 16, 16].sum().backward()
    seen = images.grad.abs().sum((0, 1)).nonzero()
    assert (seen.max(0).values - seen.min(0).values).min() > 200


def test_deeplab_takes_the_published_weights_of_resnet18(tmp_path):
    net = net_of("deeplab-resnet18")
    published = {
        key.removeprefix("body."): value + 1
        for key, value in net.state_dict().items()
        if key.startswith("body.") and ".branches." not in key
    }
    torch.save(published | {"fc.weight": torch.zeros(1000, 512)}, tmp_path / "resnet18.pth")
    loaded = net_of("deeplab-resnet18", weights=str(tmp_path / "resnet18.pth")).state_dict()
    for key, value in net.state_dict().items():
        moved = 0 if key.startswith("head.") or ".branches." in key else 1
        torch.testing.assert_close(loaded[key], value + moved)


@pytest.mark.parametrize("factor", [1, 2, 8])
def test_maps_grow_as_by_torchs_bilinear_interpolation(factor):
    maps = torch.randn(2, 3, 5, 7)
    grown = F.interpolate(maps, scale_factor=factor, mode="bilinear", align_corners=False)
    torch.testing.assert_close(enlarged(maps, factor), grown)


@pytest.mark.parametrize(("name", "dense"), [("small-cnn", True), ("small-unet", False)])
def test_a_net_of_the_other_task_is_refused(name, dense):
    with pytest.raises(UserError, match="small-unet" if dense else "small-cnn"):
        build_net(NetConfig(name=name), 3, 3, dense=dense)


def test_images_of_another_size_are_refused_with_the_multiple():
    with pytest.raises(UserError, match="multiples of 8"):
        net_of("deeplab-resnet18")(torch.zeros(1, 3, 36, 32))


UNET = {"channels": [8, 16, 32], "strides": [2, 2]}


@pytest.mark.parametrize(
    ("name", "arguments", "has_head"),
    [("UNet", UNET, False), ("SegResNet", {"init_filters": 8}, True), ("BasicUNet", {"features": [8] * 6}, True)],
)
def test_nets_of_monai_give_masks(name, arguments, has_head):
    pytest.importorskip("monai")
    net = net_of(f"monai:{name}", arguments=arguments)
    assert net.has_head == has_head
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 3, 32, 32)
    assert groups(net)["norm"] or name == "UNet"  # whose instance norm has no weights
    if has_head:
        assert groups(net)["head"] == ("head.weight", "head.bias")
    else:
        with pytest.raises(UserError, match="1x1 convolution"):
            _ = net.head


class Plain(nn.Module):
    """A module of a user's own."""

    def __init__(self, num_classes, channels):
        super().__init__()
        self.layers = nn.Conv2d(channels, 6, 3, padding=1)
        self.last = nn.Conv2d(6, num_classes, 1)

    def forward(self, images):
        return self.last(self.layers(images).relu())


def test_the_logits_of_a_module_of_ones_own_stay_as_they_are():
    from equipoise.nets.outside_nets import net_of

    module, images = Plain(3, 3), torch.randn(2, 3, 32, 32)
    expected = module(images)
    net = net_of(NetConfig(name="mine.py:make"), module, 3, 3, dense=True)
    assert net.has_head and net.feature_size == 6
    torch.testing.assert_close(net(images), expected)


def test_a_module_that_gives_one_label_for_each_image_is_refused():
    from equipoise.nets.outside_nets import net_of

    module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    with pytest.raises(UserError, match="masks of 3 classes"):
        net_of(NetConfig(name="other.py:make"), module, 3, 3, dense=True)
