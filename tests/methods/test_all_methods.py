"""What every registered method must keep: bit-exact resume, independence of workers, its disclosure sheet, and rounds
in which a site is lost or sends NaN."""

from __future__ import annotations

import json
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
import torch

from equipoise import methods
from equipoise.checks import battery
from equipoise.checks.trouble import Stop, StopAt, faulty
from equipoise.components import get_component
from equipoise.contract.component import variations
from equipoise.contract.method import Method
from equipoise.engine import worker_pool as pool
from equipoise.engine.loop import Run
from equipoise.methods import get_method, method_names
from harness import all_state, assert_same_bits, events, run_tiny, tiny_config, tiny_federation, with_client

METHODS = method_names()
#: methods with components, which have to keep all that methods keep
COMPOSITIONS = (
    "fedbn+margins+npr+prox",
    "fedavg+concepts+generator+deputy+margins",
    "fedavg+cpa+deputy+fourier+local-norm+mean-model",
    "fedavg+inter-contrast+intra-contrast+local-norm+projector+server-adam",
    "local+balanced-draws+cpa+npr",
    "scaffold+balanced-softmax+npr+restricted",
    "fedavg+duals+focal+model-contrast+projection",
    "fedavg+dynamic+logit-calibration+retrained-head",
    "fedrep+control-variates+local-statistics+npr",
    "pfedme+balanced-draws+inverse-distance+margins",
    "fedprox+closed-head+npr",
    "fedbn+closed-head+margins",
)
ALL = [*METHODS, *COMPOSITIONS]
FEW = ("data.phantom.images=120", "train.batch_size=16", "evaluation.trained=false")


def settings_of(method: str) -> tuple[str, ...]:
    name, *added = method.split("+")
    parts = [get_method(name).options, *map(get_component, added)]
    return (*FEW, *(setting for part in parts for setting in (*part.in_short, *part.at_little_cost)))


AS_RELEASED = ("prr.prototype_exchange=released", "prr.spread=clamped", "prr.det_metric=released", "train.epochs=2")


@pytest.mark.parametrize(("method", "more"), [*((method, ()) for method in ALL), ("prr", AS_RELEASED)])
def test_resume_gives_the_same_bits(tmp_path, method, more):
    settings = (*settings_of(method), *more, "train.rounds=3", "train.participation=0.7")
    straight = run_tiny(tmp_path / "straight", method, *settings)
    config = tiny_config(method, *settings)
    run = Run(config, get_method(method), tiny_federation(config), tmp_path / "halted", [StopAt(3)])
    with pytest.raises(Stop):
        run.execute()
    run_tiny(tmp_path / "halted", method, *settings, resume=True)
    assert_same_bits(all_state(straight), all_state(tmp_path / "halted"))
    for kind in ("evaluation", "final"):
        assert events(straight, kind) == events(tmp_path / "halted", kind)


@pytest.mark.parametrize("method", ["fedavg", "fedbabu", "fedetf", "perfedavg"])
def test_a_run_that_stopped_after_its_last_round_gives_the_same_final_scores(tmp_path, method):
    settings = (*settings_of(method), "train.schedule.name='exponential'")
    straight = run_tiny(tmp_path / "straight", method, *settings)
    config = tiny_config(method, *settings)
    run = Run(config, get_method(method), tiny_federation(config), tmp_path / "halted", [StopAt(2, "final")])
    with pytest.raises(Stop):
        run.execute()
    run_tiny(tmp_path / "halted", method, *settings, resume=True)
    assert events(straight, "final") == events(tmp_path / "halted", "final")


class AlternatingWorkers:
    """Stands for the process pool: the same worker code, files and slots, without the time that processes take."""

    _processes = None  # what a pool ends at its close

    def __init__(self, count, mp_context, initializer, initargs):
        self.workers, self.turn = [], 0
        for _ in range(count):
            initializer(*initargs)
            self.workers.append(pool._worker)

    def submit(self, function, *arguments):
        pool._worker = self.workers[self.turn % len(self.workers)]
        self.turn += 1
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as problem:
            future.set_exception(problem)
        return future

    def shutdown(self, cancel_futures):
        self.workers.clear()


