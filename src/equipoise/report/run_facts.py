"""What there is to say of a run besides its scores: how its round was chosen, what it cost, who was left out."""

from __future__ import annotations

import pandas as pd

from equipoise.report.log_lines import Selection
from equipoise.report.measured import TITLES, in_words, metrics_of
from equipoise.report.record import RunRecord, setting
from equipoise.report.run_tables import COLUMNS, headline
from equipoise.report.sheet import Sheet, sheet
from equipoise.report.wording import UNKNOWN, duration, percent, ranges, traffic

#: of a parameter in float32
BYTES = 4
#: the work of a training step in forward passes
FORWARD_AND_BACKWARD = 3


def key_numbers(run: RunRecord) -> list[tuple[str, str, str]]:
    """The few numbers to see first, as (title, per cent, remark), of the view that sites are left with."""
    rows = headline([run])
    own = rows[rows["view"] == run.end_view]
    rows = own if len(own) else rows
    if not len(rows):
        return []
    means = rows[rows["scope"] == "mean"]
    row = (means if len(means) else rows).iloc[0]
    remark = f"{row['view']} view, {row['title']}{_of_how_many(run, row)}"
    remark += "" if row["part"] == "test" else ", validation"
    opening = {metric.name for metric in metrics_of(run) if metric.opens} | {"worst_site"}
    at = f"{in_words(run)} at {row['worst']}"
    return [
        (column.title, column.told(row[column.name]), at if column.name == "worst_site" else remark)
        for column in COLUMNS
        if column.name in opening and pd.notna(row[column.name])
    ]


def _of_how_many(run: RunRecord, row: pd.Series) -> str:
    """How many sites a mean is of, where some with images of the part were lost."""
    measured = ((run.results["scope"] == "site") & (run.results["view"] == row["view"])).sum()
    holders = (run.images[row["part"]].loc[run.training_images.index].sum(axis=1) > 0).sum()
    return f" ({measured} of {holders})" if row["scope"] == "mean" and measured < holders else ""


def facts(run: RunRecord) -> dict[str, str]:
    """What a run was, by title."""
    start, totals, sites = run.start, run.training_images.sum(), len(run.training_images)
    data = f"{sites} training site{'s' if sites != 1 else ''}, {totals.sum():,} training images of "
    data += f"{len(start.classes)} classes"
    data += f", commonest to rarest {totals.max() / totals.min():.1f} : 1" if totals.min() else ""
    data += f"; only evaluated: {', '.join(run.evaluators)}" if run.evaluators else ""
    size = f", {traffic(start.model_bytes)}" if start.model_bytes else ""
    return {
        "Method": start.method,
        "Paper": start.paper,
        "Status": run.status,
        "Data": setting(start.config, "data", "name") or "",
        "Federation": data,
        "Model": f"{start.parameters:,} parameters{size}" if start.parameters else "",
        "Seed": str(start.config.get("seed", "")),
        "Started": start.time.replace("T", " ")[:16],
        "Duration": duration(run.seconds or 0.0) if run.finished else "",
        "Device": start.device,
        "Version": start.version and f"Equipoise {start.version}",
    }


# ---- cost ------------------------------------------------------------------------------------------------------


def model_size(run: RunRecord) -> str:
    """The size of the model, a dash when unknown."""
    return traffic(run.start.model_bytes) if run.start.model_bytes else UNKNOWN


def work_by_site(run: RunRecord) -> Sheet:
    """Work and traffic per site: means over the rounds it took part in, and the sum."""
    by_site = run.work.groupby("site", sort=False, observed=True)
    means = by_site.mean(numeric_only=True)
    total = by_site["sent"].sum() + by_site["received"].sum()
    return sheet(
        "Work and traffic by site: means over the rounds in which the site took part, and the sum over the run."
        + _beside_full_training(run),
        {"Site": means.index},
        {
            "Rounds": by_site.size().map(str),
            "Images per round": means["examples"].map("{:,.0f}".format),
            "Seconds per round": means["seconds"].map("{:.2f}".format),
            "Sent per round": means["sent"].map(traffic),
            "Received per round": means["received"].map(traffic),
            "Traffic in all": total.map(traffic),
        },
    )


def _beside_full_training(run: RunRecord) -> str:
    """What a run on features of a frozen encoder saved, as sentences; empty for other runs."""
    found = _of_full_training(run, run.work["sent"].mean() if len(run.work) else 0.0)
    return "".join(f" {title}: {value}." for title, value in found.items())


