"""PRR's PFA: what sites share of their weights' frequencies, and what those get that took no part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composed import answered, server_of, setting_of
from equipoise.components._fourier_merging import layer_kinds, merge_deputies
from equipoise.contract.protocol import PerSite, Replies, Reply
from equipoise.nets import build_net
from equipoise.nets.dense import DenseNet
from equipoise.nets.net_config import NetConfig
from harness import assert_same_bits, run_tiny, server_state, site_states

NO_CPA = ("prr.cpa_global=false", "prr.cpa_local=false")


def started(*settings: str, roster: tuple[str, ...] = ("a", "b", "c")) -> Any:
    """A server of PRR after its start, without CPA unless asked for."""
    server = server_of(setting_of("prr", *NO_CPA, *settings))
    assert list(server.start(roster)) == []
    return server


def update(server: Any, seed: int) -> dict[str, Any]:
    """A site's reply with random weights."""
    draws = torch.Generator().manual_seed(seed)
    model = {name: torch.randn(t.shape, generator=draws) for name, t in server.state.model.items()}
    return {"model": model, "examples": 10 * seed + 10}


def sent(server: Any, site: str) -> dict[str, Tensor]:
    """The weights that a site would be sent next."""
    models = server.model_for([site])
    return models.values[site] if isinstance(models, PerSite) else models  # type: ignore[return-value]


# ---- limits --------------------------------------------------------------------------------------


def even(tensor: Tensor) -> bool:
    """Whether the layer's spectrum has no odd axis, so that band 1 is all of it."""
    axes = {4: (tensor.shape[:1].numel() * tensor.shape[-1:].numel(), tensor.shape[1:3].numel())}
    return all(size % 2 == 0 for size in axes.get(tensor.dim(), tensor.shape[-1:]))


def test_the_full_band_and_complex_mean_is_plain_averaging():
    server = started("prr.pfa=complex", "prr.band_start=1", "prr.band_end=1")
    updates = {site: update(server, seed) for seed, site in enumerate("abc")}
    answered(server, 1, updates)
    compared = 0
    for site in "abc":
        for name, merged in sent(server, site).items():
            if even(merged) or merged.dim() == 1:
                mean = torch.stack([u["model"][name] for u in updates.values()]).mean(0)
                torch.testing.assert_close(merged, mean, rtol=0, atol=1e-6)
                compared += 1
    assert compared == 3 * (len(server.state.model) - 1)  # the first layer of a colour image has an axis of 9


@pytest.mark.parametrize("mode", ["both", "amplitude", "phase", "complex"])
def test_an_empty_band_shares_nothing_but_biases(mode):
    server = started(f"prr.pfa={mode}", "prr.band_start=0", "prr.band_end=0")
    updates = {site: update(server, seed) for seed, site in enumerate("ab")}
    answered(server, 1, updates)
    for site in "ab":
        for name, merged in sent(server, site).items():
            if merged.dim() > 1:
                torch.testing.assert_close(merged, updates[site]["model"][name], rtol=0, atol=1e-6)
            else:
                expected = torch.stack([u["model"][name] for u in updates.values()]).mean(0)
                torch.testing.assert_close(merged, expected)


def test_sites_share_more_from_round_to_round():
    server = started("train.rounds=10", "prr.pfa=complex", "prr.band_start=0.2", "prr.band_end=1")
    updates = {site: update(server, seed) for seed, site in enumerate("ab")}
    gaps = []
    for number in (1, 5, 10):
        answered(server, number, updates)
        gaps.append(float((sent(server, "a")["body.4.weight"] - sent(server, "b")["body.4.weight"]).norm()))
    assert gaps[0] > gaps[1] > gaps[2] > 0


