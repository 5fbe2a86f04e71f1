"""Sub-clusters, orthogonal prototypes, concept statistics, global prototypes, and class vectors at equal angles."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from closeness import assert_close
from equipoise.core.errors import UserError
from equipoise.prototypes import (
    CLUSTERINGS,
    concept_statistics,
    global_prototypes,
    orthogonal_frame,
    orthogonalise,
    simplex_frame,
    sinkhorn,
    update_subclusters,
)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("suffix", ["", "_uneven"])
def test_sinkhorn_has_the_golden_plan_and_assignment(golden, suffix):
    case = golden("fednpr/sinkhorn_correct")
    plan = sinkhorn(case[f"similarity{suffix}"], float(case["eps"]), int(case["iters"]))
    assert_close(plan, case[f"Q{suffix}"])
    assert torch.equal(plan.argmax(1), case[f"assign{suffix}"])


def test_sinkhorn_converges_to_the_golden_balanced_plan(golden):
    case = golden("fednpr/sinkhorn_correct")
    plan = sinkhorn(case["similarity"], iterations=200)
    assert_close(plan, case["Q_200iter"])
    assert_close(plan / case["Q_200iter"], torch.ones_like(plan))  # the smallest shares, too
    assert_close(plan.sum(0), torch.full((3,), 10.0), 1e-3)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 12), clusters=st.integers(1, 5), seed=st.integers(0, 1000))
def test_sinkhorn_gives_every_sample_a_whole_and_follows_the_order_of_clusters(size, clusters, seed):
    similarity = normal(size, clusters, seed=seed)
    plan = sinkhorn(similarity)
    assert_close(plan.sum(1), torch.ones(size), 1e-9)
    assert_close(sinkhorn(similarity.flip(1)), plan.flip(1), 1e-9)
    assert_close(sinkhorn(similarity.flip(0)), plan.flip(0), 1e-9)


def test_sinkhorn_with_one_cluster_takes_every_sample_whole():
    assert torch.equal(sinkhorn(normal(7, 1)), torch.ones(7, 1))


def test_sinkhorn_does_not_overflow_where_the_exponential_would():
    assert_close(sinkhorn(1000 * torch.eye(3)), torch.eye(3), 1e-6)


def test_subclusters_have_the_golden_prototypes(golden):
    case = golden("fednpr/prototype_update")
    updated = update_subclusters(case["features_norm"], case["labels"], case["proto_init"])
    assert_close(updated, case["proto_correct"])


def test_one_subcluster_is_the_mean_direction_of_its_class():
    features, labels = F.normalize(normal(9, 5), dim=-1), torch.arange(9) % 3
    means = torch.stack([features[labels == label].mean(0) for label in range(3)])
    updated = update_subclusters(features, labels, normal(3, 1, 5, seed=1))
    assert_close(updated[:, 0], F.normalize(means, dim=-1), 1e-9)


def test_a_subcluster_whose_members_cancel_out_keeps_its_prototype():
    opposite, old = torch.tensor([[1.0, 0], [-1, 0]]), torch.tensor([[[0.0, 2.0]]])
    assert update_subclusters(opposite, torch.tensor([0, 0]), old).tolist() == [[[0.0, 1.0]]]


@pytest.mark.parametrize("cluster", ["sinkhorn", "random", "released"])
def test_classes_with_fewer_than_two_samples_keep_their_prototypes(cluster):
    features, labels, old = normal(3, 5), torch.tensor([0, 2, 2]), normal(3, 4, 5, seed=1)
    updated = update_subclusters(features, labels, old, cluster, torch.Generator().manual_seed(0))
    assert_close(updated[:2], F.normalize(old[:2], dim=-1), 1e-12)
    # Two samples fill at most two of the four sub-clusters of class 2; the others keep theirs.
    kept = (updated[2] - F.normalize(old[2], dim=-1)).abs().amax(-1) < 1e-12
    assert kept.sum() >= 2 and not kept.all()
    assert_close(updated.norm(dim=-1), torch.ones(3, 4), 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_samples_fewer_than_subclusters_are_sorted_alike_in_single_and_double_precision(seed):
    features, labels, old = normal(6, 3, seed=seed).float(), torch.arange(6) % 3, normal(3, 4, 3, seed=seed + 100)
    exact = update_subclusters(features.double(), labels, old)
    assert_close(update_subclusters(features, labels, old).double(), exact, 1e-4)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_samples_that_are_alike_share_a_subcluster(count):
    for seed in range(20):
        features, old = normal(1, 6, seed=seed).float().repeat(count, 1), normal(1, 4, 6, seed=seed + 100).float()
        updated = update_subclusters(features, torch.zeros(count, dtype=torch.long), old)
        kept = (updated[0] - F.normalize(old[0], dim=-1)).abs().amax(-1) < 1e-6
        assert kept.sum() == 3


def test_subclusters_follow_the_numbering_of_classes():
    features, labels, old = normal(20, 5), torch.arange(20) % 3, normal(3, 2, 5, seed=1)
    order = torch.tensor([2, 0, 1])
    renumbered = update_subclusters(features, order.argsort()[labels], old[order])
    assert_close(renumbered, update_subclusters(features, labels, old)[order], 1e-9)


def test_released_assignment_is_as_near_to_chance_as_the_released_code(golden):
    case = golden("fednpr/agd_official")
    similarity, generator = case["similarity"], torch.Generator().manual_seed(0)
    draws = torch.stack([CLUSTERINGS["released"](similarity, generator) for _ in range(2000)])
    gap = F.one_hot(draws, 3).float().mean(0) - case["gumbel_freq_2000_seeds"]
    for choice in (case["nearest"], case["argmax_index"]):
        assert gap.gather(1, choice[:, None]).mean().abs() < 0.01
    assert torch.equal(case["argmax_index"], similarity.argmin(1))  # the plan it draws from is upside down


def test_random_assignment_repeats_with_its_generator():
    features, labels, old = normal(20, 5), torch.arange(20) % 2, normal(2, 3, 5, seed=1)
    first, again, other = (
        update_subclusters(features, labels, old, "random", torch.Generator().manual_seed(seed)) for seed in (7, 7, 8)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("diagonal, gram", [("zero", "gram_official"), ("exclude", "gram_paper_eq5")])
def test_orthogonalised_prototypes_have_the_golden_cosines(golden, diagonal, gram):
    case = golden("fediic/prototype_orth")
    hidden = case["fc_weight"] @ case["proj0_w"].T + case["proj0_b"]
    projected = hidden @ case["proj1_w"].T + case["proj1_b"]
    assert_close(projected, case["v_init"])
    units = orthogonalise(projected, int(case["steps"]), float(case["lr"]), diagonal)
    assert_close(units @ units.T, case[gram], tolerance=2e-2)


@pytest.mark.parametrize("diagonal", ["zero", "exclude"])
def test_a_step_of_orthogonalisation_is_a_step_of_gradient_descent(diagonal):
    start = normal(4, 6).requires_grad_()
    units = F.normalize(start, dim=1)
    cosine = (units @ units.T).masked_fill(torch.eye(4, dtype=torch.bool), 0.0 if diagonal == "zero" else -9.0)
    cosine.amax(1).sum().backward()
    expected = F.normalize(start - 0.1 * start.grad, dim=1)
    assert_close(orthogonalise(start, steps=1, lr=0.1, diagonal=diagonal), expected, 1e-9)


def test_orthogonalisation_ends_at_right_angles_or_as_a_simplex():
    start = normal(4, 6) + 1.0
    right = orthogonalise(start) @ orthogonalise(start).T
    assert right.masked_fill(torch.eye(4, dtype=torch.bool), 0.0).max() < 0.02
    simplex = orthogonalise(start, diagonal="exclude")
    assert_close((simplex @ simplex.T).fill_diagonal_(-1 / 3), torch.full((4, 4), -1 / 3), 0.1)


def test_a_single_prototype_stays_where_it_is():
    for diagonal in ("zero", "exclude"):
        single = orthogonalise(torch.tensor([[3.0, 4.0]]), diagonal=diagonal)
        assert_close(single, torch.tensor([[0.6, 0.8]]), 1e-6)


def test_prototypes_at_right_angles_rest_there():
    assert_close(orthogonalise(torch.eye(3, 5)), torch.eye(3, 5), 0)


def test_concept_statistics_have_the_golden_values(golden):
    case = golden("fedbm/concept_stats")
    mean, variance = concept_statistics(case["text_embeddings"])
    assert_close(F.normalize(case["text_embeddings"], dim=-1), case["normalised"])
    assert_close(concept_statistics(case["normalised"])[0], mean)
    assert_close(mean, case["mean"])
    assert_close(variance, case["cov_diag_unbiased"])


def test_a_single_prompt_has_no_variance():
    mean, variance = concept_statistics(normal(3, 1, 5))
    assert_close(mean, F.normalize(normal(3, 1, 5), dim=-1)[:, 0], 1e-12)
    assert (variance == 0).all()


@pytest.mark.parametrize(
    "spread, output",
    [
        ("clamped", "out_official_unbiased_std_clamped_min1"),
        ("biased", "out_paper_biased_std"),
        ("none", "out_avg"),
        ("none", "mean"),
    ],
)
def test_global_prototypes_have_the_golden_values(golden, spread, output):
    case = golden("prr/global_proto")
    assert_close(global_prototypes(case["local_protos"], case["noise"], spread), case[output])


@pytest.mark.parametrize("spread", ["biased", "clamped", "none"])
def test_global_prototypes_leave_out_sites_that_lack_a_class(spread):
    local, noise = normal(4, 3, 5), normal(3, 5, seed=1)
    present = torch.ones(4, 3, dtype=torch.bool)
    present[2, 1] = False
    local[2, 1] = torch.nan
    updated = global_prototypes(local, noise, spread, present)
    assert_close(updated[1], global_prototypes(local[[0, 1, 3]][:, 1:2], noise[1:2], spread)[0], 1e-12)
    assert_close(updated[[0, 2]], global_prototypes(local[:, [0, 2]], noise[[0, 2]], spread), 1e-12)


def test_one_site_has_no_spread_unless_clamped():
    local, noise = normal(1, 3, 5), normal(3, 5, seed=1)
    assert_close(global_prototypes(local, noise, "biased"), local[0], 1e-12)
    assert_close(global_prototypes(local, noise, "clamped"), local[0] + noise, 1e-12)


@pytest.mark.parametrize("spread", ["biased", "clamped", "none"])
def test_where_sites_agree_global_prototypes_have_a_finite_gradient(spread):
    agreed = torch.ones(3, 2, 5, requires_grad=True)
    global_prototypes(agreed, torch.ones(2, 5), spread).sum().backward()
    assert_close(agreed.grad, torch.full((3, 2, 5), 1 / 3), 1e-6)


def test_half_precision_is_computed_in_single_precision():
    features, labels, noise = normal(40, 6).half(), torch.arange(40) % 2, normal(2, 6, seed=2).half()
    prototypes = normal(2, 3, 6, seed=1).half()
    for function in (
        lambda cast: sinkhorn(cast(features)),
        lambda cast: update_subclusters(cast(features), labels, cast(prototypes)),
        lambda cast: orthogonalise(cast(prototypes[0]), steps=50),
        lambda cast: torch.stack(concept_statistics(cast(prototypes))),
        lambda cast: global_prototypes(cast(prototypes), cast(noise[:1].expand(3, 6))),
    ):
        rounded = function(lambda tensor: tensor)
        assert rounded.dtype == torch.float32 and torch.equal(rounded, function(torch.Tensor.float))


@pytest.mark.parametrize("spread", ["biased", "clamped", "none"])
def test_global_prototypes_do_not_depend_on_the_order_of_sites(spread):
    local, noise = normal(4, 3, 5), normal(3, 5, seed=1)
    assert_close(global_prototypes(local.flip(0), noise, spread), global_prototypes(local, noise, spread), 1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: update_subclusters(normal(4, 2), torch.zeros(4), normal(1, 1, 2), "kmeans"),
        lambda: orthogonalise(normal(2, 2), diagonal="one"),
        lambda: global_prototypes(normal(2, 2, 2), normal(2, 2), "unbiased"),
    ],
)
def test_unknown_variants_are_refused(call):
    with pytest.raises(UserError, match="is not known; choose one of"):
        call()


@pytest.mark.parametrize(
    ("frame", "cosine"), [(orthogonal_frame, lambda c: 0.0), (simplex_frame, lambda c: -1 / (c - 1))]
)
@settings(max_examples=20, deadline=None)
@given(num_classes=st.integers(2, 12), more=st.integers(0, 20), seed=st.integers(0, 1000))
def test_class_vectors_have_unit_length_and_equal_angles(frame, cosine, num_classes, more, seed):
    vectors = frame(num_classes, num_classes + more, torch.Generator().manual_seed(seed))
    expected = torch.full((num_classes, num_classes), cosine(num_classes)).fill_diagonal_(1.0)
    torch.testing.assert_close(vectors @ vectors.T, expected, rtol=0, atol=1e-5)


def test_a_simplex_is_centred_and_drawn_from_its_generator():
    one, same, other = (simplex_frame(5, 7, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert_close(one.sum(0) + 1, torch.ones(7), 1e-5)
    assert torch.equal(one, same) and not torch.allclose(one, other)


@pytest.mark.parametrize("frame", [orthogonal_frame, simplex_frame])
def test_more_class_vectors_than_dimensions_are_refused(frame):
    with pytest.raises(UserError, match="5 class vectors at equal angles need at least 5 dimensions, not 4"):
        frame(5, 4)


@pytest.mark.parametrize("spread", ["biased", "clamped"])
def test_global_prototypes_keep_double_precision(spread):
    local, noise = normal(3, 2, 4), normal(2, 4, seed=1)
    deviation = local.std(0, unbiased=False) if spread == "biased" else local.std(0).clamp(min=1.0)
    assert_close(global_prototypes(local, noise, spread), local.mean(0) + noise * deviation, 1e-14)


def test_noise_of_another_shape_and_a_simplex_of_one_are_refused():
    with pytest.raises(UserError, match=r"noise has the shape \(4,\)"):
        global_prototypes(normal(3, 2, 4), normal(4))
    with pytest.raises(UserError, match="at least 2 classes, not 1"):
        simplex_frame(1, 4)


def test_an_assignment_without_width_and_embeddings_without_prompts_are_refused():
    with pytest.raises(UserError, match="epsilon=0"):
        sinkhorn(normal(4, 2), epsilon=0)
    for shape in ((4, 8), (4, 0, 8)):
        with pytest.raises(UserError, match="classes, prompts, dimensions"):
            concept_statistics(torch.ones(shape))
