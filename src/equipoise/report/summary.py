"""Short facts about a run in words: what it was, what it cost, who was left out of which rounds."""

from collections.abc import Iterable
from dataclasses import dataclass

from equipoise.report.record import RunRecord, setting
from equipoise.report.tables import METRIC_TITLES, HeadlineRow, headline, percent


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """What the run was, as name and value; what is unknown is left out."""
    start = run.start
    totals = [sum(counts) for counts in zip(*(site.train for site in run.training_sites))]
    images = f"{sum(totals):,} training images of {len(start.classes)} classes"
    ratio = f", commonest to rarest {max(totals) / min(totals):.1f} : 1" if totals and min(totals) else ""
    count = len(run.training_sites)
    federation = f"{count} training site{'' if count == 1 else 's'}, {images}{ratio}"
    if run.evaluators:
        federation += f"; only evaluated: {', '.join(run.evaluators)}"
    size = f", {model_bytes(run)}" if start.model_bytes else ""
    entries = [
        ("Method", start.method),
        ("Paper", start.paper),
        ("Status", run.status),
        ("Data", str(setting(start.config, "data", "name") or "")),
        ("Federation", federation),
        ("Model", f"{start.parameters:,} parameters{size}" if start.parameters else ""),
        ("Seed", "" if (seed := setting(start.config, "seed")) is None else str(seed)),
        ("Started", start.time.replace("T", " ")[:16]),
        ("Duration", duration(run.seconds) if run.seconds is not None else ""),
        ("Device", start.device),
        ("Version", f"Equipoise {start.version}" if start.version else ""),
    ]
    return [(name, value) for name, value in entries if value]


def key_numbers(run: RunRecord) -> list[tuple[str, str, str]]:
    """The few numbers to see first, as (title, per cent, remark), of the view that sites are left with."""
    rows = [row for row in headline([run]) if row.view == run.end_view] or headline([run])
    if not rows:
        return []
    row = next((row for row in rows if row.scope == "mean"), rows[0])
    remark = f"{row.view} view, {row.scope_title}{_of_how_many(run, row)}"
    remark += "" if row.part == "test" else ", validation"
    keys = ("balanced_accuracy", "macro_f1", "worst_class_recall", "worst_site")
    remarks = {"worst_site": f"balanced accuracy at {row.worst_site_name}" if row.worst_site_name else remark}
    return [
        (METRIC_TITLES[key], percent(row.values[key]), remarks.get(key, remark))
        for key in keys
        if row.values.get(key) is not None
    ]


def _of_how_many(run: RunRecord, row: HeadlineRow) -> str:
    """How many sites a mean is of, where some with images of the part were lost."""
    measured = sum(result.scope == "site" and result.view == row.view for result in run.results)
    holders = sum(any(site.test if row.part == "test" else site.valid) for site in run.training_sites)
    return f" ({measured} of {holders})" if row.scope == "mean" and measured < holders else ""


@dataclass(frozen=True)
class CostRow:
    """What one site did and moved over the whole run, ready to print."""

    site: str
    rounds: int
    images: str
    seconds: str
    sent: str
    received: str
    total: str


def cost_rows(run: RunRecord) -> list[CostRow]:
    """Work and traffic per site: means over the rounds it took part in, and the sum."""
    sites = list(dict.fromkeys(name for finished in run.rounds for name in finished.sites))
    rows = []
    for name in sites:
        work = [finished.sites[name] for finished in run.rounds if name in finished.sites]
        count = len(work)
        rows.append(
            CostRow(
                site=name,
                rounds=count,
                images=f"{sum(each.examples for each in work) / count:,.0f}",
                seconds=f"{sum(each.seconds for each in work) / count:.2f}",
                sent=traffic(sum(each.sent for each in work) / count),
                received=traffic(sum(each.received for each in work) / count),
                total=traffic(sum(each.sent + each.received for each in work)),
            )
        )
    return rows


def left_out(run: RunRecord) -> list[tuple[str, str, str]]:
    """Sites that were left out, as (site, rounds, why)."""
    absences: dict[tuple[str, str], list[int]] = {}
    for finished in run.rounds:
        for site, why in finished.missing.items():
            absences.setdefault((site, why), []).append(finished.round)
    return [(site, ranges(numbers), why) for (site, why), numbers in absences.items()]


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers with neighbours joined: 1, 3–5."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("–".join(str(end) for end in span) for span in spans)


def duration(seconds: float) -> str:
    """Seconds in the units a person would use."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def byte_unit(size: float) -> tuple[float, str]:
    """The decimal unit in which `size` bytes is a small number: (bytes per unit, name)."""
    for divisor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= divisor:
            return divisor, unit
    return 1.0, "bytes"


def traffic(size: float) -> str:
    """Bytes in a decimal unit."""
    divisor, unit = byte_unit(size)
    return f"{size / divisor:.2f} {unit}" if divisor > 1 else f"{size:.0f} bytes"


def model_bytes(run: RunRecord) -> str:
    """The size of the model, a dash when unknown."""
    return traffic(run.start.model_bytes) if run.start.model_bytes else "–"
