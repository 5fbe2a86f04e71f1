"""The closed form: equal to scikit-learn's classifiers, whatever the partition; exact sums; defined limit cases."""

from __future__ import annotations

import math
from functools import reduce
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from equipoise.closed_form import (
    Sums,
    discriminant,
    noise_scale,
    off_diagonal,
    on_grid,
    packed,
    principal,
    ridge,
    sums_of,
    unit,
    unpacked,
    whitened,
)

CLASSES, SIZE = 4, 6


def drawn(count: int = 120, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (n, D) around class means, and labels (n,) of the first three of four classes, with a long tail."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), count, True, generator=random)
    means = 2 * torch.randn(CLASSES, SIZE, generator=random, dtype=torch.float64)
    return means[labels] + torch.randn(count, SIZE, generator=random, dtype=torch.float64), labels


def exact(features: torch.Tensor, labels: torch.Tensor) -> Sums:
    return Sums(*map(on_grid, sums_of(features, labels, CLASSES)))


@pytest.mark.parametrize("shrinkage", [0.0, 0.3, 1.0])
def test_with_the_datas_priors_it_is_scikit_learns_discriminant_analysis(shrinkage):
    features, labels = drawn()
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage or None).fit(features, labels)
    ours = discriminant(sums_of(features, labels, CLASSES), shrinkage, prior=1.0)
    torch.testing.assert_close(ours.weights[:, :3].T, torch.from_numpy(theirs.coef_), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.offsets[:3], torch.from_numpy(theirs.intercept_), rtol=1e-6, atol=1e-6)


def test_ridge_is_scikit_learns_regression_on_class_membership():
    features, labels = drawn()
    theirs = Ridge(alpha=2.5).fit(features, torch.nn.functional.one_hot(labels, 3))
    ours = ridge(sums_of(features, labels, CLASSES), 2.5, prior=1.0)
    torch.testing.assert_close(ours.weights[:, :3].T, torch.from_numpy(theirs.coef_), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours.offsets[:3], torch.from_numpy(theirs.intercept_), rtol=1e-8, atol=1e-8)


@given(st.lists(st.integers(0, 4), min_size=120, max_size=120))
def test_every_partition_gives_the_classifier_of_the_pooled_images(sites):
    features, labels = unit(drawn()[0]), drawn()[1]
    places = torch.tensor(sites)
    parts = [exact(features[places == site], labels[places == site]) for site in set(sites)]
    total, pooled = reduce(Sums.plus, parts), sums_of(features, labels, CLASSES)
    for solve in (discriminant, ridge):
        one, other = solve(total), solve(pooled)
        torch.testing.assert_close(one.scores(features), other.scores(features), rtol=1e-6, atol=1e-6)


@given(st.integers(1, 119), st.permutations(range(3)))
def test_sums_on_the_grid_add_in_any_order_and_subtract_without_a_rest(cut, order):
    features, labels = unit(drawn()[0]), drawn()[1]
    parts = [exact(features[:cut], labels[:cut]), exact(features[cut:], labels[cut:]), exact(features, labels)]
    total = reduce(Sums.plus, parts)
    again = reduce(Sums.plus, [parts[place] for place in order])
    assert all(one.equal(other) for one, other in zip(total, again, strict=True))
    left = total.plus(parts[2], -1.0)
    assert all(one.equal(other) for one, other in zip(left, parts[0].plus(parts[1]), strict=True))


def test_prior_0_counts_all_classes_alike_and_1_adds_the_logarithm_of_their_shares():
    features, labels = drawn()
    sums = sums_of(features, labels, CLASSES)
    alike, as_found = discriminant(sums, prior=0.0), discriminant(sums, prior=1.0)
    shares = (sums.counts / sums.counts.sum())[:3]
    torch.testing.assert_close(as_found.offsets[:3] - alike.offsets[:3], shares.log())
    torch.testing.assert_close(as_found.weights, alike.weights)


def test_with_full_shrinkage_and_no_prior_the_nearest_class_mean_wins():
    features, labels = drawn()
    sums = sums_of(features, labels, CLASSES)
    means = (sums.by_class / sums.counts[:, None])[:3]
    nearest = torch.cdist(features, means).argmin(1)
    assert discriminant(sums, 1.0, 0.0).scores(features).argmax(1).equal(nearest)


