"""The losses on prototypes: NPR, CPA and FedProto against golden numbers, limit cases and absent classes."""

import pytest
import torch
import torch.nn.functional as F

from closeness import assert_close, assert_golden, gradient
from equipoise.core.errors import UserError
from equipoise.losses import (
    alignment_weights,
    conjoint_prototype_aligned,
    cross_entropy,
    imbalance_ratios,
    mutual_kl,
    prototype_distance,
    subcluster_regularisation,
    subcluster_scores,
)

LABELS = torch.tensor([0, 1, 2, 0, 1])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "normalise, value, slope",
    [
        ("layernorm", "npr_loss_official_layernorm", "grad_layernorm"),
        ("none", "npr_loss_paper_eq3", "grad_paper_eq3"),
    ],
)
def test_subcluster_regularisation_has_the_golden_value_and_gradient(golden, normalise, value, slope):
    case = golden("fednpr/npr_loss")
    assert_golden(
        lambda z: subcluster_regularisation(z, case["labels"], case["prototypes"], normalise),
        case["features"],
        case[value],
        case[slope],
    )


def test_subcluster_scores_are_the_golden_largest_cosines(golden):
    case = golden("fednpr/npr_loss")
    assert_close(subcluster_scores(case["features"], case["prototypes"], "none"), case["max_cos"])


def test_the_weight_of_npr_multiplies_it_as_in_equation_five(golden):
    case = golden("fednpr/npr_loss")
    npr = subcluster_regularisation(case["features"], case["labels"], case["prototypes"], "layernorm")
    assert_close(case["sup_loss"] + 0.05 * npr, case["total_correct_lambda005"])


def test_npr_with_one_subcluster_is_a_nearest_mean_classifier():
    features, means = normal(5, 6), normal(3, 1, 6, seed=1)
    cosine = F.cosine_similarity(features[:, None], means[:, 0], dim=-1)
    assert_close(subcluster_regularisation(features, LABELS, means, "none"), cross_entropy(cosine, LABELS), 1e-9)


def test_npr_sees_the_nearest_subcluster_alone_whatever_their_order():
    features, prototypes = normal(5, 6), normal(3, 4, 6, seed=1)
    expected = subcluster_regularisation(features, LABELS, prototypes)
    repeated = torch.cat([prototypes.flip(1), prototypes[:, :1]], 1)
    assert_close(subcluster_regularisation(features, LABELS, repeated), expected, 1e-12)


def test_npr_ignores_the_length_of_features_and_prototypes():
    features, prototypes = normal(5, 6), normal(3, 4, 6, seed=1)
    expected = subcluster_regularisation(features, LABELS, prototypes)
    assert_close(subcluster_regularisation(7 * features, LABELS, prototypes / 3), expected, 1e-9)


@pytest.mark.parametrize("normalise", ["layernorm", "none", "temperature"])
def test_npr_without_an_absent_class_is_npr_on_the_others(normalise):
    features, prototypes = normal(5, 6), normal(4, 2, 6, seed=1)
    present = torch.tensor([True, True, True, False])
    expected = subcluster_regularisation(features, LABELS, prototypes[:3], normalise)
    masked = subcluster_regularisation(features, LABELS, prototypes, normalise, present=present)
    assert_close(masked, expected, 1e-9)


def test_npr_with_a_temperature_divides_the_cosines():
    features, prototypes = normal(5, 6), normal(3, 2, 6, seed=1)
    nearest = F.cosine_similarity(features[:, None, None], prototypes, dim=-1).amax(-1)
    actual = subcluster_regularisation(features, LABELS, prototypes, "temperature", temperature=0.2)
    assert_close(actual, cross_entropy(nearest / 0.2, LABELS), 1e-9)


def test_npr_refuses_an_unknown_normalisation():
    with pytest.raises(UserError, match=r"normalise='batchnorm'.*layernorm, none, temperature"):
        subcluster_regularisation(normal(5, 6), LABELS, normal(3, 2, 6), "batchnorm")


def test_cpa_has_the_golden_ratios_weights_values_and_gradients(golden):
    case = golden("prr/cpa_loss")
    labels, counts, prototypes = case["labels"], case["class_counts"], (case["local_proto"], case["global_proto"])
    assert_close(imbalance_ratios(counts, float(case["beta"])), case["G"])
    assert_close(alignment_weights(*prototypes, float(case["tau"])), case["gamma"])
    assert_close((1 + case["tau"]) / alignment_weights(*prototypes, float(case["tau"])) - case["tau"], case["cosine"])
    assert_golden(
        lambda z: conjoint_prototype_aligned(z, labels, counts, None, None),
        case["logits"],
        case["loss_init"],
        case["grad_init"],
    )
    assert_golden(
        lambda z: conjoint_prototype_aligned(z, labels, counts, *prototypes),
        case["logits"],
        case["loss"],
        case["grad"],
    )


@pytest.mark.parametrize("counts, beta", [(torch.tensor([7, 7, 7]), 0.8), (torch.tensor([900, 40, 2]), 0.0)])
def test_cpa_with_equal_counts_or_beta_zero_is_cross_entropy(counts, beta):
    logits = normal(5, 3)
    actual = conjoint_prototype_aligned(logits, LABELS, counts, beta=beta)
    assert_close(actual, cross_entropy(logits, LABELS), 1e-5)


def test_cpa_weighs_aligned_prototypes_by_one_and_opposed_ones_most():
    prototypes = normal(3, 8)
    assert_close(alignment_weights(prototypes, 2 * prototypes), torch.ones(3), 1e-6)
    assert_close(alignment_weights(prototypes, -prototypes, tau=3.0), torch.full((3,), 2.0), 1e-6)


