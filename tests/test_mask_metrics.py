"""Overlap and surface distances of masks, and what is said of empty ones."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from equipoise.mask_metrics import dice_of, overlap, surface_distances, volume_scores

DIAGONAL = float(np.hypot(8, 10))


def boxes(*places, slices=1):
    """A volume (slices, 8, 10) with a box of 3x4 pixels in some slices, at (slice, row, column)."""
    volume = np.zeros((slices, 8, 10), dtype=bool)
    for number, row, column in places:
        volume[number, row : row + 3, column : column + 4] = True
    return volume


def test_equal_masks_have_dice_and_iou_1_and_no_distance():
    mask = boxes((0, 2, 3))
    assert overlap(mask, mask) == (1.0, 1.0)
    assert surface_distances(mask, mask) == (0.0, 0.0)


def test_dice_and_iou_count_pixels():
    assert overlap(boxes((0, 2, 3)), boxes((0, 2, 5))) == (2 * 6 / 24, 6 / 18)


@pytest.mark.parametrize("empty", ["both", "truth", "prediction"])
def test_an_empty_mask_says_nothing_where_both_are_and_is_missed_where_one_is(empty):
    box, nothing = boxes((0, 2, 3)), boxes()
    truth, predicted = {"both": (nothing, nothing), "truth": (nothing, box), "prediction": (box, nothing)}[empty]
    if empty == "both":
        assert np.isnan([*overlap(truth, predicted), *surface_distances(truth, predicted)]).all()
    else:
        assert overlap(truth, predicted) == (0.0, 0.0)
        assert surface_distances(truth, predicted) == (DIAGONAL, DIAGONAL)


def test_distances_are_those_between_all_pairs_of_surface_pixels_of_a_slice():
    random = np.random.default_rng(0)
    truth, predicted = (random.random((1, 16, 16)) < 0.3 for _ in range(2))

    def surface(mask):
        inside = np.pad(mask[0], 1)
        around = inside[:-2, 1:-1] & inside[2:, 1:-1] & inside[1:-1, :-2] & inside[1:-1, 2:]
        return np.argwhere(mask[0] & ~around)

    apart = cdist(surface(truth), surface(predicted))
    ways = apart.min(1), apart.min(0)
    hd95, asd = surface_distances(truth, predicted)
    assert hd95 == pytest.approx(max(np.percentile(way, 95) for way in ways))
    assert asd == pytest.approx(np.concatenate(ways).mean())


def test_no_distance_leads_from_slice_to_slice():
    truth = boxes((0, 2, 3), (1, 2, 3), slices=2)
    predicted = boxes((0, 2, 3), slices=2)
    surface = 3 * 4 - 2
    hd95, asd = surface_distances(truth, predicted)
    assert hd95 == DIAGONAL, "the second slice's structure is missed, though the first slice's lies just above"
    assert asd == pytest.approx(DIAGONAL * surface / (3 * surface))


def test_scores_of_a_volume_leave_the_background_and_unseen_structures_out():
    truth = boxes((0, 2, 3)).astype(np.uint8)
    scores = volume_scores(truth, truth, 3)
    assert np.isnan(scores[:, [0, 2]]).all()
    assert scores[:, 1].tolist() == [1, 1, 0, 0]


def test_dice_of_all_pixels_leaves_the_background_out():
    assert dice_of(torch.tensor([[90, 2, 0], [1, 7, 0], [0, 0, 0]]).numpy()) == pytest.approx(14 / 17)
