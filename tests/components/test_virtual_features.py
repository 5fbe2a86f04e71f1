"""CCVR: Gaussians of the pooled features of each class, and a classifier trained on draws of them."""

from __future__ import annotations

import torch

from compositions import configured, played
from equipoise.components.virtual_features import calibrated, gaussian_of


def test_a_class_has_the_mean_and_covariance_of_its_pooled_features():
    features = torch.randn(50, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean, root = gaussian_of(50, features.sum(0), features.T @ features)
    torch.testing.assert_close(mean, features.mean(0))
    torch.testing.assert_close(root @ root.T, features.T.cov())


def test_one_image_gives_its_feature_without_spread():
    feature = torch.randn(1, 5, dtype=torch.float64)
    mean, root = gaussian_of(1, feature.sum(0), feature.T @ feature)
    assert mean.equal(feature[0]) and root.abs().max() < 1e-7


def test_the_classifier_separates_the_classes_it_is_trained_on_and_leaves_others_features_out():
    random = torch.Generator().manual_seed(1)
    means = 4 * torch.eye(3)
    features = means[:, None] + torch.randn(3, 40, 3, generator=random)
    known = torch.tensor([True, True, False])
    found = calibrated(torch.zeros(3, 4), features, known, 30, 16, 0.1, random)
    logits = features[:2].flatten(0, 1) @ found[:, :3].T + found[:, 3]
    labels = torch.tensor([0, 1]).repeat_interleave(40)
    assert (logits.argmax(1) == labels).float().mean() > 0.95
    torch.testing.assert_close(found.sum(0), torch.zeros(4), atol=1e-5, rtol=0)  # as many ups as downs


def test_one_sgd_step_is_that_of_cross_entropy():
    random = torch.Generator().manual_seed(1)
    features, start = torch.randn(2, 3, 4, generator=random), torch.randn(2, 5, generator=random)
    found = calibrated(start, features, torch.ones(2, dtype=torch.bool), 1, 6, 0.5, random)
    classifier = start.clone().requires_grad_()
    inputs = torch.nn.functional.pad(features.flatten(0, 1), (0, 1), value=1.0)
    loss = torch.nn.functional.cross_entropy(inputs @ classifier.T, torch.tensor([0, 0, 0, 1, 1, 1]))
    (slope,) = torch.autograd.grad(loss, classifier)
    torch.testing.assert_close(found, start - 0.5 * slope)


def test_by_default_the_last_round_alone_calibrates():
    settings = ("train.rounds=3", "virtual-features.epochs=2")
    assert not played(configured("fedavg", ["virtual-features"], *settings)).said.get("virtual-features.moments")
    often = played(configured("fedavg", ["virtual-features"], *settings, "virtual-features.when=round"))
    assert often.said["virtual-features.moments"] == {"gram", "by_class", "class_counts"}
