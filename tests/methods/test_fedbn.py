"""FedBN keeps norm layers at the sites, and without norm layers, or with one site, it is FedAvg bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clients import SHORT, kept_of, new_server
from equipoise.contract import setting
from equipoise.methods import get_method
from equipoise.nets import Net, groups
from equipoise.nets.net import pooled
from harness import all_state, assert_same_bits, run_tiny, server_state


def net_without_norm(config, num_classes: int, channels: int, *_: object) -> Net:
    """A small net without norm layers."""
    return Net(pooled(nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()), nn.Linear(16, num_classes))


def model_of(folder) -> dict[str, torch.Tensor]:
    """The entries of the net that the server holds after a run."""
    return {name.removeprefix("model/"): t for name, t in server_state(folder).items()}


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_a_net_without_norm_layers_makes_it_fedavg(tmp_path, monkeypatch, method):
    monkeypatch.setattr(setting, "build_net", net_without_norm)
    plain, limit = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT), run_tiny(tmp_path / method, method, *SHORT)
    assert_same_bits(all_state(plain), all_state(limit))


@pytest.mark.parametrize("method", ["fedbn", "silobn"])
def test_one_site_makes_it_fedavg(tmp_path, method):
    """The parts at the server and at the site are those of FedAvg's model."""
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, "data.phantom.sites=1")
    limit = run_tiny(tmp_path / method, method, *SHORT, "data.phantom.sites=1")
    assert_same_bits(model_of(plain), model_of(limit) | kept_of(limit, "site 1", "personal"))


def test_the_first_round_averages_all_but_norm_layers_as_fedavg_does(tmp_path):
    plain = model_of(run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, "train.rounds=1"))
    shared = model_of(run_tiny(tmp_path / "fedbn", "fedbn", *SHORT, "train.rounds=1"))
    entries = groups(new_server("fedbn").new_net())
    assert shared.keys() == {*entries["body"], *entries["head"]}
    assert_same_bits({name: plain[name] for name in shared}, shared)


def test_weights_and_statistics_of_norm_layers_differ_between_sites(tmp_path):
    folder = run_tiny(tmp_path, "fedbn", *SHORT)
    one, two = (kept_of(folder, site, "personal") for site in ("site 1", "site 2"))
    entries = groups(new_server("fedbn").new_net())
    assert one.keys() == two.keys() == {*entries["norm"], *entries["statistics"]}
    assert not any(torch.equal(one[name], two[name]) for name in entries["norm"])


def test_a_site_predicts_with_the_shared_weights_and_its_own_norm_layers(tmp_path):
    folder = run_tiny(tmp_path, "fedbn", *SHORT)
    setting = new_server("fedbn").setting
    client = get_method("fedbn").client_class(setting.config)(setting)
    own = kept_of(folder, "site 2", "personal")
    client.workplace.begin({"model": model_of(folder)}, {f"personal/{name}": tensor for name, tensor in own.items()})
    assert_same_bits(dict(client.net.state_dict()), model_of(folder) | own)
    assert client.views == ("personal",)
