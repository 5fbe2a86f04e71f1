"""Steps that a server repeats: as many as asked for; on a GPU, replayed ones as eager ones."""

import weakref
from functools import partial

import pytest
import torch

from composed import server_of, setting_of
from equipoise.checks.host_reads import HostReads
from equipoise.contract.repeat import Repeated
from equipoise.prototypes import drive_apart

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def walk(device, capture):
    """A random walk of 3 and then 7 steps, as a step that a GPU can capture; and whether it did."""
    place = torch.zeros(4, device=device)
    random = torch.Generator(device=device).manual_seed(3)
    repeated = Repeated(torch.device(device), random, capture)

    def step():
        place.add_(torch.randn(4, generator=random, device=device))

    repeated(step, 3)
    repeated(step, 7)
    return place, repeated.captured


def test_a_step_runs_as_often_as_asked_for():
    random = torch.Generator().manual_seed(3)
    expected = sum(torch.randn(4, generator=random) for _ in range(10))
    place, captured = walk("cpu", True)
    torch.testing.assert_close(place, expected)
    assert not captured


def test_what_is_repeated_does_not_outlive_its_owner():
    class Owner:
        def __init__(self):
            self.repeated = Repeated(torch.device("cpu"))
            self.repeated(self.step, 3)

        def step(self):
            pass

    gone = weakref.ref(Owner())
    assert gone() is None


@GPU
def test_captured_steps_draw_and_count_as_eager_ones():
    (captured, replayed), (eager, _) = walk("cuda", True), walk("cuda", False)
    assert replayed and torch.equal(captured, eager)


@GPU
def test_a_step_that_cannot_be_captured_runs_eagerly_from_where_it_was(caplog):
    place, random = torch.zeros((), device="cuda"), torch.Generator(device="cuda").manual_seed(1)

    def step():
        place.add_(torch.rand((), generator=random, device="cuda"))
        place.item()

    repeated = Repeated(torch.device("cuda"), random)
    repeated(step, 5)
    again = torch.Generator(device="cuda").manual_seed(1)
    expected = sum(torch.rand((), generator=again, device="cuda") for _ in range(5))
    torch.testing.assert_close(place, expected)
    assert "eagerly" in caplog.text and not repeated.captured


def repeated_steps():
    """The steps that servers repeat, by what they do."""

    def side(name, method, *settings):
        return server_of(setting_of(method, *settings)).sides[name]

    generator = side("generator", "fedbm", "fedbm.generator_width=2", "fedbm.generator_batch=6")
    generator.parts.net.eval().requires_grad_(False)
    head = side("retrained-head", "creff", "creff.features=8")
    return {
        "generator": generator.training.step,
        "matching": head.fitting._match_step,
        "retraining": head.fitting._retrain_epoch,
        "prototypes": partial(drive_apart, side("inter-contrast", "fediic").vectors),
    }


@pytest.mark.parametrize("name", ["generator", "matching", "retraining", "prototypes"])
def test_what_servers_repeat_reads_nothing_on_the_host(name):
    step = repeated_steps()[name]
    with HostReads() as reads:
        step()
    assert reads.seen == []
