"""From the name of a net in a config to the net."""

import torch
from torch import nn

from equipoise.core.errors import UserError
from equipoise.nets.base import Net
from equipoise.nets.config import NetConfig
from equipoise.nets.pretrained import efficientnet_b0, efficientnet_lite0, resnet18
from equipoise.nets.small import small_cnn, vgg16_slim
from equipoise.nets.weights import load_weights

PLAIN = {"small-cnn": small_cnn, "resnet18": resnet18, "vgg16-slim": vgg16_slim}
STOCHASTIC_DEPTH = {"efficientnet-b0": efficientnet_b0, "efficientnet-lite0": efficientnet_lite0}
EFFICIENTNET_RATE = 0.2  # of dropout and of drop-connect, as published


@torch.no_grad()
def build_net(config: NetConfig, num_classes: int, channels: int = 3) -> Net:
    """The net of a configuration; random weights come from torch's default generator on the CPU."""
    if config.outside:
        from equipoise.nets.outside import build_outside

        net = build_outside(config, num_classes, channels)
    elif config.name in STOCHASTIC_DEPTH:
        dropout = EFFICIENTNET_RATE if config.dropout is None else config.dropout
        drop_connect = EFFICIENTNET_RATE if config.drop_connect is None else config.drop_connect
        net = STOCHASTIC_DEPTH[config.name](num_classes, channels, dropout, drop_connect)
    else:
        if config.drop_connect:
            raise UserError(
                f"the net {config.name} has no drop-connect: leave net.drop_connect out, or choose one of "
                + ", ".join(STOCHASTIC_DEPTH)
            )
        net = PLAIN[config.name](num_classes, channels, config.dropout or 0.0)
    if config.init == "torch":
        for module in net.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm):
                module.reset_parameters()
    if config.norm_momentum is not None:
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = config.norm_momentum
    if config.weights not in ("none", "pretrained"):
        load_weights(net, config.name, config.weights)
    return net
