"""FedRep fits the head, then the body, never both; without head epochs it trains as FedBABU does, and with one site as
that site alone would, bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from clients import SHORT, changed, copied, kept_of, new_client, new_server, noise_batch
from equipoise.contract.protocol import Train
from equipoise.methods import get_method
from equipoise.methods.local import LocalClient
from equipoise.nets import all_but, entries_of, groups
from harness import assert_same_bits, events, run_tiny, server_state


def test_without_head_epochs_it_trains_as_fedbabu(tmp_path):
    """Both then train the body under the head that was first drawn."""
    babu = run_tiny(tmp_path / "fedbabu", "fedbabu", *SHORT, "fedbabu.finetune_epochs=0", "train.epochs=2")
    limit = run_tiny(tmp_path / "fedrep", "fedrep", *SHORT, "fedrep.head_epochs=0", "train.epochs=2")
    shared = server_state(limit)
    assert_same_bits({name: server_state(babu)[name] for name in shared}, shared)
    first = new_server("fedavg").state.model
    for site in ("site 1", "site 2", "site 3"):
        assert_same_bits(kept_of(limit, site, "personal"), {n: first[n] for n in ("head.weight", "head.bias")})


class AlternatingLocal(LocalClient):
    """Trains alone, head and body in turns."""

    def build(self) -> None:
        super().build()
        self.phase("head", self.net, entries_of(self.net, "head"), norm="eval")
        self.phase("main", self.net, all_but(self.net, "head"))

    def train(self, message):
        yield Train(epochs=2, phase="head")
        yield Train()
        return {}


def test_with_one_site_it_is_local_training_in_the_same_turns(tmp_path):
    """The mean of one body is that body."""
    one = (*SHORT, "data.phantom.sites=1")
    alone = run_tiny(tmp_path / "local", dataclasses.replace(get_method("local"), client=AlternatingLocal), *one)
    limit = run_tiny(tmp_path / "fedrep", "fedrep", *one, "fedrep.head_epochs=2")
    body = {name.removeprefix("model/"): tensor for name, tensor in server_state(limit).items()}
    assert_same_bits(kept_of(alone, "site 1", "net"), body | kept_of(limit, "site 1", "personal"))


@pytest.mark.parametrize(
    ("settings", "work"),
    [
        ((), [Train(epochs=10, phase="head"), Train()]),
        (("fedrep.head_epochs=3", "fedrep.body_epochs=2"), [Train(epochs=3, phase="head"), Train(epochs=2)]),
        (("fedrep.head_epochs=0",), [Train(epochs=0, phase="head"), Train()]),
    ],
    ids=["paper", "chosen", "no head"],
)
def test_head_epochs_come_before_body_epochs(settings, work):
    assert list(new_client("fedrep", *settings).train({})) == work


def test_each_phase_moves_its_own_part_and_not_a_bit_of_the_other():
    client = new_client("fedrep")
    entries = groups(client.net)
    moved = {}
    for phase in ("head", "main"):
        client.workplace.set_mode(True, client.workplace.phases[phase].norm)
        before = copied(client.net.state_dict())
        client.step([noise_batch()], client.workplace.phases[phase])
        moved[phase] = changed(before, client.net.state_dict())
    assert moved["head"] == set(entries["head"])
    assert moved["main"] == {*entries["body"], *entries["norm"], *entries["statistics"]}


def test_heads_differ_between_sites_and_never_leave_them(tmp_path):
    folder = run_tiny(tmp_path, "fedrep", *SHORT, "fedrep.head_epochs=2")
    assert not any("head" in name for name in server_state(folder))
    one, two = (kept_of(folder, site, "personal")["head.weight"] for site in ("site 1", "site 2"))
    assert not torch.equal(one, two)
    assert {e["view"] for e in events(folder, "final")} == {"personal"}
