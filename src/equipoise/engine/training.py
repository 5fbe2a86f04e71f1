"""The one local training loop: epochs, batches, augmentation, steps. Methods supply hooks, engines the step's runner.

Everything here is a generator that yields after each issued step. So an engine can let several sites take turns; a
plain engine just exhausts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from equipoise.contract.method import Batch, Client, PerBatch
from equipoise.contract.protocol import Evaluate, Scan, Tensors, Train
from equipoise.contract.tables import TrainConfig
from equipoise.core.streams import generator
from equipoise.data.augment import Augmentation
from equipoise.data.federation import Site, Split
from equipoise.nets.rounding import batches_rounded_up
from equipoise.tasks import Task

#: float32 bytes of augmented images that are made at a time, by device type
CHUNK_BYTES = {"cpu": 1 << 23, "cuda": 1 << 28}
#: share of a GPU's free memory that one part's images may take
RESIDENT_SHARE = 0.4


class Readable(Protocol):
    """Images that are read in batches."""

    device: torch.device

    def __len__(self) -> int: ...

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Images, uint8 (b, C, H, W), and their targets at `positions` (b,), which lie on the host."""


class Part:
    """One part of a site's images as the loop reads them: uint8 batches and targets on the device.

    A GPU holds the part where it fits; else its images are paged in through pinned memory. A CPU reads the map.
    """

    def __init__(self, split: Split, device: torch.device, task: Task):
        self.split = split
        self.device = device
        self.task = task
        self.host_labels = torch.from_numpy(split.labels)
        everything = torch.arange(len(split))
        fits = _fits(split, device, task)
        self._resident = split.images(everything).to(device) if fits else None
        #: labels are few enough to lie on any device
        self._targets = task.targets(split, everything).to(device) if fits or not task.dense else None

    def __len__(self) -> int:
        return len(self.split)

    def read(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Images, uint8 (b, C, H, W), and their targets at `positions` (b,), which lie on the host."""
        there = _to_device(positions, self.device)
        if self._resident is None:
            images = _to_device(self.split.images(positions), self.device)
        else:
            images = self._resident[there]
        if self._targets is None:
            return images, _to_device(self.task.targets(self.split, positions), self.device)
        return images, self._targets[there]


def _fits(split: Split, device: torch.device, task: Task) -> bool:
    """Whether the images of a split, and their targets, may stay on a GPU beside the training that uses them."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    first = torch.arange(1)
    one = split.images(first).numel() + (task.targets(split, first).numel() if task.dense else 0)
    return len(split) * one < RESIDENT_SHARE * free


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device; from pinned memory, so that the host does not wait for the device's queue."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class SiteData:
    """A site's parts, opened when first used."""

    def __init__(self, site: Site, task: Task, device: torch.device):
        self.site = site
        self.device = device
        self.task = task
        self.class_counts = torch.from_numpy(site.class_counts(task.num_classes)).float()
        self._parts: dict[str, Part] = {}

    def has(self, part: str) -> bool:
        """Whether the site has images in this part."""
        return part in self.site.splits and len(self.site.splits[part]) > 0

    def __getitem__(self, part: str) -> Part:
        if part not in self._parts:
            self._parts[part] = Part(self.site.splits[part], self.device, self.task)
        return self._parts[part]


class Steps(Protocol):
    """How a step is run: eagerly, or as a captured graph."""

    def seed(self, value: int) -> None:
        """Start the random stream that dropout and drop-connect draw from."""

    def __call__(self, client: Client, phase: str, batches: list[Batch], loss_sum: Tensor) -> None:
        """Run one step, and add its loss times its number of samples to `loss_sum`."""


def eager_step(client: Client, phase: str, batches: list[Batch], loss_sum: Tensor) -> None:
    """Run the client's step now, and add its loss times its number of samples to `loss_sum`."""
    loss = client.step(batches, client.workplace.phases[phase])
    loss_sum.add_(loss, alpha=sum(len(batch.label) for batch in batches))


class EagerSteps:
    """Runs each step at once."""

    __call__ = staticmethod(eager_step)

    def seed(self, value: int) -> None:
        """Seed torch's default generators."""
        torch.manual_seed(value)


@dataclass
class Progress:
    """What has been trained in one ask; epochs count on over several `Train`s."""

    loss_sum: Tensor
    epochs: int = 0
    steps: int = 0
    samples: int = 0

    def facts(self) -> dict[str, float]:
        """What a site tells of its training: mean loss, images, steps; nothing where it did not train."""
        if not self.samples:
            return {}
        return {"loss": float(self.loss_sum / self.samples), "examples": self.samples, "steps": self.steps}


def cut(order: Tensor, size: int) -> list[Tensor]:
    """Batches of `size`; the short last one trains too, and a last one of one joins the batch before it."""
    batches = list(order.split(size))
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def amount(work: Train, config: TrainConfig) -> tuple[int | None, int | None]:
    """The steps or else the epochs of a `Train`: its own, 0 included, before those of the config; one is None."""
    if work.steps is not None:
        return work.steps, None
    if work.epochs is not None:
        return None, work.epochs
    return (config.steps, None) if config.steps is not None else (None, config.epochs)


def train(
    client: Client, part: Part, augmentation: Augmentation, work: Train, progress: Progress, run_step: Steps
) -> Iterator[None]:
    """Issue the steps of one `Train`."""
    steps, epochs = amount(work, client.setting.config.train)
    progress.epochs = max(progress.epochs, work.first_epoch)
    last_step = None if steps is None else progress.steps + steps
    last_epoch = None if epochs is None else progress.epochs + epochs
    phase = client.workplace.phases[work.phase]
    client.workplace.set_mode(True, "eval" if len(part) == 1 else phase.norm)
    while progress.epochs != last_epoch and progress.steps != last_step:
        for group in _epoch(client, part, augmentation, progress.epochs):
            run_step(client, work.phase, group, progress.loss_sum)
            progress.steps += 1
            progress.samples += sum(len(batch.label) for batch in group)
            yield
            if progress.steps == last_step:
                break
        progress.epochs += 1


def _epoch(client: Client, part: Part, augmentation: Augmentation, epoch: int) -> Iterator[list[Batch]]:
    """The groups of batches of one epoch, one group per step."""
    shuffling = torch.Generator().manual_seed(client.workplace.stream("order", epoch))
    if client.workplace.private is None:
        batches = cut(client.workplace.order(part.host_labels, shuffling), client.setting.config.train.batch_size)
    else:
        batches = client.workplace.private.draw(len(part), shuffling)
    randomness = client.random("augment", epoch)
    together = client.workplace.batches_per_step
    for chunk in _chunks(batches, augmentation, together, part.device):
        made = list(_make_chunk(client, part, augmentation, chunk, randomness))
        for start in range(0, len(made), together):
            group = made[start : start + together]
            yield group + group[-1:] * (together - len(group))


def _chunks(
    batches: list[Tensor], augmentation: Augmentation, multiple: int, device: torch.device
) -> Iterator[list[Tensor]]:
    """Runs of batches that are augmented together; a whole number of steps each."""
    sample = 4 * augmentation.channels * augmentation.size**2
    batch = max(len(batches[0]), 1)
    count = max(CHUNK_BYTES[device.type] // (sample * batch) // multiple, 1) * multiple
    for start in range(0, len(batches), count):
        yield batches[start : start + count]


def _make_chunk(
    client: Client, part: Part, augmentation: Augmentation, batches: Sequence[Tensor], randomness: torch.Generator
) -> Iterator[Batch]:
    """Read, augment and prepare a run of batches at once, then cut it up."""
    pixels, targets = part.read(torch.cat(list(batches)))
    images, labels = client.setting.task.augmented(augmentation.view(0), pixels, targets, randomness)
    fields: dict[str, Tensor | PerBatch] = {"label": labels, "image": _layout(client, images)}
    if client.workplace.image_views > 1:
        fields["second"] = _layout(client, augmentation.view(1)(pixels, randomness))
    chunk = Batch(**fields, batches=len(batches))
    with torch.no_grad():
        fields.update(client.prepare(chunk))
    sizes = [len(batch) for batch in batches]
    pieces = {
        name: value.rows.unbind(0) if isinstance(value, PerBatch) else value.split(sizes)
        for name, value in fields.items()
    }
    for index in range(len(batches)):
        yield Batch(**{name: rows[index] for name, rows in pieces.items()})


def _layout(client: Client, images: Tensor) -> Tensor:
    return (
        images.contiguous(memory_format=torch.channels_last) if client.setting.config.compute.channels_last else images
    )


@torch.no_grad()
def scan(client: Client, part: Readable, augmentation: Augmentation, work: Scan, *which: int) -> Tensors:
    """Run `work.function` over the part in eval mode and reduce what it gives; `which` of a round's passes this is."""
    client.workplace.set_mode(False)
    results: dict[str, list[Tensor]] = {}
    transform = augmentation.plain if work.view == "plain" else augmentation.view(0)
    if work.view == "cached":
        randomness = generator(part.device, client.setting.config.seed, "scan", "every round", client.workplace.site)
    else:
        randomness = client.random("scan", *which)
    for rows in torch.arange(len(part)).split(client.setting.config.evaluation.batch_size):
        pixels, targets = part.read(rows)
        images, labels = client.setting.task.augmented(transform, pixels, targets, randomness)
        with batches_rounded_up():
            found = work.function(Batch(image=_layout(client, images), label=labels))
        for name, value in found.items():
            kept = results.setdefault(name, [])
            if work.reduce == "sum" and kept:
                kept[0] = kept[0] + value
            else:
                kept.append(value)
    return {name: torch.cat(values) if work.reduce == "concatenate" else values[0] for name, values in results.items()}


def evaluate(
    client: Client, data: SiteData, augmentation: Augmentation, work: Evaluate, *which: int
) -> dict[str, Tensors]:
    """Confusion matrices of several predictors on one pass over the images, `which` of the round's it is."""
    task = client.setting.task
    part = data[work.part if data.has(work.part) else "train"]

    def count(batch: Batch) -> Tensors:
        return {name: task.confusion(predict(batch), batch.label) for name, predict in work.predictors.items()}

    sums = scan(client, part, augmentation, Scan(work.part, count, view=work.view), *which)
    return {name: {"confusion": value} for name, value in sums.items()}


def observed(client: Client, part: Readable, augmentation: Augmentation, view: str) -> Tensors:
    """What the task keeps of one of the client's models on a part, in the order of the data."""

    def observe(batch: Batch) -> Tensors:
        return client.setting.task.observe(client.predict(view, batch), batch.label)

    return scan(client, part, augmentation, Scan("", observe, reduce="concatenate"))
