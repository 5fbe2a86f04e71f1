"""Everything that leaves a site: the replies that a method declares, and what every run needs or may learn."""

from __future__ import annotations

from equipoise.contract.disclosed import Entry
from equipoise.contract.method import Client, Method
from equipoise.engine.slot import EVALUATE
from equipoise.tasks import Task
from equipoise.tasks.classification import Classification

DESCRIBE = "describe"
COUNTS = "counts"
PROGRESS = "progress"

#: {action: {entry: its meaning}}
Sheet = dict[str, dict[str, str]]

#: what every run needs besides the method's own replies
ALWAYS: Sheet = {
    DESCRIBE: {
        COUNTS: Entry(
            "number of local images of each class in the training, validation and test part. With it go the names of "
            "the classes, warnings without file names, and a digest that shows changes",
            "counts",
        )
    },
    EVALUATE: {COUNTS: Entry(Classification.discloses, "measured")},
}

#: what a site tells of its work with every answer, if its policy allows; runs do without
OPTIONAL: Sheet = {
    PROGRESS: {
        "loss": "mean training loss",
        "examples": Entry("number of images seen in training, repeats included", "images"),
        "steps": "number of training steps",
        "seconds": "duration of the work",
    }
}


#: what leaves a site when images are pooled
POOLED: Sheet = {"pool": {"images": "all images, with their labels: training is at one place"}}


def needed(replies: Sheet) -> Sheet:
    """What has to leave a site for a method to run: its own replies, and what every run needs."""
    return {action: dict(entries) for action, entries in replies.items() if entries} | ALWAYS


def disclosure_sheet(client: type[Client]) -> Sheet:
    """Everything that leaves a site when a method runs, what a site may keep to itself included."""
    return needed(client.discloses) | OPTIONAL


def run_sheet(method: Method, client: type[Client], task: type[Task] = Classification) -> Sheet:
    """What leaves a site in a run with this client of a method."""
    measured: Sheet = {EVALUATE: {COUNTS: Entry(task.discloses, "measured")}}
    return POOLED if method.pooled else disclosure_sheet(client) | measured


def widest_sheet(method: Method) -> Sheet:
    """What may leave a site under any options of a method."""
    return POOLED if method.pooled else needed(method.widest_sheet()) | OPTIONAL