def test_cpa_spares_classes_rarer_than_the_label():
    logits, label, counts = torch.zeros(1, 3), torch.tensor([1]), torch.tensor([1000, 100, 10])
    pushed = gradient(lambda z: conjoint_prototype_aligned(z, label, counts), logits)[0]
    assert pushed[0] > 2 * pushed[2] > 0


@pytest.mark.parametrize("scale", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("shift", [-10.0, 0.0, 30.0])
def test_cpa_adds_its_small_constants_below_the_largest_logit_as_released(scale, shift):
    logits, counts = scale * normal(5, 3) + shift, torch.tensor([900, 40, 2])

    def plain(z):
        ratios, z = imbalance_ratios(counts.double())[LABELS], z - z.amax(1, keepdim=True)
        chances = z.exp()[range(5), LABELS] / ((ratios * z.exp()).sum(1) + 1e-6)
        return -(chances + 1e-6).log().mean()

    assert_golden(
        lambda z: conjoint_prototype_aligned(z, LABELS, counts), logits, plain(logits), gradient(plain, logits)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cpa_bears_huge_logits(dtype):
    logits, counts = normal(5, 3).to(dtype), torch.tensor([900, 40, 2])
    expected = conjoint_prototype_aligned(logits, LABELS, counts)
    assert_close(conjoint_prototype_aligned(logits + 1000, LABELS, counts), expected, 1e-4)  # rounding of 1000 + z
    for huge in (lambda z: 1e30 * z, lambda z: z + 1e4, lambda z: z - 1e4):
        loss = conjoint_prototype_aligned(huge(logits), LABELS, counts)
        slope = gradient(lambda z, huge=huge: conjoint_prototype_aligned(huge(z), LABELS, counts), logits)
        assert loss.isfinite() and slope.isfinite().all()


def test_cpa_leaves_a_class_that_nobody_has_out_of_the_softmax():
    logits, counts = normal(5, 4), torch.tensor([30, 20, 10, 0])
    expected = conjoint_prototype_aligned(logits[:, :3], LABELS, counts[:3])
    assert_close(conjoint_prototype_aligned(logits, LABELS, counts), expected, 1e-5)
    assert imbalance_ratios(torch.tensor([5, 0, 0])).isfinite().all()


def test_cpa_counts_every_pixel_as_a_sample():
    logits, labels, counts = normal(2, 3, 4, 5), torch.arange(40).reshape(2, 4, 5) % 3, torch.tensor([9, 4, 1])
    pixels = logits.permute(0, 2, 3, 1).reshape(-1, 3)
    expected = conjoint_prototype_aligned(pixels, labels.flatten(), counts)
    assert_close(conjoint_prototype_aligned(logits, labels, counts), expected, 1e-12)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpa_and_mutual_learning_make_the_golden_step_of_personal_and_deputy_model(golden, stage):
    case = golden("prr/det_step")
    prototypes = case["local_proto"], case["global_proto"]
    weights = {
        name: case[name].clone().requires_grad_() for name in ("personal_f", "personal_c", "deputy_f", "deputy_c")
    }
    features = {name: F.relu(case["x"] @ weights[f"{name}_f"].T) for name in ("personal", "deputy")}
    logits = {name: features[name] @ weights[f"{name}_c"].T for name in features}
    supervised = {
        name: conjoint_prototype_aligned(logits[name], case["y"], case["class_counts"], *prototypes)
        for name in features
    }
    loss = sum(supervised.values())
    if stage < 3:
        loss = loss + mutual_kl(logits["deputy"], logits["personal"])
    if stage > 1:
        loss = loss + mutual_kl(logits["personal"], logits["deputy"])
    loss.backward()
    for name in features:
        assert_close(supervised[name], case[f"s{stage}_loss_{name}_sup"])
        head = weights[f"{name}_c"]
        assert_close(head - float(case["lr"]) * head.grad, case[f"s{stage}_{name}_c"])
    means = torch.stack([features["personal"][case["y"] == label].mean(0) for label in range(3)])
    assert_close(means, case[f"s{stage}_local_proto"])


def test_prototype_distance_is_zero_on_the_prototypes_and_a_mean_square_elsewhere():
    features, prototypes = normal(5, 6), normal(3, 6, seed=1)
    assert prototype_distance(prototypes[LABELS], LABELS, prototypes) == 0
    assert_close(
        prototype_distance(features, LABELS, prototypes), (features - prototypes[LABELS]).square().mean(), 1e-12
    )


def test_prototype_distance_gives_nothing_to_classes_without_prototype():
    features, prototypes = normal(5, 6), normal(3, 6, seed=1)
    prototypes[1] = torch.nan
    present = torch.tensor([True, False, True])
    others = LABELS != 1
    expected = (features - prototypes[LABELS])[others].square().sum() / features.numel()
    assert_close(prototype_distance(features, LABELS, prototypes, present), expected, 1e-12)
    slope = gradient(lambda z: prototype_distance(z, LABELS, prototypes, present), features)
    assert (slope[~others] == 0).all() and (slope[others] != 0).all()


def test_prototypes_that_do_not_belong_together_are_refused():
    logits, counts = normal(5, 3), torch.tensor([5, 3, 2])
    with pytest.raises(UserError, match="both or neither"):
        conjoint_prototype_aligned(logits, LABELS, counts, normal(3, 4))
    with pytest.raises(UserError, match=r"\(3, 1\), expected \(3, 4\)"):
        conjoint_prototype_aligned(logits, LABELS, counts, normal(3, 4), normal(3, 1))
