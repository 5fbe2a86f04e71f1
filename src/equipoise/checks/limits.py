"""Checks of what a plug-in does under privacy settings, and where images have masks instead of labels."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.checks.subjects import Skipped, Subject
from equipoise.checks.traces import assert_finite, server_state
from equipoise.checks.trouble import with_client
from equipoise.contract.disclosed import rule_of
from equipoise.contract.method import Batch, Client
from equipoise.contract.protocol import Ask, Replies, Value
from equipoise.core.errors import UserError, first_line
from equipoise.engine.local_engine import LocalEngine
from equipoise.methods import get_method

#: the least number of images that may leave a site
FEW = 5
#: the phantom with a long tail: sites have classes of 0, of 1 to 4, and of many training images
TAIL = ("data.phantom.images=180", "data.phantom.imbalance=40", "data.phantom.missing=0.0", "train.batch_size=16")
LEAST = ("train.rounds=1", f"privacy.least={FEW}")
SECURE = "privacy.secure_sums=true"
PRIVATE = ("privacy.epsilon=8", "net.group_norm=true", "train.batch_size=16", "privacy.counts_noise=4")
#: the rounding of secure sums, and of sums of float32
ROUNDING = {"rtol": 1e-5, "atol": 2e-6}


@contextmanager
def refusals_left_out() -> Iterator[None]:
    """Leave a check out where Equipoise refuses the plug-in under its settings, for it cannot do wrong there."""
    try:
        yield
    except UserError as refused:
        raise Skipped(first_line(refused)) from None


def small_numbers(value: Value, few: Tensor) -> list[str]:
    """Where a value shows a class of `few` images (C,), or is a count of few."""
    if isinstance(value, dict):
        return []  # weights
    if isinstance(value, Tensor):
        if value.dim() and len(value) == len(few) and bool(value[few].any()):
            return ["a row of a class of few images"]
        value = value.double() if value.dtype != torch.bool else torch.zeros(1)
        return ["a small count"] if bool(((value >= 1) & (value < FEW) & (value == value.round())).any()) else []
    return ["a small count"] if not isinstance(value, str) and 1 <= value < FEW and value == int(value) else []


@refusals_left_out()
def check_least(subject: Subject, folder: Path) -> None:
    """With `privacy.least` no row of a class of few images and no count of few leaves a site, unless it is marked."""
    settings = LEAST if subject.has_data else (*TAIL, *LEAST)
    federation, sheet = subject.federation(*settings), subject.sheet()
    counts = {site.name: torch.from_numpy(site.class_counts(len(federation.classes))) for site in federation.sites}
    few = {site: (own > 0) & (own < FEW) for site, own in counts.items()}
    if not any(bool(own.any()) for own in few.values()):
        raise Skipped(f"no site has a class of fewer than {FEW} images")
    shown: list[str] = []

    class Listening(LocalEngine):
        """Looks at what sites reply."""

        def ask(self, ask: Ask) -> Generator[None, None, Replies]:
            replies = yield from super().ask(ask)
            for reply in replies:
                for entry, value in reply.payload.items():
                    marked = rule_of(sheet.get(ask.action, {}).get(entry, ""))
                    if marked in (None, "by_class", "counts", "images"):
                        shown.extend(f"{ask.action}.{entry}: {what}" for what in small_numbers(value, few[reply.site]))
            return replies

    subject.run(folder / "least", *settings, engine=Listening)
    assert not shown, f"{shown[0]}; mark what leaves with an Entry of equipoise.contract.disclosed"


@refusals_left_out()
def check_sums(subject: Subject, folder: Path) -> None:
    """With secure sums the server's state is the same, up to rounding."""
    plain = server_state(subject.run(folder / "plain", "train.rounds=1"))
    secure = server_state(subject.run(folder / "secure", "train.rounds=1", SECURE))
    assert plain.keys() == secure.keys(), f"one state lacks {sorted(plain.keys() ^ secure.keys())[:5]}"
    other = [name for name, own in plain.items() if not torch.allclose(own, secure[name], **ROUNDING, equal_nan=True)]
    assert not other, f"secure sums change {other[:3]}"


@refusals_left_out()
def check_private(subject: Subject, folder: Path) -> None:
    """What says that it is `image_by_image` has a loss that is a mean over images, and trains with noise."""
    if find_spec("opacus") is None or find_spec("dp_accounting") is None:
        raise Skipped("install the extra privacy")
    assert_finite(subject.run(folder / "private", *PRIVATE))
    method = with_client(get_method(subject.config().method), _singly)
    subject.run(folder / "single", "train.rounds=1", "net.group_norm=true", method=method)


def _singly(client: type[Client]) -> type[Client]:
    """The client of a method, whose loss of a batch must be the mean of the losses of its images."""

    class Single(client):  # type: ignore[misc, valid-type]
        """The client, with its first loss of each round looked at."""

        looked = -1

        def loss(self, batch: Batch, out: Any) -> Tensor:
            found: Tensor = super().loss(batch, out)
            if self.looked != self.workplace.round:
                self.looked = self.workplace.round
                size = len(batch.label)
                alone = [_image(vars(batch), size, place) for place in range(size)]
                with torch.no_grad():
                    losses = [super(Single, self).loss(one, self.outputs(one)) for one in alone]
                mean = torch.stack(losses).mean()
                assert torch.allclose(found.detach(), mean, rtol=1e-3, atol=1e-5), (
                    f"the loss of a batch is {found.item():.4f}, the mean of its images' losses {mean.item():.4f}; "
                    "leave image_by_image out"
                )
            return found

    Single.image_by_image = client.image_by_image
    return Single


def _image(fields: Mapping[str, Any], size: int, place: int) -> Batch:
    """One image of a batch with all that belongs to it."""
    alike = {name: isinstance(value, Tensor) and value.dim() and len(value) == size for name, value in fields.items()}
    return Batch(**{name: value[place : place + 1] if alike[name] else value for name, value in fields.items()})


@refusals_left_out()
def check_masks(subject: Subject, folder: Path) -> None:
    """It segments images that have masks, or says why it does not."""
    if subject.has_data:
        raise Skipped("its images are its own")
    settings = ("data.phantom.masks=true", "data.phantom.images=60", "train.rounds=1")
    assert_finite(subject.run(folder / "masks", *settings))
