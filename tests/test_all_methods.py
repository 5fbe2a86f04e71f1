"""What every registered method must keep: learning, bit-exact resume, independence of workers, bad and lost sites."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future

import pytest
import torch

from equipoise.engine import local
from equipoise.engine.contract import Client
from equipoise.engine.loop import Run
from equipoise.engine.protocol import SiteFailure
from equipoise.methods import get_method, method_names
from harness import all_state, assert_same_bits, events, run_tiny, tiny_config, tiny_federation

METHODS = method_names()
FEW = ("data.phantom.images=120", "train.batch_size=16", "evaluation.trained=false")
#: settings under which a short run passes through everything that a method does
THOROUGH = {
    "fedbm": (
        "fedbm.every=1",
        "fedbm.generator_steps=2",
        "fedbm.generator_batch=8",
        "fedbm.generator_width=4",
        "fedbm.synthetic=4",
    ),
    "prr": ("prr.warmup=0",),
    "creff": ("creff.feature_steps=3", "creff.classifier_epochs=3"),
}


def settings_of(method: str) -> tuple[str, ...]:
    return (*FEW, *THOROUGH.get(method, ()))


class Stop(Exception):
    """Ends a run as a crash would."""


class StopAt:
    """An observer that ends a run in the middle of a round, or at a later event of it."""

    def __init__(self, number: int, kind: str = "round"):
        self.number, self.kind = number, kind

    def event(self, event, **fields):
        if event == self.kind and (event != "round" or fields["round"] == self.number):
            raise Stop


AS_RELEASED = ("prr.prototype_exchange=released", "prr.spread=clamped", "prr.det_metric=released", "train.epochs=2")


@pytest.mark.parametrize(("method", "more"), [*((method, ()) for method in METHODS), ("prr", AS_RELEASED)])
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

    def __init__(self, count, mp_context, initializer, initargs):
        self.workers, self.turn = [], 0
        for _ in range(count):
            initializer(*initargs)
            self.workers.append(local._worker)

    def submit(self, function, *arguments):
        local._worker = self.workers[self.turn % len(self.workers)]
        self.turn += 1
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as problem:
            future.set_exception(problem)
        return future

    def shutdown(self, cancel_futures):
        self.workers.clear()


@pytest.mark.parametrize("method", METHODS)
def test_workers_do_not_change_a_bit(tmp_path, monkeypatch, method):
    one = run_tiny(tmp_path / "one", method, *settings_of(method))
    monkeypatch.setattr(local, "ProcessPoolExecutor", AlternatingWorkers)
    monkeypatch.setattr(local.signal, "signal", lambda *_: None)  # this process goes on listening to Ctrl-C
    two = run_tiny(tmp_path / "two", method, *settings_of(method), "compute.workers=2")
    assert_same_bits(all_state(one), all_state(two))


@pytest.mark.parametrize("method", ["fediic", "prr"])
def test_real_worker_processes_do_not_change_a_bit(tmp_path, method):
    one = run_tiny(tmp_path / "one", method, *settings_of(method))
    two = run_tiny(tmp_path / "two", method, *settings_of(method), "compute.workers=2")
    assert_same_bits(all_state(one), all_state(two))


def faulty(client: type[Client], fault: str) -> type[Client]:
    """The client of a method, with one site that sends NaN or is lost in round 1."""

    class Faulty(client):  # type: ignore[misc, valid-type]
        def train(self, message):
            payload = yield from super().train(message)
            if self.site != "site 2" or self.round != 1:
                return payload
            if fault == "lost":
                raise SiteFailure("lost")
            return {name: _broken(value) for name, value in payload.items()}

    return Faulty


def _broken(value):
    if isinstance(value, dict):
        return {name: _broken(entry) for name, entry in value.items()}
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.full_like(value, float("nan"))
    return value


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("local", "central")])
@pytest.mark.parametrize("fault", ["nan", "lost"])
def test_a_bad_or_lost_site_is_survived(tmp_path, method, fault):
    known = get_method(method)
    config = tiny_config(method, *settings_of(method))
    broken = dataclasses.replace(known, client=faulty(known.client, fault))
    Run(config, broken, tiny_federation(config), tmp_path).execute()
    first, second = events(tmp_path, "round")
    assert list(first["missing"]) == ["site 2"] and second["missing"] == {}
    assert all(torch.isfinite(t).all() for t in all_state(tmp_path).values() if t.is_floating_point())


@pytest.mark.parametrize("method", METHODS)
def test_every_reply_is_on_the_disclosure_sheet(method):
    client = get_method(method).client
    assert all(text for entries in client.discloses.values() for text in entries.values())
    assert all(callable(getattr(client, action)) for action in client.discloses)
