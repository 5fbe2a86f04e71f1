"""Many tensors at once give what one at a time gives."""

import math

import torch

from equipoise.contract.bulk import all_finite, clone_all, copy_all


def mixed() -> list[torch.Tensor]:
    return [
        torch.randn(2, 3),
        torch.tensor(5),
        torch.randn(4, dtype=torch.float64),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.tensor([True, False]),
    ]


def test_values_are_copied_into_targets_of_other_types_and_layouts():
    values = mixed()
    into = [
        torch.zeros(2, 3),
        torch.tensor(0),
        torch.zeros(4),
        torch.zeros(2, 3, 4, 4),
        torch.zeros(2, dtype=torch.bool),
    ]
    kept = list(into)
    copy_all(into, values)
    for target, value in zip(kept, values):
        assert torch.equal(target, value.to(target.dtype))


def test_clones_share_no_memory_and_keep_the_layout():
    tensors = mixed()
    before = [tensor.clone() for tensor in tensors]
    clones = clone_all(tensors)
    for tensor in tensors:
        tensor.zero_()
    for clone, value in zip(clones, before):
        assert torch.equal(clone, value) and clone.stride() == value.stride() and clone.dtype == value.dtype


def test_numbers_whose_sum_overflows_are_finite():
    lowest = torch.finfo(torch.float32).min
    tensors = [torch.full((4,), 3e38), torch.full((2,), lowest), torch.tensor([1e39], dtype=torch.float64)]
    assert all_finite(tensors).all()
    assert all_finite([*tensors, torch.tensor([3e38, torch.inf])]).tolist() == [True, True, True, False]


def test_nan_and_infinity_are_found_wherever_they_stand():
    tensors = [torch.tensor([1.0, -3.0]), torch.randn(500), torch.randn(500).double(), torch.tensor(-2.0)]
    tensors[1][499] = math.nan
    tensors[2][0] = -math.inf
    assert all_finite(tensors).tolist() == [True, False, False, True]
