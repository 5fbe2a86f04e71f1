"""The net of MOON (Li et al., 2021) and FedProc (Mu et al., 2023): a two-layer projection between body and head."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.contract.method import Setting
from equipoise.nets import Net


class UnitLength(nn.Module):
    """Features (B, D) brought to length 1."""

    def forward(self, features: Tensor) -> Tensor:
        return F.normalize(features, dim=-1)


def projected_net(setting: Setting, size: int, unit: bool = False) -> Net:
    """The configured net whose features are projected to (B, size), and to unit length if asked, before the head.

    Size 0 leaves the net unchanged. The body starts from the same weights in both cases.
    """
    net = setting.new_net()
    if size == 0:
        return net
    width, bias = net.feature_size, net.head.bias is not None

    def make() -> Net:
        layers: list[nn.Module] = [nn.Linear(width, width), nn.ReLU(), nn.Linear(width, size)]
        projection = nn.Sequential(*layers, UnitLength()) if unit else nn.Sequential(*layers)
        net.body = nn.Sequential(net.body, projection)
        net.head = nn.Linear(size, setting.num_classes, bias=bias)
        return net

    return setting.seeded("projection", make)
