"""A run's folder as an object: scores, histories, predictions and models."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import torch

from equipoise.api import frames
from equipoise.api.objects import component_settings, name_of
from equipoise.api.other_data import BATCH, federation_like, measured_masks, names_by_hash, predicted
from equipoise.api.training_runs import refuse_no_federation
from equipoise.contract.component import Component
from equipoise.contract.config import Config
from equipoise.contract.method import Method
from equipoise.core.errors import UserError
from equipoise.data.federation import Federation
from equipoise.engine.events import first_event
from equipoise.engine.image_scores import FILE, Predictions
from equipoise.engine.predicted_masks import predicted_masks
from equipoise.engine.prediction import (
    Predictor,
    load_predictor,
    pixels_of,
    probabilities_of,
    refuse_masks,
)
from equipoise.engine.runs import config_of, make_config
from equipoise.engine.volume_scores import VOLUMES, read_volume_scores
from equipoise.evidence.actions import action_frame
from equipoise.evidence.curve_frames import curve_frame
from equipoise.evidence.recomputed import read_predictions
from equipoise.metrics import METRICS
from equipoise.nets import outside_modules as nets
from equipoise.report import RunRecord, read_run, write_report
from equipoise.tasks import Task, get_task

if TYPE_CHECKING:
    from equipoise.data.pixels import Images

#: columns of `Result.scores` that a notebook shows first
HEADLINE = tuple(metric.name for metric in METRICS if metric.in_tables)


def load_result(
    path: Path | str,
    net: Any = None,
    method: Method | None = None,
    components: Sequence[type[Component] | Component] = (),
    loss: Any = None,
) -> Result:
    """The result in a run's folder, finished or not.

    >>> import equipoise as eq
    >>> fed = eq.load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> _ = eq.train(fed, "local", rounds=1, epochs=1, out="runs/local")
    >>> eq.load_result("runs/local").config.method
    'local'

    Args:
        net, method, components, loss: objects that the run got, which only the process that trained it knows

    Raises:
        UserError: where the folder holds no run
    """
    folder = Path(path)
    if not (folder / "events.jsonl").is_file():
        there = sorted(str(log.parent) for log in folder.glob("*/events.jsonl")) if folder.is_dir() else []
        raise UserError(
            f"{folder} holds no run: it has no events.jsonl; "
            + (f"its folders {', '.join(there[:5])} do" if there else "name a folder that train or `run` has written")
        )
    result = Result(folder)
    if method is not None:
        name_of("method", method)
    component_settings(components)
    if loss is not None:
        name_of("loss", loss)
    if net is not None:
        nets.named(net, result.config.net.name)
    return result


class Result:
    """A run in its folder. Every call reads the folder anew.

    >>> import equipoise as eq
    >>> fed = eq.load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> result = eq.train(fed, rounds=1, epochs=1, out="runs/mine")
    >>> sorted(result.history()["round"].unique().tolist()), len(result.predictions(fed)) > 0
    ([0, 1], True)
    >>> result.model()(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape
    torch.Size([2, 3])
    >>> {"balanced_accuracy", "macro_f1"} <= {*result.scores(), *result.evaluate()}
    True
    >>> result.resume(rounds=2).report().name
    'report.html'

    Args:
        path: the run's folder
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Result({str(self.path)!r}: {self.config.method} on {self.config.data.name}, {self.record().status})"

    def _repr_html_(self) -> str:
        """What a notebook shows: what was run, and the scores over sites."""
        table = self.scores()
        shown = table[table["scope"] != "site"] if (table["scope"] != "site").any() else table
        columns = [name for name in ("view", "scope", "split", "round", *HEADLINE) if name in shown.columns]
        title = f"{self.config.method} on {self.config.data.name}, {self.record().status}"
        notes = "".join(f"<li>{html.escape(text)}</li>" for text in self.warnings)
        return (
            f"<p><b>{html.escape(title)}</b><br><code>{html.escape(str(self.path))}</code></p>"
            + str(shown[columns].to_html(index=False, float_format="{:.3f}".format, na_rep="-"))
            + (f"<ul>{notes}</ul>" if notes else "")
        )

    @cached_property
    def config(self) -> Config:
        """The settings of the run, defaults included."""
        return config_of(self.path)

    def record(self) -> RunRecord:
        """The events of the run as typed values."""
        return read_run(self.path)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.record().finished

    @property
    def warnings(self) -> list[str]:
        """What the run warned about."""
        return list(self.record().warnings)

    @property
    def task(self) -> type[Task]:
        """What the run learned: classification or segmentation."""
        return get_task(first_event(self.path / "events.jsonl").get("task", "classification"))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return tuple(self.record().start.classes)

    # ---- tables ----------------------------------------------------------------------------------

    def scores(self, interval: bool = False, by: str | Sequence[str] = ()) -> pd.DataFrame:
        """The test scores of the selected models.

        A row is a view: "global", "personal" or "trained" (right after local training). Its scope is a site, the mean
        over sites, all images pooled, or an unseen cohort. Without test images, scores are of validation images.

        Args:
            interval: add the bounds of 95 % intervals, as `low(metric)` and `high(metric)`. Groups of images (lesions,
                patients) are drawn with replacement within each site, sites too from ten sites on.
            by: columns of the images, such as "sex" or ["sex", "age"]: a row for each sub-group
        """
        columns = [by] if isinstance(by, str) else [*by]
        metrics = [metric.name for metric in METRICS] if interval else []
        if columns:
            found = self._predictions()
            return frames.measured(found.where(found.columns["split"] == self._scored_split()), columns, metrics)
        table = frames.scores(self.record())
        shown = [name for name in metrics if name in table]
        return frames.with_intervals(table, self._predictions(), shown) if interval else table

    def columns(self) -> list[str]:
        """The columns of the images by which `scores(by=...)` makes sub-groups."""
        return [*self._predictions().extra]

    def curves(self, kind: Literal["roc", "precision-recall", "reliability", "net-benefit"] = "roc") -> pd.DataFrame:
        """The points of curves of the reported models on test images, by view, site and class; pooled where the site
        is empty.

        - "roc": false alarms (x) against sensitivity (y), with the threshold of each point;
        - "precision-recall": recall (x) against precision (y);
        - "reliability": confidence (x) against accuracy (y), as the model gives it and after temperature scaling, with
          the temperature of the site's validation images;
        - "net-benefit": threshold (x) against net benefit (y), and that of treating everybody.
        """
        return curve_frame(self._predictions(), kind, self._scored_split())

    def actions(self) -> pd.DataFrame:
        """How the method acted: what its components noted in each round, such as steps, weights, margins and losses.

        A line is a number: of a round, a site (empty: the server), and where it has them a class and a sub-cluster.
        """
        record = self.record()
        return action_frame(record.lines(record.actions.values()), self.classes)

    def _scored_split(self) -> str:
        return "test" if len(self.record().finals) else "valid"

    def history(self, kind: Literal["evaluation", "training"] = "evaluation") -> pd.DataFrame:
        """The scores of every round, or with "training" the losses, times and traffic of every site."""
        kinds = {"evaluation": frames.evaluations, "training": frames.training}
        if kind not in kinds:
            raise UserError(f"there is no history {kind!r}; there are {', '.join(kinds)}")
        return kinds[kind](self.record())

    def predictions(self, federation: Federation | None = None) -> pd.DataFrame:
        """What the selected models predict for each validation and test image.

        Images and groups are hashes, equal in all runs on the same images.

        Args:
            federation: the run's data; with it, columns `name` and `group_name` say which images these are
        """
        table = frames.predictions(self._predictions())
        if federation is not None:
            names, groups = names_by_hash(federation)
            table.insert(0, "name", table["image"].map(names))
            table.insert(1, "group_name", table["group"].map(groups))
        return table

    # ---- models ------------------------------------------------------------------------------------

    def model(self, site: str | None = None) -> Predictor:
        """The selected global model, or a site's personal one, ready to use.

        It is a `torch.nn.Module` in eval mode on the CPU. It takes pixels, uint8 (n, 3, size, size), normalises them
        itself, and gives probabilities (n, classes). Its `logits` gives logits.
        """
        return load_predictor(self.path, site)

    def predict(self, images: Images | Sequence[Path | str] | Path | str, site: str | None = None) -> pd.DataFrame:
        """The predicted class and the probability of each class, for new images.

        Args:
            images: files, or a folder of them, or images as `Federation.from_arrays` takes them
            site: use this site's personal model
        """
        predictor = self.model(site)
        refuse_masks(predictor, "use masks(images)")
        pixels, names = pixels_of(predictor, images)
        found = torch.cat([probabilities_of(predictor, batch) for batch in pixels.split(BATCH)]).numpy()
        best = np.array(predictor.classes)[found.argmax(1)]
        table = pd.DataFrame({"prediction": best}, index=pd.Index(names, name="image"))
        return pd.concat([table, frames.probabilities(predictor.classes, found).set_index(table.index)], axis=1)

    def masks(self, images: Images | Sequence[Path | str] | Path | str, site: str | None = None) -> list[np.ndarray]:
        """The predicted mask of each new image, uint8 (height, width) of class numbers, as large as the image.

        Args:
            images: files, or a folder of them, or images as `Federation.from_arrays` takes them
            site: use this site's personal model
        """
        return [mask for _, mask in predicted_masks(self.model(site), images)]

    def volumes(self) -> pd.DataFrame:
        """Dice, IoU and surface distances of each structure in each patient's volume, for each reported model.

        Patients are hashes, equal in all runs on the same images.
        """
        path = self.path / VOLUMES
        if not path.exists():
            raise UserError(f"{self.path} holds no scores of volumes; only a finished run of segmentation does")
        return read_volume_scores(path)

    def evaluate(
        self,
        federation: Federation | str | None = None,
        site: str | None = None,
        split: str | None = None,
        by: str | Sequence[str] = (),
        interval: bool = False,
    ) -> pd.DataFrame:
        """The scores of the selected models on the images of another federation, at each of its sites and pooled.

        Without a federation, the scores are computed again from the run's own predictions: those of test images equal
        the run's own scores.

        Args:
            federation: labelled images of the run's classes, with the run's size; or the name of a source, such as
                `folder:DIR`, which is read as the run's images were
            site: measure this site's personal model; by default the global one, or every personal one
            split: only train, valid or test images; by default all
            by, interval: sub-groups and intervals, as in `scores`
        """
        columns = [by] if isinstance(by, str) else [*by]
        metrics = [metric.name for metric in METRICS] if interval else []
        if isinstance(federation, str):
            federation = federation_like(self, {"name": federation})
        refuse_no_federation(federation)
        if self.task.dense:
            if columns or interval:
                raise UserError("sub-groups and intervals are of classification; leave by and interval out")
            return measured_masks(self, federation, site, split)
        if federation is not None:
            return frames.measured(predicted(self, federation, site, split), columns, metrics)
        found = self._predictions()
        kept = np.ones(len(found), dtype=bool)
        for name, wanted in (("split", split), ("site", site)):
            if wanted is not None:
                kept &= found.columns[name] == wanted
        if not kept.any():
            raise UserError(f"{self.path} holds no predictions of split {split!r} at site {site!r}; leave one out")
        return frames.measured(found.where(kept), columns, metrics)

    # ---- the run ------------------------------------------------------------------------------------

    def audit(self, shadows: int = 16, seed: int = 1) -> pd.DataFrame:
        """Membership inference against the run's models (LiRA): all images, each class from the rarest on, each site.

        `auc` 0.5 and `found` 0.01 are chance; `found` is the share of training images found at a false alarm rate of
        one per cent. Shadow runs are trained where they are missing.
        """
        from equipoise.engine.auditing import audit

        return frames.attacks(audit(self.path, shadows, seed))

    def report(self) -> Path:
        """The path of the run's report, written anew if the run has gone on since."""
        page, log = self.path / "report.html", self.path / "events.jsonl"
        if not page.exists() or page.stat().st_mtime < log.stat().st_mtime:
            write_report([self.path])
        return page

    def resume(self, rounds: int | None = None, progress: bool | None = None) -> Result:
        """Go on after the last complete round, to the end of the run or, with more `rounds`, beyond it."""
        from equipoise.api.training_runs import run_config

        config = make_config(str(self.path / "config.toml"), train={"rounds": rounds or self.config.train.rounds})
        self.__dict__.pop("config", None)
        return run_config(config, self.path, resume=True, progress=progress)

    def _predictions(self) -> Predictions:
        return read_predictions(self.path, (self.path / FILE).exists() or self.finished)
