"""The contrastive losses: golden numbers, plain loops over their formulas, and limit cases."""

import math

import pytest
import torch
import torch.nn.functional as F

from closeness import assert_close, assert_golden, gradient
from equipoise.core.errors import UserError
from equipoise.losses import (
    inter_client_contrastive,
    intra_client_contrastive,
    model_contrastive,
    prototype_contrastive,
)

LABELS = torch.tensor([0, 1, 2, 0, 1])
COUNTS = torch.tensor([30, 15, 5, 0])


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


@pytest.mark.parametrize("name", ["fediic/intra_scl", "fediic/intra_scl_clamped"])
def test_intra_client_contrast_has_the_golden_value_and_gradient(golden, name):
    case = golden(name)
    assert_golden(
        lambda z: intra_client_contrastive(z, case["labels"], case["class_counts"]),
        case["features"],
        case["loss"],
        case["grad_features"],
    )


def test_inter_client_contrast_has_the_golden_value_and_gradient(golden):
    case = golden("fediic/inter_scl")
    assert_golden(
        lambda z: inter_client_contrastive(z, case["labels"], case["prototypes"], float(case["temperature"])),
        case["features"],
        case["loss"],
        case["grad_features"],
    )


def test_intra_client_contrast_follows_its_formula_anchor_by_anchor():
    features, power, temperature, floor = unit(5, 2, 6), 0.3, 0.4, 0.1
    samples, labels = torch.cat([features[:, 0], features[:, 1]]), torch.cat([LABELS, LABELS])
    share = (COUNTS / COUNTS.sum())[labels].double()
    losses = []
    for i in range(10):
        others = [j for j in range(10) if j != i]
        score = {j: samples[i] @ samples[j] / max((share[i] * share[j]) ** power * temperature, floor) for j in others}
        total = torch.stack(list(score.values())).logsumexp(0)
        losses.append(-torch.stack([score[j] - total for j in others if labels[j] == labels[i]]).mean())
    actual = intra_client_contrastive(features, LABELS, COUNTS, power, temperature, floor)
    assert_close(actual, torch.stack(losses).mean(), 1e-6)


def test_intra_client_contrast_of_a_single_image_is_zero_with_no_gradient():
    features, label = unit(1, 2, 6), torch.tensor([2])
    assert_close(intra_client_contrastive(features, label, COUNTS), 0.0)
    assert (gradient(lambda z: intra_client_contrastive(z, label, COUNTS), features) == 0).all()


def test_contrasts_do_not_depend_on_the_order_of_images_and_views():
    features, order = unit(5, 2, 6), torch.tensor([3, 0, 4, 1, 2])
    shuffled = features[order].flip(1)
    for loss, extra in ((intra_client_contrastive, COUNTS), (inter_client_contrastive, unit(4, 6, seed=1))):
        assert_close(loss(shuffled, LABELS[order], extra), loss(features, LABELS, extra), 1e-12)


def test_a_class_without_counts_meets_the_floor_and_not_a_division_by_zero():
    features, labels = unit(3, 2, 6), torch.tensor([3, 3, 0])
    assert gradient(lambda z: intra_client_contrastive(z, labels, COUNTS), features).isfinite().all()


def test_model_contrast_is_log_two_where_global_and_previous_model_agree():
    features, other = unit(5, 6), unit(5, 6, seed=1)
    assert_close(model_contrastive(features, other, other), math.log(2), 1e-12)


def test_model_contrast_is_a_two_way_cross_entropy_of_cosines():
    features, near, far = 3 * unit(5, 6), 2 * unit(5, 6, seed=1), unit(5, 6, seed=2)
    logits = torch.stack([F.cosine_similarity(features, other) for other in (near, far)], 1) / 0.2
    expected = F.cross_entropy(logits, torch.zeros(5, dtype=torch.long))
    assert_close(model_contrastive(features, near, far, temperature=0.2), expected, 1e-12)


def test_prototype_contrast_is_a_cosine_classifier_over_the_prototypes_there_are():
    features, prototypes = 2 * unit(5, 6), 3 * unit(4, 6, seed=1)
    present = torch.tensor([True, True, True, False])
    cosine = F.normalize(features, dim=-1) @ F.normalize(prototypes, dim=-1).T
    expected = F.cross_entropy(cosine[:, :3] / 0.5, LABELS)
    assert_close(prototype_contrastive(features, LABELS, prototypes, present), expected, 1e-12)
    assert_close(prototype_contrastive(features, LABELS, prototypes), F.cross_entropy(cosine / 0.5, LABELS), 1e-12)


def test_samples_of_classes_without_prototype_do_not_pull():
    features, prototypes = unit(5, 6), unit(4, 6, seed=1)
    for present in (torch.tensor([True, False, True, True]), torch.zeros(4, dtype=torch.bool)):
        slope = gradient(lambda z, p=present: prototype_contrastive(z, LABELS, prototypes, p), features)
        assert (slope[~present[LABELS]] == 0).all() and (slope[present[LABELS]] != 0).all()
    assert prototype_contrastive(features, LABELS, prototypes, torch.zeros(4, dtype=torch.bool)) == 0


def test_features_without_the_axis_of_views_are_refused():
    with pytest.raises(UserError, match="images, views, dimensions"):
        intra_client_contrastive(unit(5, 8), LABELS, COUNTS)
    with pytest.raises(UserError, match="images, views, dimensions"):
        inter_client_contrastive(unit(5, 8), LABELS, unit(4, 8))
