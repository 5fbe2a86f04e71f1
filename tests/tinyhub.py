"""Two tiny models of Hugging Face for tests, made from their configs: one with attention, and one of convolutions."""

from pathlib import Path

import torch

WIDTH, LAYERS = 16, 2
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.5, 0.25)


def written(folder: Path) -> Path:
    """The folder, with the models `vit` (32 pixels, dropout of 0.5 in training) and `convnext` (48 pixels)."""
    import transformers

    about = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=8,
        hidden_dropout_prob=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.ViTForImageClassification(about).save_pretrained(folder / "vit")
        about = transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4)
        transformers.ConvNextForImageClassification(about).save_pretrained(folder / "convnext")
    for name, size in (("vit", {"height": 32, "width": 32}), ("convnext", {"shortest_edge": 48})):
        told = {"size": size, "image_mean": MEAN, "image_std": STD}
        transformers.ViTImageProcessorPil(**told).save_pretrained(folder / name)
    return folder
