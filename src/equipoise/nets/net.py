"""What every net looks like from outside: a body that gives pooled features, and a linear head.

Nets for segmentation are in `equipoise.nets.dense`: their features are maps, and their head is a 1x1 convolution.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from equipoise.core.errors import UserError
from equipoise.nets.rounding import perhaps_rounded_up

NORM_LAYERS = (
    nn.modules.batchnorm._NormBase,  # batch and instance norm, in any number of dimensions
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Net(nn.Module):
    """An image classifier: images (B, C, H, W) -> features (B, D) -> dropout -> logits (B, num_classes)."""

    #: whether features and head are known; False for a net from outside of which only the logits are
    has_head = True
    #: whether logits are (B, C, H, W), a class for each pixel
    dense = False
    #: norm layers that torch does not know as such, by name
    norm_names: tuple[str, ...] = ()

    def __init__(self, body: nn.Module, head: nn.Linear, dropout: float = 0.0, smallest: int = 1) -> None:
        """`body` maps images (B, C, H, W), at least `smallest` pixels high and wide, to features (B, D)."""
        super().__init__()
        self.body = body
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.head = head
        self.smallest = smallest

    @property
    def feature_size(self) -> int:
        """D, the number of pooled features."""
        return self.head.in_features

    @property
    def frozen_parameters(self) -> int:
        """Number of weights within the net that neither train nor travel."""
        return sum(getattr(module, "frozen_parameters", 0) for module in self.body.children())

    def features(self, images: Tensor) -> Tensor:
        """Pooled features (B, D) of images (B, C, H, W), before dropout."""
        height, width = images.shape[-2:]
        if min(height, width) < self.smallest:
            raise UserError(
                f"images of {height}x{width} pixels are too small for this net, which needs at least "
                f"{self.smallest}x{self.smallest}: prepare larger images or choose the net small-cnn"
            )
        if not images.is_cuda:
            return self.body(images)
        return self.body(perhaps_rounded_up(images))[: len(images)]

    def classify(self, features: Tensor) -> Tensor:
        """Logits (B, num_classes) of pooled features (B, D)."""
        return self.logits_of(self.head, self.dropout(features))

    def logits_of(self, head: nn.Module, features: Tensor) -> Tensor:
        """Logits (B, num_classes) that a head like the net's own makes of features, after dropout."""
        logits: Tensor = head(features)
        return logits

    def another_head(self) -> nn.Module:
        """A new head like the net's own, with random weights."""
        return nn.Linear(self.head.in_features, self.head.out_features, bias=self.head.bias is not None)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, C, H, W)."""
        return self.classify(self.features(images))


def groups(net: nn.Module) -> dict[str, tuple[str, ...]]:
    """The names in `net.state_dict()`, each in exactly one of four groups.

    `statistics` are the running statistics of norm layers and `norm` their affine parameters, wherever the
    layer sits; of the rest, `head` is what lies inside a `head` that is not itself part of a `body`, and
    `body` is everything else. Works for a `Net` and for any module that contains some.
    """
    named: dict[str, list[str]] = {"body": [], "head": [], "norm": [], "statistics": []}
    told = {
        f"{prefix}{'.' if prefix else ''}{name}"
        for prefix, module in net.named_modules()
        if isinstance(module, Net)
        for name in module.norm_names
    }
    for name in net.state_dict():
        path, _, leaf = name.rpartition(".")
        if path in told or isinstance(net.get_submodule(path), NORM_LAYERS):
            group = "statistics" if leaf in STATISTICS else "norm"
        else:
            group = next((part for part in path.split(".") if part in ("body", "head")), "body")
        named[group].append(name)
    found = {group: tuple(names) for group, names in named.items()}
    headless = [module for module in net.modules() if isinstance(module, Net) and not module.has_head]
    return Headless(found, headless[0]) if headless else found


class Headless(dict[str, tuple[str, ...]]):
    """The groups of a net whose head is not known, which refuses to tell it.

    Args:
        net: which raises this error at a use of its head
    """

    def __init__(self, groups: Mapping[str, tuple[str, ...]], net: Net) -> None:
        super().__init__(groups)
        self.net = net

    def __getitem__(self, group: str) -> tuple[str, ...]:
        if group == "head":
            _ = self.net.head
        return super().__getitem__(group)


def all_but(net: nn.Module, *names: str) -> tuple[str, ...]:
    """The state-dict names of a net outside some of its groups (body, head, norm, statistics), in its order."""
    left_out = {entry for name in names for entry in groups(net)[name]}
    return tuple(entry for entry in net.state_dict() if entry not in left_out)


def entries_of(net: nn.Module, *names: str) -> tuple[str, ...]:
    """State-dict names of the groups "body", "head", "norm" and "statistics"."""
    return tuple(entry for name in names for entry in groups(net)[name])


def class_rows(module: nn.Module, num_classes: int) -> tuple[str, ...]:
    """The parameters of a net, or of a head by itself, that have a row for each class."""
    head = module.head if isinstance(module, Net) and module.has_head else module
    if isinstance(head, nn.Conv2d) and head.kernel_size == (1, 1):
        size = head.out_channels
    else:
        size = head.out_features if isinstance(head, nn.Linear) else 0
    if size != num_classes:
        return ()
    prefix = "" if head is module else "head."
    return tuple(f"{prefix}{name}" for name, _ in head.named_parameters())


def pooled(*layers: nn.Module) -> nn.Sequential:
    """The layers, then the mean over all pixels: feature maps (B, D, h, w) -> (B, D)."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def conv_block(inputs: int, outputs: int) -> list[nn.Module]:
    """A 3x3 convolution without bias, batch norm and ReLU."""
    return [
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]
