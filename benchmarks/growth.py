"""How cost grows with sites that do not train, classes, rounds and runs of a study: a curve and its exponent for each.

    python benchmarks/growth.py [--only sites,rounds,report] [--sizes 10,100] [--quick] [--out results/benchmarks]

Each point is a fresh process of one thread. Seconds are CPU seconds; memory is the process's peak above that before the
work began. An exponent of 0 is flat, 1 is linear, 2 is quadratic: the slope of a straight line through the logarithms.
Writes `growth.json`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

#: sizes of each curve: in full, and to try the script
SIZES = {
    "sites": ((50, 500, 5_000), (20, 40)),
    "classes": ((10, 100, 1_000), (10, 100)),
    "rounds": ((100, 1_000, 10_000), (10, 50)),
    "runs": ((10, 100, 1_000), (5, 10)),
    "deputies": ((10, 40, 160), (2, 4)),
    "report": ((10, 100, 1_000), (5, 10)),
}
WORDS = {
    "sites": "sites, 10 of which train in a round",
    "classes": "classes, 100 models scored on 400 images each",
    "rounds": "rounds in a log of 10 sites",
    "runs": "finished runs in a study",
    "deputies": "sites' nets of 9.5 MB that PRR's server merges, replies in files",
    "report": "sites in the report of a run of 500 rounds, scored after every round and after local training",
}
Spent = dict[str, float]


@contextmanager
def spent(found: Spent, name: str) -> Iterator[None]:
    """Note the CPU seconds of a block."""
    began = time.process_time()
    yield
    found[f"{name}, CPU s"] = time.process_time() - began


def of_sites(size: int, folder: Path) -> Spent:
    """Rounds of FedAvg in which 10 sites of `size` train."""
    from equipoise.engine.runs import make_config, prepare_run

    rounds = 4
    config = make_config(
        None,
        [
            f"data.phantom.sites={size}",
            f"data.phantom.images={12 * size}",
            *("data.phantom.size=16", "data.phantom.imbalance=2", "data.phantom.common=true"),
            *("data.phantom.missing=0", "data.phantom.skew=0", "net.name='small-cnn'", "augment.name='none'"),
            *(f"train.rounds={rounds}", "train.steps=1", "train.batch_size=8", f"train.participation={10 / size}"),
            *("evaluation.every=100", "evaluation.trained=false", "compute.device='cpu'"),
        ],
    )
    run, ends = prepare_run(config, folder), list[float]()
    run.after_round = lambda number: bool(ends.append(time.process_time()))  # type: ignore[func-returns-value]
    run.execute()
    return {"a round, CPU s": statistics.median(np.diff(ends))}


def of_classes(size: int, folder: Path) -> Spent:
    """Scores of models that tell `size` classes apart, from counts to the log and back."""
    import torch

    from equipoise.cells import dense
    from equipoise.engine.events import EventLog, events_in
    from equipoise.tasks import get_task

    task, models, images = get_task("classification")([str(label) for label in range(size)]), 100, 400
    drawn, log, found = torch.Generator().manual_seed(1), EventLog(folder / "events.jsonl"), Spent()
    with spent(found, "scores and their log"):
        for _ in range(models):
            labels = torch.randint(size, (images,), generator=drawn)
            counts = task.measure(torch.randn(images, size, generator=drawn), labels)
            log.write("final", **task.summary(counts))
    found["log, MB"] = log.size() / 1e6
    log.close()
    with spent(found, "reading the log"):
        for event in events_in((folder / "events.jsonl").read_bytes()):
            assert dense(event["confusion"]).sum() == images
    return found


def one_run(folder: Path) -> list[str]:
    """The log of a small run."""
    from equipoise.engine.runs import make_config, prepare_run

    settings = ["train.rounds=2", "data.phantom.images=160", "data.phantom.size=16", "compute.device='cpu'"]
    prepare_run(make_config(None, [*settings, "data.phantom.sites=10"]), folder).execute()
    return (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()


def of_rounds(size: int, folder: Path) -> Spent:
    """A log of `size` rounds: whether it is finished, and all that it says."""
    from equipoise.report.record import read_run
    from equipoise.studies.checks import is_finished

    events, found = [json.loads(line) for line in one_run(folder)], Spent()
    repeated = [event for event in events if event["event"] in ("round", "evaluation") and event["round"] == 1]
    others = [event for event in events if event not in repeated and event.get("round") != 2]
    with (folder / "events.jsonl").open("w", encoding="utf-8") as log:
        for number in range(1, size + 1):
            if number == 1:
                log.write(json.dumps(others[0]) + "\n")
            log.writelines(json.dumps(event | {"round": number}) + "\n" for event in repeated)
        log.writelines(json.dumps(event) + "\n" for event in others[1:])
    found["log, MB"] = (folder / "events.jsonl").stat().st_size / 1e6
    with spent(found, "knowing that it is finished"):
        for _ in range(20):
            assert is_finished(folder)
    with spent(found, "reading"):
        assert len(read_run(folder).rounds) == size
    return found


def of_runs(size: int, folder: Path) -> Spent:
    """A study with `size` finished runs: planning it, looking for other data, reading it, writing its pages."""
    from rich.console import Console

    from equipoise.cli.study import _planned
    from equipoise.cli.study_tables import print_plan
    from equipoise.studies.checks import Checks
    from equipoise.studies.grid import grid
    from equipoise.studies.results import collect
    from equipoise.studies.study_file import load_study
    from equipoise.studies.study_files import write_study

    rows = (f'[[row]]\nname = "row{row}"\nmethod = "fedavg"\nsettings.train.rounds = {row + 1}\n' for row in
            range(size // 5))  # fmt: skip
    file, found = folder / "many.toml", Spent()
    file.write_text('name = "many"\ntitle = "Many"\npreset = "demo"\nseeds = [1, 2, 3, 4, 5]\n' + "\n".join(rows))
    study = load_study(str(file))
    _planned(study, grid(study, folder / "many")[:1], [])  # what a first config imports
    with spent(found, "planning"):
        planned = _planned(study, grid(study, folder / "many"), [])
    lines = one_run(folder / "one")
    start = json.loads(lines[0])
    for cell, config in planned:
        cell.folder.mkdir(parents=True)
        own = start | {"config": config.model_dump(mode="json"), "run": config.run_name}
        (cell.folder / "events.jsonl").write_text("\n".join([json.dumps(own), *lines[1:]]) + "\n")
        (cell.folder / "config.toml").write_text(config.to_toml())
    with spent(found, "the plan of finished runs"):
        print_plan(Console(file=io.StringIO(), width=200), planned, [])
    check = Checks(study, folder / "many")
    check._look()
    with spent(found, "looking for new runs again"):
        check._look()
    with spent(found, "reading"):
        results = collect(study, folder / "many")
    with spent(found, "reading again, from the database"):
        results = collect(study, folder / "many")
    with spent(found, "tables and pages"):
        write_study(results, folder / "many")
    found["report, MB"] = (folder / "many" / "report.html").stat().st_size / 1e6
    return found


def of_deputies(size: int, folder: Path) -> Spent:
    """The nets of `size` sites, merged as PRR's server does; replies lie in files, as they do beyond a budget."""
    import torch

    from equipoise.components._fourier_merging import layer_kinds, merge_deputies
    from equipoise.contract.config import NetConfig
    from equipoise.contract.protocol import Replies, Reply
    from equipoise.engine.payload_files import SpilledPayload, write_payload
    from equipoise.nets import build_net

    net, replies, found = build_net(NetConfig(name="vgg16-slim"), num_classes=8, channels=3), [], Spent()
    draws = torch.Generator().manual_seed(1)
    floats = {entry: tensor for entry, tensor in net.state_dict().items() if tensor.is_floating_point()}
    for site in range(size):
        path = folder / f"{site}.safetensors"
        own = {entry: torch.randn(tensor.shape, generator=draws) for entry, tensor in floats.items()}
        write_payload(path, {"model": own})
        replies.append(Reply(f"site {site}", SpilledPayload(path)))
    kinds = {entry: kind for entry, kind in layer_kinds(net).items() if entry in floats}
    with spent(found, "merging"):
        _, merged = merge_deputies(Replies(replies), kinds, 0.8)
    found["merged nets, MB"] = sum(tensor.nbytes for tensor in merged.values()) / 2**20
    return found


