"""What the command line costs before it does anything, and what evaluation costs beside training.

    python benchmarks/start.py [--before COMMIT] [--repeats 3] [--quick] [--out results/benchmarks]

Lists and completion run in fresh processes: wall seconds and peak memory, seen from outside. The first step is counted
from the start of the process to the end of the first optimiser step of a small net on the phantom. Evaluation is the
share of a default run's CPU seconds that goes into measuring, its forward passes aside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from earlier import environment, sources

LISTS = ("--version", "methods", "components", "presets", "study list", "settings")
COMPLETION = "completion of run --method"
#: tells the seconds since a time and ends the process, once a first optimiser step is done
FIRST_STEP = """
import os, sys, time
from equipoise.engine.training import EagerSteps
ours = EagerSteps.__dict__["__call__"]
def told(self, *given):
    ours.__get__(self)(*given)
    print("first step", time.time() - {began}, flush=True)
    os._exit(0)
EagerSteps.__call__ = told
import runpy
sys.argv = "equipoise run --method fedavg --device cpu --set net.name='small-cnn' --out".split() + [{out!r}]
runpy.run_module("equipoise", run_name="__main__")
"""
#: CPU seconds of a run on the phantom, of what rounds and the end spend on measuring, and of the forward passes in it
SHARE = """
import json, sys, time
from pathlib import Path
from equipoise.engine.loop import Run
try:
    from equipoise.engine import slot, together
    from equipoise.engine.runs import make_config, prepare_run
    from equipoise.tasks.classification import Classification
except ImportError:  # before these modules were there
    from equipoise.engine import site as slot
    from equipoise.runs import make_config, prepare_run
    from equipoise.tasks import Classification
    together = None
spent, inside = {{"forward": 0.0, "measuring": 0.0}}, False
def timed_as(name, function, wanted):
    def timed(*given, **named):
        began = time.process_time()
        try:
            return function(*given, **named)
        finally:
            if inside == wanted:
                spent[name] += time.process_time() - began
    return timed
slot.observed = timed_as("forward", slot.observed, True)
if together:
    together.observed = timed_as("forward", together.observed, True)
Classification.measure = timed_as("measuring", Classification.measure, False)  # right after local training
def measuring(turns):
    def timed(*given, **named):
        steps = turns(*given, **named)
        global inside
        while True:
            began, inside = time.process_time(), True
            try:
                next(steps)
            except StopIteration:
                return
            finally:
                spent["measuring"] += time.process_time() - began
                inside = False
            yield
    return timed
Run._evaluate, Run._finish = measuring(Run._evaluate), measuring(Run._finish)
config = make_config(None, {settings!r})
began = time.process_time()
prepare_run(config, Path({out!r})).execute()
total = time.process_time() - began
print(json.dumps({{"total": total, **spent}}))
"""


def watched(command: Sequence[str], env: Mapping[str, str], typed: str = "") -> tuple[float, float] | None:
    """Wall seconds and peak megabytes of a command in a fresh process; None where there is no such command."""
    asked = {"_EQUIPOISE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": "3"} if typed else {}
    began = time.perf_counter()
    child = subprocess.Popen(command, env={**env, **asked}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, code, used = os.wait4(child.pid, 0)
    return (time.perf_counter() - began, used.ru_maxrss / 1024) if typed or not code else None


def said(code: str, env: Mapping[str, str]) -> str:
    """The last line that Python prints of a piece of code."""
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise SystemExit(done.stderr[-2000:])
    return done.stdout.strip().splitlines()[-1]


def measure(source: Path, quick: bool) -> dict[str, Any]:
    """Everything once, with the package of one folder."""
    env, start = environment(source), [sys.executable, "-m", "equipoise"]
    lists = {words: watched([*start, *words.split()], env) for words in (LISTS[:2] if quick else LISTS)}
    complete = "import runpy, sys; sys.argv[0] = 'equipoise'; runpy.run_module('equipoise', run_name='__main__')"
    lists[COMPLETION] = watched([sys.executable, "-c", complete], env, "equipoise run --method fedp")
    settings = ["net.name='small-cnn'", "train.rounds=1", "train.steps=1"] if quick else []
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "first")
        step = float(said(FIRST_STEP.format(began=time.time(), out=out), env).split()[-1])
        share = json.loads(said(SHARE.format(settings=settings, out=str(Path(folder) / "run")), env))
    return {"lists": lists, "first_step_s": step, "evaluation": share}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The least of the turns, for a busy machine adds to all seconds; the median of shares."""
    shares = [
        (run["evaluation"]["measuring"] - run["evaluation"]["forward"]) / run["evaluation"]["total"] for run in runs
    ]
    return {
        "lists": {
            words: dict(zip(("s", "mb"), (min(run["lists"][words][i] for run in runs) for i in (0, 1))))
            for words, cost in runs[0]["lists"].items()
            if cost
        },
        "first_step_s": min(run["first_step_s"] for run in runs),
        "evaluation_share": statistics.median(shares),
        "run_cpu_s": statistics.median(run["evaluation"]["total"] for run in runs),
    }


def main() -> None:
    """Measure in turns, print and write `start.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="", help="a commit to measure in turns with this tree")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one turn of a small run, to try the script")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    with sources(options.before) as found:
        turns = [{side: measure(source, options.quick) for side, source in found.items()} for _ in range(repeats)]
    result = {side: summary([turn[side] for turn in turns]) for side in turns[0]}
    for side, own in result.items():
        for words, cost in own["lists"].items():
            print(f"{side:<7} {words:<28} {cost['s']:5.2f} s {cost['mb']:6.0f} MB")
        share = f"evaluation {own['evaluation_share']:.1%} of {own['run_cpu_s']:.1f} CPU s"
        print(f"{side:<7} first step after {own['first_step_s']:.2f} s; {share}")
    command = "python benchmarks/start.py" + (f" --before {options.before}" if options.before else "")
    result |= {"command": command, "turns": repeats, "before_commit": options.before, "load": os.getloadavg()[0]}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "start.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