def test_the_classifier_is_merged_row_by_row():
    by_row, as_matrix = started(), started("prr.classifier_rows=false")
    updates = {site: update(by_row, seed) for seed, site in enumerate("ab")}
    for server in (by_row, as_matrix):
        answered(server, 1, updates)
    rows = sent(by_row, "a")["head.weight"]
    assert not torch.allclose(rows, sent(as_matrix, "a")["head.weight"], atol=1e-3)
    # Each class is merged alone: another row of one class changes no other class.
    updates["b"]["model"]["head.weight"][1] += 1
    answered(by_row, 1, updates)
    changed = sent(by_row, "a")["head.weight"]
    torch.testing.assert_close(changed[[0, 2, 3]], rows[[0, 2, 3]])
    assert not torch.allclose(changed[1], rows[1], atol=1e-3)


def test_15_of_85_entries_of_the_slim_vgg_travel_each_in_its_way():
    net = build_net(NetConfig(name="vgg16-slim"), 3)
    kinds = list(layer_kinds(net).values())
    assert (len(kinds), len(net.state_dict())) == (15, 85)
    assert (kinds.count("conv"), kinds.count("linear"), kinds.count("classifier")) == (13, 1, 1)
    assert list(layer_kinds(net, classifier_rows=False).values()).count("linear") == 2


# ---- who gets which weights ------------------------------------------------------------------------


def test_a_site_that_sat_out_gets_what_it_was_last_sent_and_a_new_one_the_mean():
    server = started()
    answered(server, 1, {site: update(server, seed) for seed, site in enumerate("ab")})
    before = sent(server, "a")
    updates = {"b": update(server, 5)}
    answered(server, 2, updates)
    assert_same_bits(sent(server, "a"), before)
    assert_same_bits(sent(server, "c"), updates["b"]["model"])


def test_an_evaluating_site_gets_the_net_it_predicts_with_unless_it_keeps_it():
    single = started("prr.det=off")
    answered(single, 1, {site: update(single, seed) for seed, site in enumerate("ab")})
    message = single.message()["model"]
    assert isinstance(message, PerSite)
    for site in "abc":
        assert_same_bits(message.values[site], sent(single, site))  # type: ignore[arg-type]
    assert started().message() == {}


# ---- on other methods --------------------------------------------------------------------------------


def test_without_sharing_it_is_plain_averaging_and_with_it_each_site_gets_its_own(tmp_path):
    plain = run_tiny(tmp_path / "plain", "fedbn")
    off = run_tiny(tmp_path / "off", "fedbn", "components=['fourier']", "fourier.share=off")
    added = run_tiny(tmp_path / "added", "fedbn", "components=['fourier']")
    models = [{n: t for n, t in server_state(run).items() if n.startswith("model/")} for run in (plain, off)]
    assert_same_bits(*models)
    assert_same_bits(site_states(plain), site_states(off))
    own = {n.partition("/")[2]: t for n, t in server_state(added).items() if n.startswith("fourier.deputies/")}
    heads = [own[name] for name in own if name.endswith("/head.weight")]
    assert len(heads) == 3 and not torch.equal(heads[0], heads[1])


def test_a_head_that_is_a_1x1_convolution_is_merged_class_by_class_like_a_linear_one():
    heads = [torch.randn(3, 5) for _ in range(4)]
    net = DenseNet(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 3, 1))
    assert layer_kinds(net)["head.weight"] == "classifier"
    assert layer_kinds(net, classifier_rows=False)["head.weight"] == "conv"

    def merged(*shape):
        models = [{"w": head.reshape(3, 5, *shape)} for head in heads]
        updates = Replies([Reply(f"site {k}", {"model": model}) for k, model in enumerate(models)])
        return merge_deputies(updates, {"w": "classifier"}, band=0.7)

    (mean, own), (linear_mean, linear_own) = merged(1, 1), merged()
    assert torch.equal(mean["w"].flatten(1), linear_mean["w"]) and mean["w"].shape == (3, 5, 1, 1)
    assert all(torch.equal(own[name].flatten(1), value) for name, value in linear_own.items())
