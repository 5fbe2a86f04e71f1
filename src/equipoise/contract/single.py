"""What secure sums refuse, by name: methods, components and settings whose server needs each site's own reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from equipoise.contract.component import Component, Options, Sheet
from equipoise.contract.config import Config
from equipoise.contract.summed import summing_of
from equipoise.core.errors import UserError
from equipoise.core.plugins import is_plugin
from equipoise.mask_metrics import MASK_METRICS
from equipoise.metrics import METRICS, metric_of

REMEDY = "leave it out, or set privacy.secure_sums = false"


def check_sums(config: Config, sheet: Sheet, options: Options, components: Sequence[Component], pooled: bool) -> None:
    """Refuse a config with `privacy.secure_sums` under which the server would have to see more than sums."""
    if not config.privacy.secure_sums:
        return
    if pooled:
        raise UserError(f"{config.method} pools all images, so there is nothing to add up securely; {REMEDY}")
    for why in needing_single(config.method, sheet, options, components):
        raise UserError(f"privacy.secure_sums hides what each site sends, but {why}; {REMEDY}")
    if config.evaluation.select == "site":
        raise UserError(
            "privacy.secure_sums hides each site's scores, which evaluation.select = 'site' chooses by; "
            "set evaluation.select = 'federation'"
        )
    addable = [metric.name for metric in (*METRICS, *MASK_METRICS) if metric.chooses and metric.needs != "auc"]
    if is_plugin("metric", config.evaluation.metric):
        addable += [config.evaluation.metric] if metric_of(config.evaluation.metric).needs != "auc" else []
    if config.evaluation.metric not in addable:
        raise UserError(
            f"evaluation.metric = '{config.evaluation.metric}' does not follow from sums over sites, and "
            f"privacy.secure_sums shows sums alone; choose one of {', '.join(addable)}"
        )


def needing_single(method: str, sheet: Sheet, options: Options, components: Sequence[Component]) -> Iterator[str]:
    """Why secure sums do not fit a method with its components, in words; nothing where they do."""
    own = {component.name for component in options.components()}
    for part, name in [(options, method), *((component, component.name) for component in components)]:
        if why := part.single_replies():
            yield (
                f"{name}, which is part of {method}, needs single replies: {why}"
                if name in own
                else (f"{name} needs single replies: {why}")
            )
    for action, entries in sheet.items():
        for entry, text in entries.items():
            if summing_of(text) is None:
                yield f"{method} needs single replies: '{entry}' of '{action}' is not marked as a sum"
