"""Several methods on the same data: a grid of runs with seeds, and its table of means, intervals and tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pandas as pd
import tomli_w
from rich.console import Console

from equipoise.api.grid_progress import GridProgress
from equipoise.api.objects import component_settings, name_of, with_names
from equipoise.api.result import Result
from equipoise.api.training_runs import data_of, is_watched, named_settings, nested, refuse_no_data
from equipoise.bootstrap import CONFIDENCE
from equipoise.contract.component import Component
from equipoise.contract.method import Method
from equipoise.core.device_names import devices_of
from equipoise.core.errors import UserError
from equipoise.core.outside import short_name
from equipoise.core.storage import write_text
from equipoise.core.table import dotted
from equipoise.core.validation import validated
from equipoise.data.federation import Federation
from equipoise.engine.image_scores import FILE, Predictions
from equipoise.engine.payload_files import claimed_folder
from equipoise.evidence.paired import LOW, MOST, SharedResamples, compared
from equipoise.evidence.recomputed import read_predictions
from equipoise.statistics import compare_with_best
from equipoise.studies.checks import is_finished, refuse_idle_rows
from equipoise.studies.devices import run_on_devices
from equipoise.studies.grid import cell_config, grid
from equipoise.studies.results import collect
from equipoise.studies.runner import run_grid
from equipoise.studies.study_file import StudyConfig, load_study
from equipoise.studies.study_files import write_study

STUDIES = Path("studies")
#: the file in a comparison's folder that says what is compared; `equipoise study` takes it, too
STUDY = "study.toml"
#: columns of the difference from the best method: its interval, how probably the method is better, effect size
DIFFERENCES = ("difference", "from", "to", "probability", "effect")
#: what a number of `Comparison.scores` is of, and the scopes that have one number for each run
PLACE = ("method", "seed", "view", "scope", "site", "split", "round")
SCOPES = ("mean", "pooled")

Row = str | Method | Mapping[str, Any]
Methods = Sequence[str | Method] | Mapping[str, Row]


def compare(
    federation: Federation | str | None,
    methods: Methods,
    *,
    components: Sequence[str | type[Component] | Component] = (),
    seeds: int | Sequence[int] = 3,
    rounds: int | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    net: Any = None,
    device: str | None = None,
    workers: int | None = None,
    out: Path | str | None = None,
    settings: Mapping[str, Any] | None = None,
    preset: str | Path | None = None,
    together: int = 1,
    anyway: bool = False,
    devices: str | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Train several methods on the same data with several seeds, and compare their scores.

    A method may have components on it: `["fedavg", "fedavg+margins"]`. Finished runs are kept: the same call goes on
    where it was stopped, and trains the others.

    >>> from equipoise import compare, load_federation
    >>> fed = load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> found = compare(fed, ["local", "fedavg"], seeds=2, rounds=1, epochs=1, out="studies/first")
    >>> list(found.table().columns)
    ['n', 'mean', 'sd', 'low', 'high', 'p', 'difference', 'from', 'to', 'probability', 'effect']

    Args:
        federation: as for `train`; None for the data of the preset or of the settings
        methods: names of methods, `"fedavg+margins"` with components; or by the name of a row, a method or its
            settings: `{"PRR": "prr", "PRR without PFA": {"method": "prr", "prr.pfa": "off"}}`
        components: each method gets a second row, with these components on it; as for `train`
        seeds: how many seeds, counted from 1, or the seeds themselves
        out: the folder of the comparison; by default in `studies/`
        settings: any other key of a config, for all runs
        preset: a preset, or a TOML file, that all runs start from
        together: how many runs take turns in this process
        anyway: run also where the settings leave a method's distinctive part without effect
        devices: a process for each of these: "cuda:0,cuda:1", or "cpu:4"
        progress: show bars; by default in a terminal or a notebook

    Raises:
        UserError: for settings that make no sense, before anything is trained
    """
    given = named_settings(
        settings, rounds=rounds, epochs=epochs, batch_size=batch_size, lr=lr, net=net, device=device, workers=workers
    )
    refuse_no_data(federation, given, preset)
    rows = [_row(name, row) for name, row in _by_name(methods).items()]
    rows += [_with_components(row, components) for row in rows if components]
    folder = Path(out) if out is not None else STUDIES / "-".join(str(row["name"]) for row in rows)
    if not seeds or (isinstance(seeds, int) and seeds < 0):
        raise UserError(f"seeds = {seeds!r} asks for no run; give their number, or the seeds themselves")
    raw: dict[str, Any] = {
        "name": folder.name,
        "seeds": list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds),
        "settings": nested(given | data_of(federation, given)),
        "row": rows,
    } | ({} if preset is None else {"preset": str(preset)})
    study = validated(StudyConfig, raw, "comparison")
    planned = [(cell, cell_config(study, cell)) for cell in grid(study, folder)]
    if not anyway:
        refuse_idle_rows(planned)
    text = tomli_w.dumps(study.model_dump(mode="json", exclude_unset=True, exclude_none=True, by_alias=True))
    known = folder / STUDY
    if known.exists() and known.read_text(encoding="utf-8") != text and any(folder.glob("runs/*/events.jsonl")):
        _check_same_settings(load_study(str(known)), study, folder)
    write_text(known, text)
    console = Console()
    console.quiet = not (is_watched(console) if progress is None else progress)
    with GridProgress(console, planned) as display:
        if devices is None:
            outcome = run_grid(planned, display, together)
        else:
            outcome = run_on_devices(planned, display, devices_of(devices))
    with claimed_folder(folder, wait=True):
        results = collect(study, folder)
        if results.runs:
            write_study(results, folder)
    outcome.complain()
    return Comparison(folder)


