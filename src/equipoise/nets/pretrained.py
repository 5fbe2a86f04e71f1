"""The nets that come with ImageNet weights: ResNet-18 and EfficientNet-B0 from MONAI, EfficientNet-Lite0 from
the packages of the extra `lite` (He et al., 2016; Tan and Le, 2019; Liu, 2020).

Their packages are imported where a net is built: MONAI takes seconds, which others need not wait for.
"""

from importlib import import_module
from types import ModuleType

from torch import nn

from equipoise.core.errors import UserError, install
from equipoise.nets.base import Net

RESNET_WIDTHS = [64, 128, 256, 512]
EFFICIENTNET_FEATURES = 1280
EFFICIENTNET_SMALLEST = 32


def resnet18(num_classes: int, channels: int, dropout: float) -> Net:
    """The standard ResNet-18 (7x7 stem of stride 2, shortcuts without bias): 512 features."""
    body = import_monai().ResNet(
        "basic",
        layers=[2, 2, 2, 2],
        block_inplanes=RESNET_WIDTHS,
        spatial_dims=2,
        n_input_channels=channels,
        conv1_t_stride=2,
        feed_forward=False,
        bias_downsample=False,
    )
    return Net(body, nn.Linear(RESNET_WIDTHS[-1], num_classes), dropout, smallest=16)


def efficientnet_b0(num_classes: int, channels: int, dropout: float, drop_connect: float) -> Net:
    """EfficientNet-B0: 1280 features."""
    efficientnet = import_monai().efficientnet
    body = efficientnet.EfficientNetBN(
        "efficientnet-b0", pretrained=False, in_channels=channels, num_classes=num_classes
    )
    blocks = [module for module in body.modules() if isinstance(module, efficientnet.MBConvBlock)]
    for index, block in enumerate(blocks):
        block.drop_connect_rate = drop_connect * index / len(blocks)
    for module in (body, *blocks):
        module._swish = nn.SiLU()  # one fused kernel in place of an autograd function written in Python
    return _without_classifier(body, num_classes, dropout)


def efficientnet_lite0(num_classes: int, channels: int, dropout: float, drop_connect: float) -> Net:
    """EfficientNet-Lite0 (ReLU6, no squeeze-and-excitation): 1280 features; expects images normalised to
    mean 0.5 and standard deviation 0.5."""
    package = import_lite("efficientnet_lite_pytorch")
    body = package.EfficientNet.from_name(
        "efficientnet-lite0", in_channels=channels, num_classes=num_classes, drop_connect_rate=drop_connect
    )
    for module in body.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            module.__class__ = nn.Conv2d  # one pixel needs none of the package's padding
    return _without_classifier(body, num_classes, dropout)


def import_monai() -> ModuleType:
    """MONAI's nets, or a message that says how to get them."""
    try:
        return import_module("monai.networks.nets")
    except ImportError as error:
        raise UserError(f"this net needs MONAI: {install('monai')}") from error


def import_lite(package: str) -> ModuleType:
    """A package of the extra `lite`, or a message that says how to get it."""
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"the net efficientnet-lite0 needs the package {package}: {install('lite')}") from error


def _without_classifier(body: nn.Module, num_classes: int, dropout: float) -> Net:
    """An EfficientNet whose own dropout and classifier give way to the dropout and head of a `Net`."""
    body._dropout, body._fc = nn.Identity(), nn.Identity()
    return Net(body, nn.Linear(EFFICIENTNET_FEATURES, num_classes), dropout, EFFICIENTNET_SMALLEST)
