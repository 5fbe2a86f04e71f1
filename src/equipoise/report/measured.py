"""The metrics of a run's task: the ones in its report, and the default one."""

from __future__ import annotations

from equipoise.mask_metrics import MASK_METRICS
from equipoise.metrics import METRICS, Metric
from equipoise.report.log_lines import Start
from equipoise.report.record import RunRecord
from equipoise.tasks import get_task

#: the metrics of every task; except for the loss, tasks name different ones
EVERY: tuple[Metric, ...] = (*METRICS, *(metric for metric in MASK_METRICS if metric.name != "loss"))
TITLES = {metric.name: metric.title for metric in EVERY}


def metrics_of(run: RunRecord) -> tuple[Metric, ...]:
    """The metrics that a run measured, the first one in front."""
    return get_task(run.start.task).metrics


def main_metric(run: RunRecord) -> Metric:
    """The default metric."""
    return metrics_of(run)[0]


def in_words(run: RunRecord) -> str:
    """The main metric's title within a sentence."""
    title = main_metric(run).title
    return title if is_dense(run) else title.lower()


def is_dense(run: RunRecord) -> bool:
    """Whether a run predicts a class for each pixel."""
    return get_task(run.start.task).dense


def unit_of(start: Start) -> str:
    """What the class counts of a run count."""
    return "pixels" if get_task(start.task).dense else "images"
