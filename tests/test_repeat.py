"""Steps that a server repeats: as many as asked for; on a GPU, replayed ones as eager ones."""

import pytest
import torch

from equipoise.engine.repeat import Repeated

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def walk(device, capture):
    """A random walk of 3 and then 7 steps, as a step that a GPU can capture."""
    place = torch.zeros(4, device=device)
    random = torch.Generator(device=device).manual_seed(3)
    repeated = Repeated(lambda: place.add_(torch.randn(4, generator=random, device=device)), random, capture)
    repeated(3)
    repeated(7)
    return place


def test_a_step_runs_as_often_as_asked_for():
    random = torch.Generator().manual_seed(3)
    expected = sum(torch.randn(4, generator=random) for _ in range(10))
    torch.testing.assert_close(walk("cpu", True), expected)


@GPU
def test_captured_steps_draw_and_count_as_eager_ones():
    assert torch.equal(walk("cuda", True), walk("cuda", False))


@GPU
def test_a_step_that_cannot_be_captured_runs_eagerly_from_where_it_was(caplog):
    place = torch.zeros((), device="cuda")
    repeated = Repeated(lambda: place.add_(1 + 0 * place.item()), torch.Generator(device="cuda"))
    repeated(5)
    assert place.item() == 5
    assert "eagerly" in caplog.text
