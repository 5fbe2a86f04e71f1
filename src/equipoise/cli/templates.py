"""What `equipoise new` writes: a plug-in of each kind that runs at once, and its test."""

from __future__ import annotations

METHOD = '''"""NAME: FedAvg whose server moves a part of the way to the mean of the sites' models."""

from pydantic import Field

import equipoise as eq


class Options(eq.Options):
    """One number."""

    part: float = Field(0.5, gt=0, le=1, description="part of the way; 1: FedAvg")


class Server(eq.FedAvgServer):
    """Merges the replies of a round."""

    def merge(self, replies, number):
        mean = super().merge(replies, number)
        part, old = self.setting.options.part, self.state.model
        return {key: old[key].lerp(new, part) if new.is_floating_point() else new for key, new in mean.items()}


METHOD = eq.Method(
    server=Server, client=eq.FedAvgClient, paper="unpublished", year=2026, changes="server step", options=Options
)
'''

COMPONENT = '''"""NAME: the squares of the logits cost a little."""

from pydantic import Field

import equipoise as eq


class Site(eq.SiteSide):
    """Adds the term to the loss of a step."""

    def loss(self, batch, out, loss):
        return loss + self.options.weight * out.logits.square().mean()


class NAME(eq.Component):
    """The term and its weight."""

    name = "TABLE"
    paper = "unpublished"
    rank = 45
    Site = Site

    weight: float = Field(0.01, ge=0, description="factor of the term; 0: none")


COMPONENT = NAME
'''

NET = '''"""A small net: two convolutions and a linear head."""

from torch import nn


def make(num_classes: int, channels: int) -> nn.Module:
    """The net; it gives logits (B, classes) of images (B, channels, H, W)."""
    first = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
    second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(first, second, nn.Flatten(), nn.Linear(32, num_classes))


NET = make
'''

SOURCE = '''"""NAME: images in folders site/class. It draws some where there are none; put yours there."""

from pathlib import Path

import numpy as np
from PIL import Image

import equipoise as eq

TITLE = "NAME, images in folders site/class"
SIZE = 16
PARTITION = "source"


def listing(config, root):
    """One record per image: a name, the file, the class, the site, and a group that stays in one part."""
    folder = Path(root) / "STEM_images"
    if not folder.is_dir():
        draw(folder)
    files = sorted(folder.glob("*/*/*.png"))
    classes = tuple(sorted({file.parent.name for file in files}))
    records = tuple(
        eq.Record(
            name=str(file.relative_to(folder)),
            location=eq.Location(file),
            label=classes.index(file.parent.name),
            site=file.parent.parent.name,
            group=file.stem,
        )
        for file in files
    )
    return eq.Listing(config.name, classes, records)


def draw(folder):
    """Stripes, level or steep, at three sites."""
    random = np.random.default_rng(0)
    for number in range(90):
        site, label = "ABC"[number % 3], ("level", "steep")[number // 3 % 2]
        stripes = np.indices((16, 16))[int(label == "steep")] % 4 < 2
        file = folder / site / label / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((random.integers(0, 120, (16, 16)) + 130 * stripes).astype(np.uint8)).save(file)
'''

LOSS = '''"""NAME: cross entropy weighted by inverse frequencies of classes at the site."""

from torch.nn import functional as F


def loss(logits, labels, class_counts):
    """The mean loss of logits (B, C), labels (B,), class_counts (C,)."""
    return F.cross_entropy(logits, labels, weight=class_counts.sum() / (class_counts + 1))


LOSS = loss
'''

METRIC = '''"""NAME: Cohen's kappa, agreement beyond chance."""

import equipoise as eq


def metric(tally: eq.Tally) -> float:
    """The metric of counts over images; higher is better."""
    shares = tally.confusion / tally.confusion.sum()
    chance = float(shares.sum(0) @ shares.sum(1))
    return (tally.accuracy - chance) / (1 - chance) if chance < 1 else 0.0


METRIC = metric
'''

TEXTS = {
    "method": METHOD,
    "component": COMPONENT,
    "net": NET,
    "source": SOURCE,
    "loss": LOSS,
    "metric": METRIC,
}
#: how a run names a plug-in
RUNS = {
    "method": "--method",
    "component": "--with",
    "net": "--net",
    "source": "--data",
    "loss": "--set train.loss=",
    "metric": "--set evaluation.metric=",
}

TEST = '''"""STEM keeps what every plug-in of Equipoise keeps."""

from pathlib import Path

import pytest

from equipoise.checks.battery import CHECKS, findings
from equipoise.checks.subjects import subjects_of

FILE = str(Path(__file__).with_name("STEM.py"))
SUBJECTS = dict(subjects_of(FILE))


@pytest.mark.parametrize("title", CHECKS)
@pytest.mark.parametrize("kind", SUBJECTS)
def test_it_keeps(kind, title, tmp_path):
    (finding,) = findings(SUBJECTS[kind], tmp_path, [title])
    assert finding.kept, finding.told
'''


def text_of(kind: str, stem: str) -> str:
    """The plug-in's file."""
    title = "".join(part.capitalize() for part in stem.split("_"))
    return TEXTS[kind].replace("NAME", title).replace("STEM", stem).replace("TABLE", stem.replace("_", "-"))


def test_of(kind: str, stem: str) -> str:
    """The file of its test."""
    return TEST.replace("STEM", stem)
