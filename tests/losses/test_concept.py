"""FedBM's losses and mutual learning: golden numbers, plain loops, and limit cases."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from closeness import assert_close, assert_golden, gradient
from equipoise.losses import concept_alignment, concept_logits, diversity, mutual_kl, norm_statistics_gap


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_concept_losses_have_the_golden_values_and_gradient(golden):
    case = golden("fedbm/concept_classifier")
    mean, variance, tau = case["mean"], case["cov"], float(case["tau"])
    raw = case["feature"] @ case["linear_w"].T + case["linear_b"]
    assert_close(F.normalize(raw, dim=-1), F.normalize(case["embedding"], dim=-1))
    assert_close(concept_logits(raw, mean, variance, tau), case["logits_scaled"])
    assert_close(concept_logits(raw, mean, variance, tau) / tau, case["logits_unscaled_eval"])
    assert_close(concept_alignment(raw, case["labels"], mean, variance, tau), case["loss"])
    one_by_one = [concept_alignment(z[None], y[None], mean, variance, tau) for z, y in zip(raw, case["labels"])]
    assert_close(torch.stack(one_by_one), case["ce_per_sample"] + case["variance_term_per_sample"])
    cross_entropies = F.cross_entropy(concept_logits(raw, mean, variance, tau), case["labels"], reduction="none")
    assert_close(cross_entropies, case["ce_per_sample"])


def test_concept_alignment_has_the_golden_gradient(golden):
    case = golden("fedbm/concept_classifier")
    assert_golden(
        lambda h: concept_alignment(h, case["labels"], case["mean"], case["cov"], float(case["tau"])),
        case["embedding"],
        case["loss"],
        case["grad_embedding"],
    )


def test_concept_logits_without_variance_are_a_scaled_cosine_classifier():
    features, mean = normal(5, 6), F.normalize(normal(3, 6, seed=1), dim=-1)
    nothing, labels = torch.zeros(3, 6), torch.tensor([0, 1, 2, 2, 0])
    scaled = 12.5 * F.cosine_similarity(features[:, None], mean, dim=-1)
    assert_close(concept_logits(features, mean, nothing, 12.5), scaled, 1e-9)
    assert_close(concept_alignment(features, labels, mean, nothing, 12.5), F.cross_entropy(scaled, labels), 1e-9)


def test_a_temperature_of_double_precision_does_not_widen_the_loss():
    features, mean, variance = normal(4, 6).float(), normal(3, 6, seed=1).float(), torch.ones(3, 6)
    loss = concept_alignment(features, torch.tensor([0, 1, 2, 1]), mean, variance, torch.tensor(5.0).double())
    assert loss.dtype == torch.float32


def test_concept_alignment_bounds_the_expected_loss_over_texts():
    features, mean, variance = normal(4, 6), normal(3, 6, seed=1) / 3, normal(3, 6, seed=2).square() / 50
    labels = torch.tensor([0, 1, 2, 1])
    texts = mean + variance.sqrt() * normal(20_000, 3, 6, seed=3)
    scores = 5.0 * torch.einsum("bd,tcd->tbc", F.normalize(features, dim=-1), texts)
    expected = F.cross_entropy(scores.flatten(0, 1), labels.repeat(20_000))
    assert expected < concept_alignment(features, labels, mean, variance, 5.0)


def test_diversity_has_the_golden_value_and_gradient(golden):
    case = golden("fedbm/diversity_loss")
    assert_golden(
        lambda images: diversity(case["codes"], images, case["targets"], int(case["num_classes"])),
        case["images"],
        case["loss"],
        case["grad_images"],
    )


def test_diversity_is_the_mean_over_pairs_of_a_class_summed_over_classes():
    codes, images, labels = normal(6, 3), normal(6, 2, 4, 4, seed=1), torch.tensor([0, 2, 0, 0, 2, 3])
    total = 0.0
    for members in ([0, 2, 3], [1, 4]):
        ratios = [
            (images[i] - images[j]).abs().sum() / (codes[i] - codes[j]).abs().sum()
            for i, j in itertools.combinations(members, 2)
        ]
        total += torch.stack([1 / (ratio + 1e-5) for ratio in ratios]).mean()
    assert_close(diversity(codes, images, labels, num_classes=5), total / 5, 1e-9)


@pytest.mark.parametrize("labels", [[0], [0, 1, 2]])
def test_diversity_without_a_pair_is_zero_with_no_gradient(labels):
    size, labels = len(labels), torch.tensor(labels)
    codes, images = normal(size, 3), normal(size, 1, 2, 2)
    assert diversity(codes, images, labels, 3) == 0
    assert (gradient(lambda x: diversity(codes, x, labels, 3), images) == 0).all()


def test_diversity_of_the_same_code_drawn_twice_is_finite():
    codes, images, labels = torch.zeros(2, 3), torch.zeros(2, 1, 2, 2), torch.tensor([1, 1])
    assert diversity(codes, images, labels, 2) == 0
    assert gradient(lambda x: diversity(codes, x, labels, 2), images).isfinite().all()


def test_batch_norm_gap_has_the_golden_value_and_gradient(golden):
    case = golden("fedbm/bn_distribution_loss")

    def gap(images):
        means, variances, x = [], [], images
        for layer, padding in ((1, 1), (2, 0)):
            x = F.conv2d(x, case[f"conv{layer}"], padding=padding)
            means.append(x.mean((0, 2, 3)))
            variances.append(x.var((0, 2, 3), correction=0))
            x = F.relu(F.batch_norm(x, case[f"bn{layer}_mean"], case[f"bn{layer}_var"]))
        return norm_statistics_gap(
            means, variances, [case["bn1_mean"], case["bn2_mean"]], [case["bn1_var"], case["bn2_var"]]
        )

    assert_golden(gap, case["images"], case["loss"], case["grad_images"])


def test_batch_norm_gap_is_zero_with_no_gradient_where_statistics_agree():
    mean, variance = normal(4), normal(4).square()
    assert norm_statistics_gap([mean], [variance], [mean], [variance]) == 0
    assert (gradient(lambda m: norm_statistics_gap([m], [variance], [mean], [variance]), mean) == 0).all()


def test_mutual_kl_is_zero_for_equal_logits_and_the_divergence_from_the_teacher_otherwise():
    student, teacher = normal(5, 3), normal(5, 3, seed=1)
    target = teacher.softmax(1)
    expected = (target * (target.log() - student.log_softmax(1))).sum(1).mean()
    assert_close(mutual_kl(student, teacher), expected, 1e-12)
    assert mutual_kl(student, student + 3.0).abs() < 1e-12


def test_mutual_kl_teaches_the_student_alone():
    student, teacher = normal(5, 3).requires_grad_(), normal(5, 3, seed=1).requires_grad_()
    mutual_kl(student, teacher).backward()
    assert teacher.grad is None and (student.grad != 0).all()


def test_mutual_kl_counts_every_pixel_as_a_sample():
    student, teacher = normal(2, 3, 4, 5), normal(2, 3, 4, 5, seed=1)
    rows = [logits.permute(0, 2, 3, 1).reshape(-1, 3) for logits in (student, teacher)]
    assert_close(mutual_kl(student, teacher), mutual_kl(*rows), 1e-12)