@pytest.mark.parametrize("method", ALL)
def test_workers_do_not_change_a_bit(tmp_path, monkeypatch, method):
    one = run_tiny(tmp_path / "one", method, *settings_of(method))
    monkeypatch.setattr(pool, "ProcessPoolExecutor", AlternatingWorkers)
    monkeypatch.setattr(pool.signal, "signal", lambda *_: None)  # this process goes on listening to Ctrl-C
    two = run_tiny(tmp_path / "two", method, *settings_of(method), "compute.workers=2")
    assert_same_bits(all_state(one), all_state(two))


@pytest.mark.parametrize(("method", "where"), [("fediic", "compute.workers=2"), ("prr", "compute.device='cpu,cpu'")])
def test_real_processes_do_not_change_a_bit(tmp_path, method, where):
    one = run_tiny(tmp_path / "one", method, *settings_of(method))
    two = run_tiny(tmp_path / "two", method, *settings_of(method), where)
    assert_same_bits(all_state(one), all_state(two))


@pytest.mark.parametrize("method", [m for m in ALL if m.split("+")[0] not in ("local", "closed-local", "central")])
@pytest.mark.parametrize("fault", ["nan", "lost"])
def test_a_bad_or_lost_site_is_survived(tmp_path, method, fault):
    config = tiny_config(method, *settings_of(method))
    broken = with_client(method, partial(faulty, fault=fault))
    Run(config, broken, tiny_federation(config), tmp_path).execute()
    first, second = events(tmp_path, "round")
    assert list(first["missing"]) == ["site 2"] and second["missing"] == {}
    assert all(torch.isfinite(t).all() for t in all_state(tmp_path).values() if t.is_floating_point())


def test_every_file_is_a_method_but_those_that_begin_with_an_underscore():
    files = Path(methods.__file__).parent.glob("[!_]*.py")
    assert sorted(path.stem.replace("_", "-") for path in files) == METHODS
    assert all(isinstance(get_method(name), Method) for name in METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_server_that_adds_nothing_to_another_is_not_written_down_anew(method):
    server = get_method(method).server
    assert len(server.__bases__) > 1 or server.__dict__.keys() - {"__module__", "__doc__", "__firstlineno__"}


def settings_by_sheet(method: str) -> list[list[str]]:
    """Settings for each disclosure sheet that a method has with one switch turned, or none."""
    known, found, seen = get_method(method), [], []
    usual = known.options().model_dump()
    for options in variations(known.options):
        turned = [f"{method}.{k}={json.dumps(v)}" for k, v in options.model_dump().items() if v != usual[k]]
        sheet = known.client_class(tiny_config(method, *turned)).discloses
        if sheet not in seen:
            found.append(turned)
            seen.append(sheet)
    return found


def overheard(folder, method: str, *settings: str) -> dict[str, set[str]]:
    """The entries of all replies to each action in a run of one round, in which no reply is refused."""
    return battery.overheard(battery.Subject(method, settings_of(method)), folder, *settings)


@pytest.mark.parametrize("method", COMPOSITIONS)
def test_sites_of_a_composition_reply_with_all_that_its_exact_sheet_names(tmp_path, method):
    sheet = get_method(method).client_class(tiny_config(method, *settings_of(method))).discloses
    heard = {action: told for action, told in overheard(tmp_path, method).items() if told}
    assert heard == {action: set(told) for action, told in sheet.items() if told}


@pytest.mark.parametrize("method", METHODS)
def test_sites_reply_with_all_that_the_disclosure_sheet_names_and_nothing_else(tmp_path, method):
    known, widest = get_method(method), get_method(method).widest_sheet()
    for number, settings in enumerate(settings_by_sheet(method)):
        sheet = known.client_class(tiny_config(method, *settings)).discloses
        assert overheard(tmp_path / str(number), method, *settings) == {a: set(told) for a, told in sheet.items()}
        assert all(all(entries.values()) for entries in sheet.values()), "each is explained in words"
        assert all(entries.keys() <= widest[action].keys() for action, entries in sheet.items())