@pytest.mark.parametrize("solve", [discriminant, ridge])
def test_a_class_that_nobody_has_is_never_predicted(solve):
    features, labels = drawn()
    scores = solve(sums_of(features, labels, CLASSES)).scores(torch.cat([features, -5 * features]))
    assert torch.isfinite(scores).all()
    assert (scores[:, 3] < scores[:, :3].amin(1)).all()


@pytest.mark.parametrize("solve", [discriminant, ridge])
def test_one_image_decides_for_its_class_and_none_for_no_class(solve):
    features, labels = unit(drawn(1)[0]), torch.tensor([2])
    assert solve(sums_of(features, labels, CLASSES)).scores(features).argmax(1).tolist() == [2]
    nothing = Sums(*(torch.zeros_like(part) for part in sums_of(features, labels, CLASSES)))
    assert not solve(nothing).scores(features).any()


@pytest.mark.parametrize("solve", [discriminant, ridge])
def test_fewer_images_than_components_give_a_classifier(solve):
    features, labels = drawn(4)
    scores = solve(sums_of(unit(features), labels, CLASSES)).scores(unit(features))
    assert torch.isfinite(scores).all() and (scores.argmax(1) == labels).all()


def test_whitened_features_have_covariance_1_and_mean_0():
    features, _ = drawn()
    mean, whitening = principal(features.T @ features, features.sum(0), len(features), SIZE)
    white = (features - mean) @ whitening
    torch.testing.assert_close(white.T @ white / len(white), torch.eye(SIZE, dtype=torch.float64))
    torch.testing.assert_close(white.mean(0), torch.zeros(SIZE, dtype=torch.float64))
    assert whitened(features, mean, whitening).norm(dim=1).allclose(torch.ones(len(features), dtype=torch.float64))


@pytest.mark.parametrize(("images", "left"), [(1, 0), (3, 2), (50, 4)])
def test_whitening_has_no_more_directions_than_asked_for_or_than_images_span(images, left):
    features, _ = drawn(images)
    mean, whitening = principal(features.T @ features, features.sum(0), images, 4)
    assert whitening.shape == (SIZE, left) and torch.isfinite(mean).all()


def test_a_triangle_holds_the_whole_matrix():
    matrix = torch.randn(5, 5, dtype=torch.float64)
    symmetric = matrix + matrix.T
    assert packed(symmetric).shape == (15,) and unpacked(packed(symmetric)).equal(symmetric)


def test_one_image_changes_all_sums_by_at_most_the_root_of_3():
    features, labels = unit(drawn()[0]), drawn()[1]
    for row in range(20):
        sums = sums_of(features[row : row + 1], labels[row : row + 1], CLASSES)
        change = torch.cat([packed(sums.gram), sums.by_class.flatten(), sums.counts])
        assert change.norm() <= math.sqrt(3) + 1e-12


@pytest.mark.parametrize(("epsilon", "releases"), [(8.0, 1), (1.0, 1), (2.0, 2)])
def test_the_noise_is_the_least_that_gives_the_asked_privacy(epsilon, releases):
    """The exact trade-off of the Gaussian mechanism (Balle and Wang, 2018) at the sums' sensitivity."""
    pytest.importorskip("dp_accounting")
    ratio, normal = math.sqrt(3 * releases) / noise_scale(epsilon, 1e-5, releases), NormalDist()
    spent = normal.cdf(ratio / 2 - epsilon / ratio) - math.exp(epsilon) * normal.cdf(-ratio / 2 - epsilon / ratio)
    assert spent == pytest.approx(1e-5, rel=1e-3)


def test_noise_beside_the_diagonal_may_be_smaller_since_each_entry_stands_for_two():
    """In units of its noise, an image of unit length changes the packed Gram matrix by exactly 1."""
    image = torch.nn.functional.normalize(
        torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), dim=0
    )
    change = packed(torch.outer(image, image))
    assert (change / off_diagonal(len(change))).norm().item() == pytest.approx(1.0)