def costs(run: RunRecord) -> dict[str, str]:
    """What a run cost in all and per round, where traffic is the mean over sites."""
    seconds = run.rounds["seconds"].sum()
    sent, received = (run.work[way].mean() if len(run.work) else 0.0 for way in ("sent", "received"))
    return {
        "Parameters": f"{run.start.parameters:,}" if run.start.parameters else UNKNOWN,
        "Model size": model_size(run),
        "Rounds": str(run.last_round),
        "Time": duration(seconds),
        "Time per round": duration(seconds / max(len(run.rounds), 1)),
        "Sent per round": traffic(sent),
        "Received per round": traffic(received),
        "Traffic in all": traffic(int((run.work["sent"] + run.work["received"]).sum())),
        **_of_full_training(run, sent),
    }


def _of_full_training(run: RunRecord, sent: float) -> dict[str, str]:
    """What training the frozen encoder too would cost: its weights on the way, and thrice its time for an image.

    A step goes forward, and backward through inputs and weights: three times the work of a forward pass.
    """
    encoder = run.start.encoder
    if not encoder:
        return {}
    found = {"Sent per round, full training": traffic(sent + BYTES * encoder["parameters"])}
    if encoder.get("seconds"):
        images = run.work["examples"].sum() / max(len(run.rounds), 1) if len(run.work) else 0
        found["Time per round, full training (estimate)"] = duration(FORWARD_AND_BACKWARD * images * encoder["seconds"])
    return found


def left_out(run: RunRecord) -> list[tuple[str, str, str]]:
    """Sites that were left out, as (site, rounds, why)."""
    absences: dict[tuple[str, str], list[int]] = {}
    for number, site, why in run.missing:
        absences.setdefault((site, why), []).append(number)
    return [(site, ranges(numbers), why) for (site, why), numbers in absences.items()]


# ---- how the round was chosen ----------------------------------------------------------------------------------


def selection_note(run: RunRecord) -> str:
    """How the reported round was chosen, in a sentence to print under a table."""
    if not len(run.finals):
        return f"{_why_no_test_results(run)}: these are the validation scores of {_rounds_shown(run)}."
    tested = {*run.finals["site"][run.finals["scope"] == "site"]}
    rules = {*run.finals["rule"]}
    chosen = [_selection_sentence(selection, tested) for selection in run.selections if selection.rule in rules]
    first = run.finals.iloc[0]
    chosen = chosen or [f"Rule {first['rule']}, round {first['round']}"]
    return f"{'. '.join(chosen)}. Test data took no part in the choice."


def _why_no_test_results(run: RunRecord) -> str:
    if not run.finished:
        return "No test results yet"
    return "The test data was not measured" if run.images["test"].any(axis=None) else "There is no test data"


def _rounds_shown(run: RunRecord) -> str:
    if run.selection and run.selection.sites:
        return "the rounds that sites chose"
    shown = run.results["round"].max() if len(run.results) else 0
    averaged = run.selection and run.selection.rule == "mean_last"
    return f"the last rounds up to {shown}, averaged" if averaged else f"round {shown}"


def _selection_sentence(selection: Selection, tested: set[str]) -> str:
    title = TITLES.get(selection.metric, selection.metric).lower()
    value = f"{title} ({selection.view} view), {percent(selection.score)} %"
    if selection.sites:
        rounds = ", ".join(f"{site} {choice.round}" for site, choice in selection.sites.items())
        others = f"; the others {selection.round}" if tested - selection.sites.keys() else ""
        return f"For each site the round that is best by its own validation {value} on average: {rounds}{others}"
    if selection.missing:
        value += f" (not measured at {', '.join(selection.missing)})"
    match selection.rule:
        case "mean_last" if selection.value is None:
            return f"No validation data: the mean over the last rounds up to {selection.round}"
        case _ if selection.value is None:
            return f"No validation data: the last round, {selection.round}"
        case "best":
            return f"Selected round {selection.round}, the best by validation {value}"
        case "last":
            return f"The last round, {selection.round}; its validation {value}"
        case "mean_last":
            return f"Mean over the last rounds up to {selection.round}, of which the last has validation {value}"
    return f"Rule {selection.rule}: round {selection.round}, validation {value}"
