"""A small net on features of a frozen encoder (`net.encoder`): a linear head, or one hidden layer and a head.

Where the encoder is cut at a layer (`net.freeze_up_to`), its later layers come first, and train. Under LoRA the whole
encoder comes first, and matrices within it train.
"""

from torch import Tensor, nn

from equipoise.nets.architectures import Architecture
from equipoise.nets.net import Net
from equipoise.nets.net_config import NetConfig


class Unit(nn.Module):
    """Features (B, D), each image's divided by their own root mean square. Nothing is fitted."""

    def forward(self, features: Tensor) -> Tensor:
        return features * features.square().mean(1, keepdim=True).add(1e-12).rsqrt()


def adapter(num_classes: int, channels: int, dropout: float, config: NetConfig) -> Net:
    """An adapter for features of `channels` channels."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = channels
    if config.freeze_up_to is not None:
        from equipoise.nets.encoders import build_encoder  # which looks up other nets here

        encoder = build_encoder(config)
        assert encoder.rest is not None
        layers, width = [encoder.rest, nn.Flatten()], encoder.width
    elif config.low_rank:
        from equipoise.nets.low_rank import with_lora

        body, width = with_lora(config, channels)
        layers = [body]
    if config.scale == "unit":
        layers.append(Unit())
    if config.adapter == "hidden":
        inputs, width = width, config.hidden
        norm = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "none": None}[config.hidden_norm]
        layers += [nn.Linear(inputs, width, bias=norm is None), *([] if norm is None else [norm(width)]), nn.ReLU()]
    return Net(nn.Sequential(*layers), nn.Linear(width, num_classes), dropout)


NET = Architecture(adapter, configured=True)
