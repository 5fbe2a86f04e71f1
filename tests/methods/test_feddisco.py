"""FedDisco's weights by size and class discrepancy; by size alone it is FedAvg bit for bit."""

from __future__ import annotations

import pytest
import torch

from clients import SHORT, new_client, new_server
from equipoise.contract.protocol import Replies, Reply
from harness import all_state, assert_same_bits, run_tiny


def test_by_size_alone_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    for name, settings in (("method", ()), ("component", ('components=["discrepancy"]',))):
        table = "discrepancy" if settings else "feddisco"
        method = "fedavg" if settings else "feddisco"
        limit = run_tiny(tmp_path / name, method, *SHORT, *settings, f"{table}.a=0", f"{table}.b=0")
        assert_same_bits(all_state(plain), all_state(limit))


def weights(sizes: list[int], far: list[float], *settings: str) -> list[float]:
    server = new_server("feddisco", *settings)
    replies = [Reply(str(i), {"examples": n, "discrepancy": d}) for i, (n, d) in enumerate(zip(sizes, far))]
    found = server.sides["discrepancy"].weights(Replies(replies))
    return [value / sum(found) for value in found]


def test_weights_follow_the_formula():
    raw = [0.6 - 0.5 * 0.2 + 0.1, 0.3 - 0.5 * 0.1 + 0.1, 0.0]  # the third: 0.1 - 0.45 + 0.1 < 0
    assert weights([60, 30, 10], [0.2, 0.1, 0.9]) == pytest.approx([value / sum(raw) for value in raw])


def test_where_no_site_would_count_sizes_do():
    assert weights([6, 2], [9.0, 9.0]) == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize(
    ("measure", "counts", "expected"),
    [
        ("l2", (5, 5, 5, 5), 0.0),
        ("l2", (8, 0, 0, 0), 0.75**0.5),
        ("kl", (5, 5, 5, 5), 0.0),
        ("kl", (4, 4, 0, 0), 0.6931471805599453),
    ],
)
def test_a_site_tells_how_far_its_class_shares_are_from_equal_ones(measure, counts, expected):
    client = new_client("feddisco", f"feddisco.measure='{measure}'", class_counts=counts)
    reply = client.sides["discrepancy"].reply()
    with pytest.raises(StopIteration) as stop:
        next(reply)
    assert stop.value.value["discrepancy"] == pytest.approx(expected, abs=1e-7)
    assert torch.tensor(counts).sum() == client.class_counts.sum()