class Comparison:
    """The runs of several methods with several seeds, in their folder.

    >>> import equipoise as eq
    >>> fed = eq.load_federation("phantom", phantom={"images": 60, "sites": 2, "classes": 3, "size": 16})
    >>> eq.compare(fed, ["fedavg"], seeds=2, rounds=1, epochs=1, out="studies/one")
    Comparison('studies/one': 2 runs of 1 methods)
    >>> found = eq.Comparison("studies/one")
    >>> sorted(found.results), found.report().name
    ([('fedavg', 1), ('fedavg', 2)], 'report.html')

    Args:
        path: the folder that `compare` has written
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / STUDY).is_file():
            raise UserError(
                f"{self.path} holds no comparison: it has no {STUDY}; name a folder that compare has written"
            )

    def __repr__(self) -> str:
        return f"Comparison({str(self.path)!r}: {len(self.results)} runs of {len(self._study.rows)} methods)"

    def _repr_html_(self) -> str:
        """The table, for notebooks."""
        return str(self.table().to_html(float_format="{:.3f}".format, na_rep="-"))

    @cached_property
    def _study(self) -> StudyConfig:
        return load_study(str(self.path / STUDY))

    @property
    def results(self) -> dict[tuple[str, int], Result]:
        """The finished runs, by the name of the row and the seed."""
        cells = grid(self._study, self.path)
        return {(cell.row.name, cell.seed): Result(cell.folder) for cell in cells if is_finished(cell.folder)}

    def scores(self) -> pd.DataFrame:
        """The scores of all runs, as `Result.scores` has them, with the row's name and the seed."""
        frames = [
            result.scores().assign(method=name, seed=seed) for (name, seed), result in sorted(self.results.items())
        ]
        if not frames:
            raise UserError(f"{self.path} holds no finished run; call compare again to go on")
        table = pd.concat(frames, ignore_index=True)
        return table[["method", "seed", *(column for column in table.columns if column not in ("method", "seed"))]]

    def table(self, metric: str = "balanced_accuracy", scope: str = "mean") -> pd.DataFrame:
        """Mean, standard deviation, interval and p-value of each method, the best first.

        The interval holds the true score with 95 % confidence: groups of test images and seeds are drawn with
        replacement. Without predictions of single images, or for a metric of your own, it holds the mean over seeds
        (Student's t). The p-value is of a paired t-test against the best method, over the seeds that both have, with
        Holm's correction.

        Differences are the method's score less the best one's, on the same resamples. They have an interval, the
        probability that the method is better, and Cohen's d over the seeds' differences.

        Args:
            metric: a column of `Result.scores`
            scope: "mean" over sites, or "pooled" over all images
        """
        scores = self.scores()
        metrics = [name for name in scores.columns if name not in PLACE]
        if metric not in metrics:
            raise UserError(f"there is no score {metric!r}; there are {', '.join(metrics)}")
        if scope not in SCOPES:
            raise UserError(f"there is no scope {scope!r}; there are {' and '.join(SCOPES)}. scores() has every site")
        own = scores[(scores["scope"] == scope) & (scores["view"] != "trained")]
        reported = own.sort_values("view").drop_duplicates(["method", "seed"], keep="last")  # personal comes last
        by_seed = reported.pivot(index="seed", columns="method", values=metric)
        table = pd.DataFrame({"n": by_seed.count(), "mean": by_seed.mean(), "sd": by_seed.std()})
        margin = pd.Series([_margin(n, sd) for n, sd in zip(table["n"], table["sd"])], table.index)
        low, high = (0.0, MOST.get(metric, 1.0)) if metric in MOST or metric.startswith("recall(") else (None, None)
        table["low"], table["high"] = ((table["mean"] + m).clip(low, high) for m in (-margin, margin))
        values = {str(name): (100 * column.dropna()).to_dict() for name, column in by_seed.items()}
        tests = {test.other: test.t_test_holm for test in compare_with_best(values, higher=metric not in LOW)}
        table["p"] = pd.Series(tests, dtype=float).reindex(table.index)
        table = table.sort_values("mean", ascending=metric in LOW)
        views = reported.drop_duplicates("method").set_index("method")["view"]
        return self._with_intervals(table, metric, scope, views.to_dict())

    def _with_intervals(self, table: pd.DataFrame, metric: str, scope: str, views: Mapping[str, str]) -> pd.DataFrame:
        """The table with intervals over groups of images and seeds, and differences from the best method."""
        if metric not in MOST:  # a plug-in knows no resamples
            return table.reindex(columns=[*table.columns, *DIFFERENCES])
        shared = SharedResamples(self._predictions, "test" if self._tested else "valid")
        rows = {name: shared.row(name, view, [metric], scope) for name, view in views.items()}
        best = rows.get(str(table.index[0]))
        for name, row in rows.items():
            if row is not None:
                bounds = row.interval(metric)
                table.loc[name, ["low", "high"]] = bounds.low, bounds.high
            if row is not None and best is not None and name != table.index[0]:
                found = compared(row, best, metric)
                if found is not None:
                    gap = found.difference
                    told = (gap.value, gap.low, gap.high, found.probability, found.effect)
                    table.loc[name, [*DIFFERENCES]] = told
        return table.reindex(columns=[*table.columns[:6], *DIFFERENCES])

    @cached_property
    def _predictions(self) -> dict[str, dict[int, list[Predictions]]]:
        """The predictions of single images by method and seed, of the runs that kept them."""
        found: dict[str, dict[int, list[Predictions]]] = {}
        for (name, seed), result in self.results.items():
            if (result.path / FILE).exists():
                found.setdefault(name, {})[seed] = [read_predictions(result.path)]
        return found

    @property
    def _tested(self) -> bool:
        return any(len(result.record().finals) for result in self.results.values())

    def report(self) -> Path:
        """The path of the comparison's report."""
        return self.path / "report.html"


