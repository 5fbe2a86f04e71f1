"""CLIMB's dual variables grow at sites that are served badly, and make them count; without steps it is FedAvg."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clients import SHORT, copied, new_server
from equipoise.data.augment import build_augmentation
from equipoise.engine.local import new_slot
from equipoise.engine.protocol import Replies, Reply
from equipoise.engine.site import Request, exhaust
from equipoise.engine.training import SiteData
from equipoise.methods import get_method
from equipoise.methods.climb import ClimbServer
from harness import all_state, assert_same_bits, run_tiny, server_state, tiny_federation

EACH_ROUND = ("climb.primal_rounds=1",)
ALIKE = ("train.aggregation='uniform'",)


def started(*settings: str, roster: tuple[str, ...] = ("a", "b", "c", "d")) -> ClimbServer:
    server = new_server("climb", *settings)
    assert isinstance(server, ClimbServer) and list(server.start(roster)) == []
    return server


def replies_of(server: ClimbServer, losses: dict[str, float], examples: dict[str, int] | None = None) -> Replies:
    """Sites with these losses, each with a model moved by its place in the order: 0, 1, 2, ..."""
    return Replies(
        [
            Reply(
                site,
                {
                    "model": {n: t + shift for n, t in copied(server.state.model).items()},
                    "examples": (examples or {}).get(site, 10),
                    "loss": loss,
                },
            )
            for shift, (site, loss) in enumerate(losses.items())
        ]
    )


def played(server: ClimbServer, number: int, replies: Replies) -> bool:
    """Lead the server through a round; tells whether sites were asked for their losses."""
    conversation = server.round(number, replies.sites)
    asked = next(conversation).payload["measure"]
    with pytest.raises(StopIteration):
        conversation.send(replies)
    assert isinstance(asked, bool)
    return asked


def duals(server: ClimbServer) -> dict[str, float]:
    return {site: float(dual) for site, dual in server.state.duals.items()}


# ---- limits ------------------------------------------------------------------------------------------


def test_without_dual_steps_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, "net.dropout=0.2")
    limit = run_tiny(tmp_path / "climb", "climb", *SHORT, "climb.eta_d=0", "net.dropout=0.2")
    state = {name: t for name, t in all_state(limit).items() if not name.startswith("server/duals/")}
    assert_same_bits(all_state(plain), state)


def test_while_every_site_is_within_epsilon_it_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    slack = run_tiny(tmp_path / "climb", "climb", *SHORT, "climb.epsilon=100", *EACH_ROUND)
    state = {name: t for name, t in all_state(slack).items() if not name.startswith("server/duals/")}
    assert_same_bits(all_state(plain), state)


# ---- dual variables ----------------------------------------------------------------------------------


def test_the_dual_variable_of_an_under_served_site_grows_from_round_to_round():
    server = started(*EACH_ROUND, *ALIKE)
    grown = []
    for number in (1, 2, 3):
        played(server, number, replies_of(server, {"a": 0.5, "b": 0.5, "c": 0.5, "d": 2.5}))
        grown.append(duals(server)["d"])
        assert duals(server) | {"d": 0.0} == dict.fromkeys("abcd", 0.0)
    assert 0 < grown[0] < grown[1] < grown[2]


def test_a_dual_step_is_projected_ascent_on_the_excess_over_the_mean_loss():
    """lambda <- max(lambda + eta_d / N (f - mean f - epsilon), 0), at N = 4 sites of which three took part."""
    server = started(*EACH_ROUND, *ALIKE, "climb.eta_d=0.8", "climb.epsilon=0.1")
    server.state.duals = {site: torch.tensor(v, dtype=torch.float64) for site, v in zip("abcd", (0.1, 0.5, 0.0, 0.7))}
    played(server, 1, replies_of(server, {"a": 0.2, "b": 1.0, "c": 1.8}))
    step = 0.8 / 4
    expected = {"a": 0.0, "b": 0.5 + step * (1.0 - 1.0 - 0.1), "c": step * (1.8 - 1.0 - 0.1), "d": 0.7}
    assert duals(server) == pytest.approx(expected)


def test_where_sites_count_by_size_so_do_their_losses_in_the_mean():
    server = started(*EACH_ROUND, "climb.eta_d=4", "climb.epsilon=0", roster=("a", "b"))
    played(server, 1, replies_of(server, {"a": 1.0, "b": 3.0}, {"a": 30, "b": 10}))
    assert duals(server) == pytest.approx({"a": 0.0, "b": 2 * (3.0 - 1.5)})


def test_losses_are_asked_for_only_where_a_dual_step_follows():
    server = started("climb.primal_rounds=3")
    losses = {"a": 1.0, "b": 2.0}
    assert [played(server, n, replies_of(server, losses)) for n in range(1, 8)] == [n in (1, 4, 7) for n in range(1, 8)]
    idle = started("climb.eta_d=0")
    assert not played(idle, 1, replies_of(idle, losses))


# ---- weights -----------------------------------------------------------------------------------------


def test_sites_weigh_by_one_plus_their_dual_less_the_mean_of_all():
    server = started(*ALIKE)
    server.state.duals = {site: torch.tensor(v, dtype=torch.float64) for site, v in zip("abcd", (0.0, 0.2, 0.6, 0.0))}
    replies = replies_of(server, dict.fromkeys("abcd", 1.0))
    weights = server.weights(replies)
    assert weights == pytest.approx([0.8, 1.0, 1.4, 0.8])
    assert sum(weights) == pytest.approx(4)  # the step of the whole federation keeps its length
    expected = server.state.model["head.weight"] + (0 * 0.8 + 1 * 1.0 + 2 * 1.4 + 3 * 0.8) / 4
    played(server, 2, replies)
    torch.testing.assert_close(server.state.model["head.weight"], expected)


def test_no_site_is_trained_against():
    server = started(*ALIKE)
    server.state.duals = {site: torch.tensor(v, dtype=torch.float64) for site, v in zip("abcd", (0.0, 9.0, 0.0, 0.0))}
    weights = server.weights(replies_of(server, dict.fromkeys("abcd", 1.0)))
    assert weights == pytest.approx([0.0, 7.75, 0.0, 0.0])


# ---- the site ----------------------------------------------------------------------------------------


def test_a_site_tells_the_received_models_mean_loss_on_its_training_images():
    server = started()
    setting, method = server.setting, get_method("climb")
    site = tiny_federation(setting.config).sites[0]
    data = SiteData(site, setting.num_classes, setting.device)
    message = {"model": server.state.model, "measure": True}
    outcome = exhaust(new_slot(method, setting).perform(Request("train", site.name, 1), message, None, data))
    split = site.splits["train"]
    plain = build_augmentation(setting.config.augment, setting.image_size, setting.channels).plain
    with torch.no_grad():
        logits = setting.new_net().eval()(plain(split.images(torch.arange(len(split)))))
    expected = F.cross_entropy(logits, torch.from_numpy(split.labels)).item()
    assert outcome.payload["loss"] == pytest.approx(expected, rel=1e-4)


def test_in_a_run_the_dual_variables_follow_the_losses(tmp_path):
    folder = run_tiny(tmp_path, "climb", *EACH_ROUND, "climb.epsilon=0", "climb.eta_d=5")
    found = [value for name, value in server_state(folder).items() if name.startswith("duals/")]
    assert len(found) == 3 and max(found) > 0 and min(found) >= 0
