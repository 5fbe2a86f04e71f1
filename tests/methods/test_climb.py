"""CLIMB's dual variables grow at sites that are served badly, and make them count; without steps it is FedAvg."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, copied, new_server
from equipoise.contract.method import Server
from equipoise.contract.protocol import Replies, Reply
from equipoise.data.augment import build_augmentation
from equipoise.engine.local_engine import new_slot
from equipoise.engine.slot import Request, exhaust
from equipoise.engine.training import SiteData
from equipoise.methods import get_method
from equipoise.nets import groups
from harness import all_state, assert_same_bits, events, run_tiny, server_state, site_sizes, tiny_federation

EACH_ROUND = ("climb.primal_rounds=1",)
ALIKE = ("train.aggregation='uniform'",)


def started(*settings: str, roster: tuple[str, ...] = ("a", "b", "c", "d")) -> Server:
    server = new_server("climb", *settings)
    assert list(server.start(roster)) == []
    return server


def measured(losses: dict[str, float], examples: dict[str, int]) -> Replies:
    """Sites with these mean losses."""
    return Replies(
        [
            Reply(site, {"loss": loss * examples.get(site, 10), "examples": examples.get(site, 10)})
            for site, loss in losses.items()
        ]
    )


def trained(server: Server, sites: str, examples: dict[str, int]) -> Replies:
    """Sites with models moved by their place in the alphabet: a by 0, b by 1, c by 2, ..."""
    return Replies(
        [
            Reply(
                site,
                {
                    "model": {n: t + "abcd".index(site) for n, t in copied(server.state.model).items()},
                    "examples": examples.get(site, 10),
                },
            )
            for site in sites
        ]
    )


def played(
    server: Server,
    number: int,
    losses: dict[str, float],
    sites: str = "abcd",
    examples: dict[str, int] | None = None,
) -> bool:
    """Lead the server through a round of some sites; tells whether all sites were asked for their losses."""
    conversation = server.round(number, tuple(sites))
    ask = next(conversation)
    dual_step = ask.action == "measure"
    if dual_step:
        assert set(ask.sites) == set(server.state.duals)
        ask = conversation.send(measured(losses, examples or {}))
    assert ask.action == "train" and ask.sites == tuple(sites)
    with pytest.raises(StopIteration):
        conversation.send(trained(server, sites, examples or {}))
    return dual_step


def duals(server: Server) -> dict[str, float]:
    return {site: float(dual) for site, dual in server.state.duals.items()}


def weights(server: Server, sites: Iterable[str]) -> list[float]:
    """What the dual variables make sites count."""
    return server.sides["duals"].weights(sites)


def set_duals(server: Server, *values: float) -> None:
    """Dual variables of the sites a, b, c, d, which all weigh alike."""
    server.state.duals = {site: torch.tensor(v, dtype=torch.float64) for site, v in zip("abcd", values)}
    server.state.shares = {site: torch.tensor(1.0, dtype=torch.float64) for site in "abcd"}


# ---- limits ------------------------------------------------------------------------------------------


def test_without_dual_steps_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, "net.dropout=0.2")
    limit = run_tiny(tmp_path / "climb", "climb", *SHORT, "climb.eta_d=0", "net.dropout=0.2")
    state = {name: t for name, t in all_state(limit).items() if not name.startswith("server/duals/")}
    assert_same_bits(all_state(plain), state)


def test_while_every_site_is_within_epsilon_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    slack = run_tiny(tmp_path / "climb", "climb", *SHORT, "climb.epsilon=100", *EACH_ROUND)
    state = {
        name: t for name, t in all_state(slack).items() if not name.startswith(("server/duals/", "server/shares/"))
    }
    assert_same_bits(all_state(plain), state)


# ---- dual variables ----------------------------------------------------------------------------------


def test_the_dual_variable_of_an_under_served_site_grows_from_round_to_round():
    server = started(*EACH_ROUND, *ALIKE)
    grown = []
    for number in (1, 2, 3):
        played(server, number, {"a": 0.5, "b": 0.5, "c": 0.5, "d": 2.5})
        grown.append(duals(server)["d"])
        assert duals(server) | {"d": 0.0} == dict.fromkeys("abcd", 0.0)
    assert 0 < grown[0] < grown[1] < grown[2]


def test_a_dual_step_is_projected_ascent_on_the_excess_over_the_mean_loss():
    """lambda <- max(lambda + eta_d / N (f - mean f - epsilon), 0), at all N = 4 sites, whichever of them train."""
    server = started(*EACH_ROUND, *ALIKE, "climb.eta_d=0.8", "climb.epsilon=0.1")
    set_duals(server, 0.1, 0.5, 0.0, 0.7)
    played(server, 1, {"a": 0.2, "b": 1.0, "c": 1.8, "d": 1.0}, sites="ab")
    step = 0.8 / 4
    expected = {"a": 0.0, "b": 0.5 - step * 0.1, "c": step * (1.8 - 1.0 - 0.1), "d": 0.7 - step * 0.1}
    assert duals(server) == pytest.approx(expected)


def test_a_site_that_cannot_be_reached_keeps_its_dual_variable_and_its_part_in_the_mean():
    server = started(*EACH_ROUND, *ALIKE, "climb.eta_d=0.8", "climb.epsilon=0")
    set_duals(server, 0.0, 0.0, 0.0, 0.4)
    played(server, 1, {"a": 1.0, "b": 1.0, "c": 1.0}, sites="abc")
    assert duals(server) == pytest.approx({"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.4})
    assert weights(server, ("a", "d")) == pytest.approx([0.9, 1.3])


def test_where_sites_count_by_size_so_do_their_losses_in_the_mean():
    server = started(*EACH_ROUND, "climb.eta_d=4", "climb.epsilon=0", roster=("a", "b"))
    played(server, 1, {"a": 1.0, "b": 3.0}, sites="ab", examples={"a": 30, "b": 10})
    assert duals(server) == pytest.approx({"a": 0.0, "b": 2 * (3.0 - 1.5)})
    assert weights(server, ("a", "b")) == pytest.approx([1 - 3 / 4, 1 + 3 - 3 / 4])


def test_losses_are_asked_for_only_where_a_dual_step_follows():
    server = started("climb.primal_rounds=3")
    losses = dict.fromkeys("abcd", 1.0)
    assert [played(server, n, losses) for n in range(1, 8)] == [n in (1, 4, 7) for n in range(1, 8)]
    assert not played(started("climb.eta_d=0"), 1, losses)


# ---- weights -----------------------------------------------------------------------------------------


def test_sites_weigh_by_one_plus_their_dual_less_the_mean_of_all():
    server = started(*ALIKE)
    set_duals(server, 0.0, 0.2, 0.6, 0.0)
    found = weights(server, "abcd")
    assert found == pytest.approx([0.8, 1.0, 1.4, 0.8])
    assert sum(found) == pytest.approx(4)  # the step of the whole federation keeps its length
    expected = server.state.model["head.weight"] + (0 * 0.8 + 1 * 1.0 + 2 * 1.4 + 3 * 0.8) / 4
    played(server, 2, {})
    torch.testing.assert_close(server.state.model["head.weight"], expected)


def test_a_round_of_some_sites_steps_by_their_weights_without_making_them_add_up_to_one():
    """x + mean over S of w_i (x_i - x): b and c, which weigh 1.0 and 1.4, moved by 1 and 2."""
    server = started(*ALIKE)
    set_duals(server, 0.0, 0.2, 0.6, 0.0)
    old = copied(server.state.model)
    played(server, 2, {}, sites="bc")
    statistics = set(groups(server.new_net())["statistics"])
    for name, tensor in server.state.model.items():
        if name not in statistics:
            torch.testing.assert_close(tensor, old[name] + (1.0 * 1 + 1.4 * 2) / 2)
        elif tensor.is_floating_point():  # a mean, which cannot leave the range of the sites' values
            torch.testing.assert_close(tensor, old[name] + (1.0 * 1 + 1.4 * 2) / 2.4)


def test_a_round_of_sites_that_weigh_nothing_changes_nothing():
    server = started(*ALIKE)
    set_duals(server, 0.0, 9.0, 0.0, 0.0)
    old = copied(server.state.model)
    played(server, 2, {}, sites="ac")
    assert_same_bits(old, server.state.model)


def test_no_site_is_trained_against():
    server = started(*ALIKE)
    set_duals(server, 0.0, 9.0, 0.0, 0.0)
    assert weights(server, "abcd") == pytest.approx([0.0, 7.75, 0.0, 0.0])


# ---- the site ----------------------------------------------------------------------------------------


def test_a_site_tells_the_received_models_summed_loss_on_its_training_images():
    server = started()
    setting, method = server.setting, get_method("climb")
    site = tiny_federation(setting.config).sites[0]
    data = SiteData(site, setting.task, setting.device)
    message = {"model": server.state.model}
    outcome = exhaust(new_slot(method, setting).perform(Request("measure", site.name, 1), message, None, data))
    split = site.splits["train"]
    plain = build_augmentation(setting.config.augment, setting.image_size, setting.channels).plain
    with torch.no_grad():
        logits = setting.new_net().eval()(plain(split.images(torch.arange(len(split)))))
    expected = F.cross_entropy(logits, torch.from_numpy(split.labels), reduction="sum").item()
    assert outcome.payload == {"loss": pytest.approx(expected, rel=1e-4), "examples": len(split)}


def test_in_a_run_the_dual_variables_follow_the_losses(tmp_path):
    folder = run_tiny(tmp_path, "climb", *EACH_ROUND, "climb.epsilon=0", "climb.eta_d=5")
    found = [value for name, value in server_state(folder).items() if name.startswith("duals/")]
    assert len(found) == 3 and max(found) > 0 and min(found) >= 0


def test_in_a_run_all_sites_are_measured_and_some_train(tmp_path):
    folder = run_tiny(tmp_path, "climb", *SHORT, "climb.primal_rounds=2", "train.rounds=2", "train.participation=0.34")
    first, second = (r["sites"] for r in events(folder, "round"))
    assert [sum("steps" in facts for facts in sites.values()) for sites in (first, second)] == [1, 1]
    assert first.keys() == site_sizes(*SHORT).keys() and len(second) == 1
    assert {name for name in server_state(folder) if name.startswith("shares/")} == {f"shares/{site}" for site in first}


def test_no_dual_variable_grows_beyond_the_cap():
    server = started("climb.eta_d=1000", "climb.epsilon=0", "climb.cap=7", *EACH_ROUND)
    server.sides["duals"].ascend(measured({"a": 9.0, "b": 1.0, "c": 1.0, "d": 1.0}, {}))
    assert [float(server.state.duals[site]) for site in "abcd"] == [7, 0, 0, 0]
