"""Robust merging: formulas, limit cases, and what one lying site of five can do with and without it."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from clients import with_component
from equipoise.aggregation import coordinate_median, krum_scores, share_of_sites, trimmed_mean
from equipoise.contract.protocol import Replies, Reply
from equipoise.core.errors import UserError
from harness import all_state, assert_same_bits, run_tiny, server_state, tiny_config, with_client

RULES = ("krum", "median", "norm-clipping", "trimmed-mean")
FIVE = ("data.phantom.sites=5", "data.phantom.images=200", "train.rounds=1", "evaluation.trained=false")


def test_the_median_is_that_of_each_number():
    sites = torch.tensor([[1.0, 9.0], [3.0, -1.0], [1e30, 2.0]])
    assert coordinate_median(sites).tolist() == [3.0, 2.0]
    assert coordinate_median(sites[:2]).tolist() == [2.0, 4.0]
    assert coordinate_median(torch.tensor([[3], [4], [10], [11]])).tolist() == [7]
    assert torch.equal(coordinate_median(sites[:1]), sites[0])


def test_the_trimmed_mean_leaves_out_both_ends_of_each_number():
    sites = torch.tensor([[1.0], [2.0], [3.0], [4.0], [1e30]])
    assert trimmed_mean(sites, 0.2).tolist() == [3.0]
    assert trimmed_mean(sites, 0.4).tolist() == [3.0]
    assert trimmed_mean(sites[:4], 0.0).tolist() == [2.5]
    assert trimmed_mean(sites[:4], 0.2).tolist() == [2.5], "a fifth of four sites is none"
    with pytest.raises(UserError, match="lies between 0 and 1/2"):
        trimmed_mean(sites, 0.5)


@pytest.mark.parametrize("liars", [0, 1, 2])
def test_krum_scores_add_up_the_distances_to_the_nearest(liars):
    points = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    distances = torch.cdist(points, points).square()
    expected = [sum(sorted((a - b).square().sum().item() for b in points)[1 : 1 + 7 - liars - 2]) for a in points]
    torch.testing.assert_close(krum_scores(distances, liars), torch.tensor(expected, dtype=torch.float64))


def test_a_share_of_sites_is_rounded_down_but_not_below_what_it_means():
    assert [share_of_sites(*case) for case in ((0.29, 100), (0.2, 4), (0.2, 5), (0.0, 9))] == [29, 0, 1, 0]


def merging(name: str, **options):
    """The server's side of a rule for models of one weight and one running mean, which sites got as zeros."""
    from equipoise.components import get_component

    side = object.__new__(get_component(name).Server)
    side.options = get_component(name)(**options)
    side.weighting = "size"
    sent = {"weight": torch.zeros(2), "mean": torch.zeros(1)}
    side.server = type("Sent", (), {"state": type("State", (), {"model": sent})})
    side.parameters, side.halves = ("weight",), [["weight"], ["mean"]]
    return side


def replies(*weights: tuple[float, float], examples: int = 10) -> Replies:
    return Replies(
        [
            Reply(
                str(place), {"model": {"weight": torch.tensor(w), "mean": torch.tensor([w[0]])}, "examples": examples}
            )
            for place, w in enumerate(weights)
        ]
    )


FAR = replies((1.0, 0.0), (1.1, 0.0), (0.9, 0.1), (1.0, 0.1), (500.0, -300.0))


def test_krum_keeps_a_model_near_its_neighbours_and_multi_krum_all_but_the_liars():
    one = merging("krum").merge(FAR, 1)["weight"]
    assert any(torch.equal(one, reply["model"]["weight"]) for reply in FAR[:4])
    torch.testing.assert_close(merging("krum", keep=0).merge(FAR, 1)["weight"], torch.tensor([1.0, 0.05]))
    assert merging("krum").merge(FAR[:1] and Replies(FAR[:1]), 1)["weight"].tolist() == [1.0, 0.0]


def test_norm_clipping_shortens_long_updates_to_the_median_or_a_given_length():
    found = merging("norm-clipping").merge(FAR, 1)
    usual = median(reply["model"]["weight"].norm().item() for reply in FAR)
    clipped = [w * min(1.0, usual / w.norm().item()) for w in (reply["model"]["weight"] for reply in FAR)]
    torch.testing.assert_close(found["weight"], torch.stack(clipped).mean(0))
    assert found["mean"].item() <= 1.0, "running statistics are clipped by their own length"
    short = merging("norm-clipping", largest=0.5).merge(replies((3.0, 4.0)), 1)["weight"]
    torch.testing.assert_close(short, torch.tensor([0.3, 0.4]))


def lies(client):
    """Site 2 turns its model round, and makes it long."""

    class Lies(client):
        def update(self):
            found = super().update()
            if self.workplace.site == "site 2":
                found["model"] = {n: t * -30 if t.is_floating_point() else t for n, t in found["model"].items()}
            return found

    return Lies


@pytest.mark.parametrize("rule", RULES)
def test_a_lying_site_of_five_hardly_moves_the_model(tmp_path, rule):
    def parameters(name: str, *settings: str, method="fedavg"):
        state = server_state(run_tiny(tmp_path / name, method, *FIVE, *settings))
        return torch.cat(
            [t.flatten() for n, t in sorted(state.items()) if t.is_floating_point() and "running" not in n]
        )

    honest = parameters("honest")
    plain = parameters("plain", method=with_client("fedavg", lies))
    robust = parameters("robust", *with_component(rule), method=with_client("fedavg", lies))
    assert (robust - honest).norm() < 0.1 * (plain - honest).norm()


@pytest.mark.parametrize("rule", RULES)
def test_with_secure_sums_robust_merging_is_refused_by_name(rule):
    with pytest.raises(UserError, match=rf"{rule} needs single replies.*sites check their own updates"):
        tiny_config("fedavg", *with_component(rule), "privacy.secure_sums=true")


def test_multi_krum_of_all_sites_and_a_far_clip_are_fedavg_bit_for_bit(tmp_path):
    plain = all_state(run_tiny(tmp_path / "plain", "fedavg", "train.rounds=1"))
    for rule, options in (("krum", {"liars": 0, "keep": 0}), ("norm-clipping", {"multiple": 1e9})):
        limit = run_tiny(tmp_path / rule, "fedavg", "train.rounds=1", *with_component(rule, **options))
        assert_same_bits(plain, all_state(limit))