def of_report(size: int, folder: Path) -> Spent:
    """The report of 500 rounds in which `size` sites train and are scored twice."""
    from equipoise.report import read_run, write_report
    from equipoise.report.page import render  # noqa: F401  its imports are no part of a report

    rounds, found, log = 500, Spent(), folder / "run" / "events.jsonl"
    events = [json.loads(line) for line in one_run(folder / "one")]
    names = [f"site {number}" for number in range(1, size + 1)]
    start = events[0] | {"sites": [events[0]["sites"][0] | {"name": name} for name in names]}
    done = next(event for event in events if event["event"] == "round")
    done |= {"sites": dict.fromkeys(names, next(iter(done["sites"].values())))}
    scored = {event["view"]: event for event in events if event["event"] == "evaluation" and event["round"] == 1}
    final = next(event for event in events if event["event"] == "final" and event["scope"] == "site")
    lines = [json.dumps(event | {"round": -1, "site": name}) for event in scored.values() for name in names]
    log.parent.mkdir()
    with log.open("w", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")
        for number in range(1, rounds + 1):
            file.write(json.dumps(done | {"round": number}) + "\n")
            file.writelines(line.replace('"round": -1', f'"round": {number}', 1) + "\n" for line in lines)
        file.writelines(json.dumps(final | {"site": name}) + "\n" for name in names)
        others = [event for event in events if event["event"] == "final" and event["scope"] != "site"]
        file.writelines(json.dumps(event) + "\n" for event in [*others, {"event": "end", "seconds": 1.0}])
    found["log, MB"] = log.stat().st_size / 1e6
    with spent(found, "reading"):
        run = read_run(folder / "run")
    with spent(found, "tables and page"):
        page = write_report([run])
    found["the report, CPU s"] = found["reading, CPU s"] + found["tables and page, CPU s"]
    found["report, MB"] = page.stat().st_size / 1e6
    return found


MEASURES: dict[str, Callable[[int, Path], Spent]] = {
    "sites": of_sites,
    "classes": of_classes,
    "rounds": of_rounds,
    "runs": of_runs,
    "deputies": of_deputies,
    "report": of_report,
}


def point(kind: str, size: int) -> Spent:
    """One point of a curve, measured in a fresh process."""
    command = [sys.executable, __file__, "--point", kind, str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def told(kind: str, size: int) -> None:
    """What the fresh process does: measure, and say what it found."""
    import torch

    import equipoise.engine.runs  # noqa: F401  memory counts from here

    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory() as folder:
        found = MEASURES[kind](size, Path(folder))
    found["memory, MB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(json.dumps(found))


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float | None:
    """The slope of a straight line through the logarithms; None where a value is 0."""
    if min(values) <= 0 or len(sizes) < 2:
        return None
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def curve(kind: str, sizes: Sequence[int]) -> dict[str, Any]:
    """The points of a curve, and how each quantity grows."""
    points = [point(kind, size) for size in sizes]
    values = {name: [one[name] for one in points] for name in points[0]}
    for name, row in values.items():
        slope = exponent(sizes, row)
        grows = "" if slope is None else f"  exponent {slope:.2f}"
        print(f"{kind:<8} {name:<36}" + "".join(f"{value:10.3f}" for value in row) + grows, flush=True)
    rows = [{"quantity": name, "values": row, "exponent": exponent(sizes, row)} for name, row in values.items()]
    return {"of": WORDS[kind], "sizes": list(sizes), "rows": rows}


def main() -> None:
    """Measure, print and write `growth.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SIZES), help="curves to measure; the file keeps the others")
    parser.add_argument("--quick", action="store_true", help="two small sizes of each, to try the script")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    parser.add_argument("--point", nargs=2, metavar=("CURVE", "SIZE"), help=argparse.SUPPRESS)
    parser.add_argument("--sizes", help="other sizes, such as 10,100: a thousand runs take minutes on a busy machine")
    options = parser.parse_args()
    given = [int(size) for size in (options.sizes or "").split(",") if size]
    if options.point:
        told(options.point[0], int(options.point[1]))
        return
    file = options.out / "growth.json"
    curves = json.loads(file.read_text())["curves"] if file.exists() else {}
    for kind in options.only.split(","):
        curves[kind] = curve(kind, given or SIZES[kind][options.quick])
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"command": "python benchmarks/growth.py", "load": os.getloadavg()[0], "curves": curves}
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
