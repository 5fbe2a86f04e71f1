"""Class means of features at a site and over sites, and shuffled passes over kept features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.components._merging import class_means, class_sums, mean_by_class, shuffled_batches
from equipoise.contract.protocol import Replies, Reply


def test_sums_over_batches_give_the_mean_of_each_class_and_zeros_for_an_absent_one():
    features = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 3, 3, 0, 1, 1, 0, 0, 3])
    parts = [class_sums(features[rows], labels[rows], 4) for rows in (slice(0, 4), slice(4, 10))]
    sums, counts = (sum(part[name] for part in parts) for name in ("sums", "counts"))
    means = class_means(sums, counts)
    assert counts.tolist() == [4, 3, 0, 3]
    for label in (0, 1, 3):
        torch.testing.assert_close(means[label], features[labels == label].mean(0))
    assert not means[2].any()


@pytest.mark.parametrize(("kind", "expected"), [("size", [1.75, 5.0, 0.0]), ("uniform", [2.5, 5.0, 0.0])])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_sites_count_for_the_classes_that_they_have(kind, expected, shape):
    sent = {1.0: [3.0, 0.0, 0.0], 4.0: [1.0, 0.0, 0.0], 5.0: [0.0, 2.0, 0.0]}
    replies = Replies(
        [
            Reply(str(value), {"means": torch.full((3, *shape), value), "class_counts": torch.tensor(counts)})
            for value, counts in sent.items()
        ]
    )
    means, known = mean_by_class(replies, "means", kind)
    torch.testing.assert_close(means, torch.tensor(expected).reshape(3, *[1] * len(shape)).expand(3, *shape))
    assert known.tolist() == [True, True, False]


@given(size=st.integers(1, 20), batch=st.integers(1, 25), passes=st.integers(0, 3))
def test_each_pass_sees_every_sample_once_in_its_own_order(size, batch, passes):
    batches = list(shuffled_batches(size, batch, passes, torch.Generator().manual_seed(0)))
    positions = torch.cat([torch.zeros(0, dtype=torch.long), *batches]).tolist()
    assert len(positions) == passes * size and all(len(rows) <= batch for rows in batches)
    for start in range(0, len(positions), size):
        assert sorted(positions[start : start + size]) == list(range(size))
