"""Work of the server beside an evaluation: done while sites evaluate, with the same bits and the same log."""

import threading

import pytest

from equipoise.checks.traces import events
from equipoise.components._generator_training import GeneratorTraining
from equipoise.engine.beside import beside
from equipoise.engine.loop import Run
from harness import all_state, assert_same_bits, run_tiny

SETTINGS = ("data.phantom.images=120", "train.batch_size=16", "train.rounds=3", "fedbm.every=1")
LITTLE = ("fedbm.generator_steps=3", "fedbm.generator_batch=8", "fedbm.generator_width=4", "fedbm.synthetic=4")


def test_work_has_begun_before_the_block_waits_and_is_done_after_it():
    begun, waited, ended = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        ended.append(waited.wait(30))

    with beside([work], 1):
        assert begun.wait(30) and not ended
        waited.set()
    assert ended == [True]


def test_an_error_in_the_work_ends_the_run():
    def work():
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"), beside([work], 1):
        pass


def test_fedbms_generator_learns_while_worker_processes_evaluate_with_the_same_bits(tmp_path, monkeypatch):
    """The generator of each round waits until the evaluation of that round has begun."""
    alone = run_tiny(tmp_path / "alone", "fedbm", *SETTINGS, *LITTLE)
    evaluating, overlapped = [threading.Event() for _ in range(4)], []
    learn, evaluate = GeneratorTraining.run, Run._evaluate

    def learns(self, random):
        overlapped.append(evaluating[len(overlapped) + 1].wait(60))
        learn(self, random)

    def evaluates(self, number):
        evaluating[number].set()
        yield from evaluate(self, number)

    monkeypatch.setattr(GeneratorTraining, "run", learns)
    monkeypatch.setattr(Run, "_evaluate", evaluates)
    spread = run_tiny(tmp_path / "spread", "fedbm", *SETTINGS, *LITTLE, "compute.workers=2")
    assert overlapped == [True, True]  # after the last round the generator learns nothing
    assert_same_bits(all_state(alone), all_state(spread))
    for kind in ("evaluation", "final", "actions"):
        assert events(alone, kind) == events(spread, kind)
