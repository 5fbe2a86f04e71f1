"""Class concepts in words: prompts, text encoders, and the banks of embeddings that FedBM's classifier is made of."""

from typing import TYPE_CHECKING

from equipoise.core.lazy import on_demand

if TYPE_CHECKING:
    from equipoise.nets.concepts.bank import (
        ConceptBank,
        bank_file,
        bank_folders,
        build_bank,
        dataset_key,
        find_bank,
        load_bank,
        stored_banks,
    )
    from equipoise.nets.concepts.prompts import DEFAULT_ENCODER, WORDINGS, Wording, read_wording, wording_of
    from equipoise.nets.concepts.text_encoders import TextEncoder, load_encoder

__all__ = [
    "DEFAULT_ENCODER",
    "WORDINGS",
    "ConceptBank",
    "TextEncoder",
    "Wording",
    "bank_file",
    "bank_folders",
    "build_bank",
    "dataset_key",
    "find_bank",
    "load_bank",
    "load_encoder",
    "read_wording",
    "stored_banks",
    "wording_of",
]

__getattr__ = on_demand(__name__, __all__, "prompts", "text_encoders", "bank")
