"""From the name of a net in a config to the net."""

from typing import Any

import torch
from torch import nn

from equipoise.core.errors import UserError
from equipoise.nets.architectures import architecture, dense_names, net_names
from equipoise.nets.net import Net
from equipoise.nets.net_config import NetConfig
from equipoise.nets.weights import load_weights


@torch.no_grad()
def build_net(config: NetConfig, num_classes: int, channels: int = 3, dense: bool = False) -> Net:
    """The net of a configuration; random weights come from torch's default generator on the CPU.

    Args:
        dense: whether it gives a class for each pixel
    """
    if config.outside:
        from equipoise.nets.outside_nets import build_outside

        net = build_outside(config, num_classes, channels, dense)
    else:
        net = _built_in(config, num_classes, channels, dense)
    if config.group_norm:
        _replace_batch_norm(net)
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


def _built_in(config: NetConfig, num_classes: int, channels: int, dense: bool) -> Net:
    found = architecture(config.name)
    if found.dense != dense:
        gives = "a class for each pixel" if found.dense else "one class for each image"
        raise UserError(
            f"the net {config.name} gives {gives}, and the data {'has masks' if dense else 'has no masks'}: choose "
            f"{', '.join(dense_names(dense))}, or a net from outside"
        )
    rates: dict[str, Any] = {"dropout": found.dropout if config.dropout is None else config.dropout}
    if found.configured:
        rates["config"] = config
    if found.drop_connect is not None:
        rates["drop_connect"] = found.drop_connect if config.drop_connect is None else config.drop_connect
    elif config.drop_connect:
        skipping = [name for name in net_names() if architecture(name).drop_connect is not None]
        raise UserError(
            f"the net {config.name} has no drop-connect: leave net.drop_connect out, or choose one of "
            + ", ".join(skipping)
        )
    return found.make(num_classes, channels, **rates)


#: channels of a group, at least
GROUP = 8


def _replace_batch_norm(net: nn.Module) -> None:
    """Put a group norm of as many channels in the place of every batch norm."""
    for name, layer in [*net.named_modules()]:
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            channels = layer.num_features
            groups = next(count for count in range(max(channels // GROUP, 1), 0, -1) if channels % count == 0)
            path, _, leaf = name.rpartition(".")
            setattr(net.get_submodule(path), leaf, nn.GroupNorm(groups, channels))
