"""Quick layers for nets in bfloat16 on a GPU, channels last. Each file replaces one kind of torch's layers, by Triton
kernels that first prove themselves against torch, or by fewer launches of torch's own kernels."""

from torch import nn

from equipoise.nets.kernels.convolution import quicken_convolutions, quicken_nets
from equipoise.nets.kernels.depthwise import quicken_depthwise
from equipoise.nets.kernels.doubling import quicken_doubling
from equipoise.nets.kernels.norm import quicken_norms
from equipoise.nets.kernels.pool import quicken_pools
from equipoise.nets.kernels.pooled_norm import quicken_pooled_norms


def quicken(net: nn.Module) -> None:
    """Make a net quick. Names and values of its state stay the same."""
    quicken_norms(net)
    quicken_pools(net)
    quicken_pooled_norms(net)  # which look for quick norms before quick pools
    quicken_doubling(net)
    quicken_depthwise(net)
    quicken_convolutions(net)  # those that are not depthwise
    quicken_nets(net)
