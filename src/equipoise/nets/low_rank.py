"""LoRA on a frozen encoder: small matrices beside some of its linear layers train, and nothing else of it.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from equipoise.core.errors import UserError, first_few, first_line
from equipoise.core.extras import imported
from equipoise.nets.encoders import TRIED, build_encoder, features_in
from equipoise.nets.net_config import NetConfig
from equipoise.nets.splicing import outside_state, own_tensors

#: what published transformers call the projections to queries and values, which LoRA's authors adapt
QUERIES_AND_VALUES = ("query", "value", "q_proj", "v_proj", "q_lin", "v_lin", "q", "v", "qkv")


def with_lora(config: NetConfig, channels: int) -> tuple[LowRank, int]:
    """The encoder of a config with LoRA in it, and the number of its features."""
    encoder = build_encoder(config, channels)
    width = math.prod(encoder.shape(channels, encoder.size or TRIED))
    return LowRank(encoder.module.module, encoder.name, config.lora_rank, config.lora_layers), width


class LowRank(nn.Module):
    """An encoder with LoRA: images (B, C, H, W) -> features (B, D). Its state holds LoRA's matrices alone.

    The encoder stays in eval mode. Its weights are buffers outside the state, so that they neither train nor travel.

    Args:
        module: the encoder; it is changed
        name: what to call it in messages
        rank: of the product of two matrices that is added to a layer's weights, times 2
        layers: names, or last parts of names, of the layers that get matrices
    """

    def __init__(self, module: nn.Module, name: str, rank: int, layers: tuple[str, ...] | None) -> None:
        super().__init__()
        peft = imported("peft", "hub", 'net.adapter = "lora"')
        linear = [path for path, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        wanted = QUERIES_AND_VALUES if layers is None else layers
        chosen = [path for path in linear if any(f".{path}".endswith(f".{end}") for end in wanted)]
        if not chosen:
            told = "for queries and values" if layers is None else f"called {', '.join(layers)}"
            remedy = (
                f"name some of its linear layers with net.lora_layers: {first_few(reversed(linear))}"
                if linear
                else 'it has none at all; set net.adapter = "hidden"'
            )
            raise UserError(f"LoRA finds no linear layers {told} in the encoder {name}; {remedy}")
        told = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=chosen)
        try:
            adapted = peft.inject_adapter_in_model(told, module)
        except ValueError as problem:
            raise UserError(f"LoRA does not fit the encoder {name}: {first_line(problem)}") from problem
        _keep_out_of_state(adapted)
        self.module = adapted.eval()

    @property
    def frozen_parameters(self) -> int:
        """Number of the encoder's own weights, which do not train."""
        return sum(value.numel() for value in self.module.buffers())

    def train(self, mode: bool = True) -> LowRank:
        """Leaves the encoder in eval mode: its dropout stays off. LoRA's own layers follow the mode."""
        super().train(False)
        for layer in self.modules():
            if next(layer.parameters(recurse=False), None) is not None:
                layer.train(mode)
        return self

    def forward(self, images: Tensor) -> Tensor:
        return features_in(self.module(images)).flatten(1)


def _keep_out_of_state(module: nn.Module) -> None:
    """Take all tensors but LoRA's own matrices out of the state."""
    trained = {id(value) for name, value in module.named_parameters() if ".lora_" in name}
    for layer in module.modules():
        outside_state(layer, {name: value for name, value in own_tensors(layer) if id(value) not in trained})