def _by_name(methods: Methods) -> Mapping[str, Row]:
    if isinstance(methods, str):
        raise UserError(f'methods = {methods!r} is one name; give a list, such as ["local", "fedavg"]')
    if isinstance(methods, Mapping):
        return methods
    names = [name_of("method", method) for method in methods]
    return {"+".join(short_name(part.strip()) for part in name.split("+")): name for name in names}


def _row(name: str, row: Row) -> dict[str, Any]:
    """A row of a study: its name, its method and its own settings."""
    settings = dict(row) if isinstance(row, Mapping) else {"method": row}
    if "method" not in settings:
        raise UserError(f"the row {name!r} names no method; give it one: {{'method': 'fedavg', ...}}")
    method = name_of("method", settings.pop("method"))
    settings = component_settings(cast(Any, settings.pop("components", ()))) | with_names(dotted(settings))
    return {"name": name, "method": method} | ({"settings": nested(settings)} if settings else {})


def _with_components(row: Mapping[str, Any], components: Sequence[str | type[Component] | Component]) -> dict[str, Any]:
    """The row of a method once more, with components on it."""
    more = component_settings(components)
    own = dotted(row.get("settings", {}))
    named = [*own.get("components", ()), *more["components"]]
    return {
        "name": "+".join([str(row["name"]), *map(short_name, more["components"])]),
        "method": row["method"],
        "settings": nested(own | more | {"components": named}),
    }


def _check_same_settings(before: StudyConfig, now: StudyConfig, folder: Path) -> None:
    """Refuse a folder whose runs had other settings; more methods or seeds are welcome."""
    if (_settings(before), before.preset) != (_settings(now), now.preset):
        raise UserError(f"{folder} holds a comparison with other settings or data; choose another out")


def _settings(study: StudyConfig) -> dict[str, Any]:
    """A comparison's settings, with the data that those of earlier versions left out."""
    usual = {} if study.preset else {"data.name": "phantom"}
    return usual | dotted(study.settings)


def _margin(n: int, sd: float) -> float:
    """Half the width of the interval of a mean."""
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, n - 1) * sd / math.sqrt(n)) if n > 1 else math.nan
