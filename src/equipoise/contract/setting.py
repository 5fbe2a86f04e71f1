"""What server and sites agree on before the first round: config, options, task, shape of the images, device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from equipoise.contract.config import Config
from equipoise.core.streams import stream
from equipoise.data.augment import Augmentation, build_augmentation, stored_augmentation
from equipoise.data.feature_store import Features
from equipoise.data.federation import Federation
from equipoise.nets import Net, build_net
from equipoise.nets.kernels import quicken
from equipoise.tasks import Task, get_task

if TYPE_CHECKING:
    from equipoise.contract.method import Method


@dataclass(frozen=True)
class Setting:
    """What server and sites agree on before the first round; holds no data.

    Args:
        channels, image_size: of what the net is given: images, or the features of a frozen encoder

    >>> import equipoise as eq
    >>> from equipoise.contract.config import Config
    >>> fed = eq.load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> method = eq.Method(eq.FedAvgServer, eq.FedAvgClient, "none", 2026, "nothing")
    >>> setting = eq.Setting.of(Config(), method, fed)
    >>> setting.num_classes, setting.channels, setting.image_size
    (3, 3, 16)
    """

    config: Config
    options: Any
    task: Task
    channels: int
    image_size: int
    device: torch.device
    features: Features | None = None

    @classmethod
    def of(cls, config: Config, method: Method, federation: Federation, device: str = "cpu") -> Setting:
        """The setting of a run."""
        task = get_task(federation.task)(federation.classes, config.evaluation.metric)
        options = method.options_of(config)
        channels, size = federation.channels, federation.image_size
        if federation.features is not None:
            channels, _, size = federation.features.shape
        return cls(config, options, task, channels, size, torch.device(device), federation.features)

    @property
    def num_classes(self) -> int:
        """Number of classes, whether or not a site has them all."""
        return self.task.num_classes

    def augmentation(self) -> Augmentation:
        """How images, or the features in place of them, become batches."""
        if self.features is not None:
            return stored_augmentation(self.features)
        return build_augmentation(self.config.augment, self.image_size, self.channels)

    @property
    def autocasts(self) -> bool:
        """Whether nets run in bfloat16: where the config asks for it, on a GPU."""
        return self.config.compute.precision == "bf16" and self.device.type == "cuda"

    def precision(self, full: bool = False) -> torch.autocast:
        """The context in which nets run; with `full` they run in float32 under any config."""
        return torch.autocast(self.device.type, torch.bfloat16, self.autocasts and not full, cache_enabled=False)

    def new_net(self) -> Net:
        """The configured net with the weights that every site and the server start from."""
        config, dense = self.config.net, self.task.dense
        net: Net = self.seeded("net", lambda: build_net(config, self.num_classes, self.channels, dense))
        return net

    def seeded(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()` under the named random stream, moved to the device: the same everywhere."""
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would also restart the random streams of slots on a GPU.
            torch.default_generator.manual_seed(stream(self.config.seed, "initial", name))
            made = make().to(self.device)
        if isinstance(made, nn.Module) and self.config.compute.channels_last:
            made = made.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if self.autocasts:
                quicken(made)
        return made
