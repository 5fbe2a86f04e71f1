"""Concept banks: the text embeddings of a data set's classes in one small file, with the words they were made from.

With a bank at hand FedBM needs no text encoder. Those of the built-in data sets ship with the package; others are
made once by `equipoise concepts build DATA`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import functional as F

from equipoise.core.errors import UserError
from equipoise.core.storage import replacing
from equipoise.data.data_config import DataConfig
from equipoise.nets.concepts.prompts import DEFAULT_ENCODER, Wording, wording_of
from equipoise.nets.concepts.text_encoders import TextEncoder

SHIPPED = Path(__file__).parent
SUFFIX = ".safetensors"
EMBEDDINGS = "embeddings"


@dataclass(frozen=True, eq=False)
class ConceptBank:
    """What a text encoder makes of the classes of a data set.

    Args:
        dataset: the data set's name, as `dataset_key` gives it
        encoder: the name of the text encoder
        classes: class names, one per row
        prompts: the sentences about each class, the same number for all
        embeddings: their embeddings (C, M, D), float32, of unit norm
    """

    dataset: str
    encoder: str
    classes: tuple[str, ...]
    prompts: tuple[tuple[str, ...], ...]
    embeddings: Tensor

    def __post_init__(self) -> None:
        numbers = {len(sentences) for sentences in self.prompts}
        fits = len(numbers) == 1 and self.embeddings.shape[:-1] == (len(self.classes), *numbers)
        if not fits or len(self.prompts) != len(self.classes):
            raise UserError(
                f"the concept bank of {self.dataset} holds embeddings {tuple(self.embeddings.shape)}, which do not fit "
                f"{len(self.classes)} classes and their prompts"
            )
        if not self.embeddings.isfinite().all():
            raise UserError(f"the concept bank of {self.dataset} ({self.encoder}) holds embeddings that are not finite")

    def select(self, classes: Sequence[str]) -> ConceptBank:
        """The bank of some of its classes, in the given order."""
        missing = [name for name in classes if name not in self.classes]
        if missing:
            raise UserError(
                f"the concept bank of {self.dataset} ({self.encoder}) has no class {', '.join(missing)}; "
                f"it has {', '.join(self.classes)}"
            )
        rows = [self.classes.index(name) for name in classes]
        return replace(
            self,
            classes=tuple(classes),
            prompts=tuple(self.prompts[row] for row in rows),
            embeddings=self.embeddings[rows],
        )

    def as_released(self) -> ConceptBank:
        """The bank with the concepts where the authors' released code has them (OCT: two diseases swapped)."""
        swapped = wording_of(self.dataset).released
        if not swapped:
            raise UserError(f"{self.dataset} has no released order of concepts that differs from the correct one")
        return replace(self.select([swapped.get(name, name) for name in self.classes]), classes=self.classes)


def dataset_key(name: str) -> str:
    """The name that a data set's banks go by: "pbc"; of folder:DIR and manifest:FILE the last part of the path."""
    kind, _, argument = name.partition(":")
    return Path(argument).stem if argument else kind


def build_bank(
    dataset: str, classes: Sequence[str], encoder: TextEncoder, out: Path, wording: Wording | None = None
) -> ConceptBank:
    """Encode the prompts of the classes and write the bank to `out`; the wording is by default the data set's own."""
    prompts = (wording or wording_of(dataset)).prompts(classes)
    embeddings = torch.stack([F.normalize(encoder.encode(sentences).float(), dim=-1) for sentences in prompts])
    bank = ConceptBank(dataset, encoder.name, tuple(classes), prompts, embeddings)
    out.parent.mkdir(parents=True, exist_ok=True)
    texts = {"classes": json.dumps(bank.classes), "prompts": json.dumps(bank.prompts)}
    # Half precision is ample: its error is far below the distance between two sentences.
    content = save({EMBEDDINGS: embeddings.half()}, {"dataset": dataset, "encoder": encoder.name, **texts})
    with replacing(out) as draft:
        draft.write_bytes(content)
    return bank


def load_bank(path: Path) -> ConceptBank:
    """Read a bank from its file."""
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            embeddings = F.normalize(file.get_tensor(EMBEDDINGS).float(), dim=-1)
        prompts = tuple(tuple(sentences) for sentences in json.loads(texts["prompts"]))
        classes = tuple(json.loads(texts["classes"]))
        dataset, encoder = texts["dataset"], texts["encoder"]
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise UserError(f"{path} is not a concept bank: {problem}") from None
    return ConceptBank(dataset, encoder, classes, prompts, embeddings)


def bank_file(dataset: str, encoder: str = DEFAULT_ENCODER) -> str:
    """The file name of a bank."""
    dataset, encoder = (re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") for text in (dataset, encoder))
    return f"{dataset}_{encoder}{SUFFIX}"


def bank_folders(data: DataConfig | None = None) -> tuple[Path, Path]:
    """Where banks lie: the user's own, beside the prepared data, come before those shipped with the package."""
    return (data or DataConfig()).store_root() / "concepts", SHIPPED


def stored_banks(data: DataConfig | None = None) -> Iterator[tuple[Path, ConceptBank]]:
    """All banks at hand with their files; of two for one data set and encoder, the one that is used."""
    seen: set[str] = set()
    for folder in bank_folders(data):
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            if path.name not in seen:
                seen.add(path.name)
                yield path, load_bank(path)


def find_bank(data: DataConfig, classes: Sequence[str], encoder: str = DEFAULT_ENCODER) -> ConceptBank:
    """The bank for the classes of a data set, in their order."""
    dataset = dataset_key(data.name)
    candidates = [folder / bank_file(dataset, encoder) for folder in bank_folders(data)]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        option = "" if encoder == DEFAULT_ENCODER else f" --encoder {encoder}"
        raise UserError(
            f"there is no concept bank for {data.name} with the text encoder {encoder}; make one with "
            f"`equipoise concepts build {data.name}{option}`"
        )
    return load_bank(found).select(classes)
