"""BiomedCLIP's text tower (Zhang et al., 2023), from its published file into transformers' BERT.

A sentence's embedding is the last hidden state of its first token, projected: Linear, GELU, Linear, without biases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from equipoise.core.errors import UserError

WEIGHTS = ("open_clip_pytorch_model.bin", "open_clip_model.safetensors")
VOCABULARY = "vocab.txt"
HOME = "https://huggingface.co/microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224"
BODY, HEAD = "text.transformer.", "text.proj."
HEAD_WIDTH = 64  # of BERT's attention: 12 heads of 768 numbers
LONGEST = 256  # tokens that the tower was trained with


def text_tower(folder: Path, transformers: Any) -> Callable[[Sequence[str]], Tensor]:
    """A function from sentences to embeddings (n, 512), made of the files in `folder`.

    Raises:
        UserError: naming the file that is missing, or that holds something else
    """
    weights = _found(folder, WEIGHTS)
    tokeniser = transformers.BertTokenizerFast.from_pretrained(str(_found(folder, (VOCABULARY,)).parent))
    try:
        tensors = _read(weights)
        body, head = _body(_below(BODY, tensors), transformers), _head(_below(HEAD, tensors))
    except (OSError, RuntimeError, ValueError, KeyError) as problem:
        raise UserError(f"{weights} does not hold BiomedCLIP's text tower: {problem}; get it from {HOME}") from None

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Tensor:
        tokens = tokeniser(list(texts), padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
        hidden = body(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
        return head(hidden[:, 0].float())

    return encode


def _found(folder: Path, names: Sequence[str]) -> Path:
    """The first of some files that lies in the folder."""
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise UserError(
            f"the text encoder 'biomedclip' needs the file {names[0]}: get it from {HOME} and put it into {folder}"
        )
    return path


def _read(path: Path) -> Mapping[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not found:
        raise KeyError(f"no tensor {prefix}*")
    return found


def _body(tensors: dict[str, Tensor], transformers: Any) -> nn.Module:
    """BERT of the size that the tensors have; its pooler takes no part."""
    tensors = {k: v for k, v in tensors.items() if not k.startswith("pooler.") and k != "embeddings.position_ids"}
    words, width = tensors["embeddings.word_embeddings.weight"].shape
    config = transformers.BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=len({name.split(".")[2] for name in tensors if name.startswith("encoder.layer.")}),
        num_attention_heads=width // HEAD_WIDTH,
        intermediate_size=len(tensors["encoder.layer.0.intermediate.dense.weight"]),
        max_position_embeddings=len(tensors["embeddings.position_embeddings.weight"]),
    )
    body = transformers.BertModel(config, add_pooling_layer=False).eval()
    body.load_state_dict(tensors)
    return body


def _head(tensors: dict[str, Tensor]) -> nn.Module:
    """The projection of two layers."""
    inner, outer = tensors["0.weight"], tensors["2.weight"]
    first = nn.Linear(inner.shape[1], inner.shape[0], bias=False)
    head = nn.Sequential(first, nn.GELU(), nn.Linear(outer.shape[1], outer.shape[0], bias=False))
    head.load_state_dict(tensors)
    return head.eval()
