"""SiloBN keeps statistics alone; its weights are FedAvg's bit for bit, for training never reads statistics."""

from __future__ import annotations

import torch

from clients import SHORT, kept_of, new_server
from equipoise.nets import groups
from harness import assert_same_bits, events, run_tiny, server_state


def test_its_weights_are_those_of_fedavg(tmp_path):
    plain = server_state(run_tiny(tmp_path / "fedavg", "fedavg", *SHORT))
    shared = server_state(run_tiny(tmp_path / "silobn", "silobn", *SHORT))
    statistics = {f"model/{name}" for name in groups(new_server("silobn").new_net())["statistics"]}
    assert shared.keys() == plain.keys() - statistics
    assert_same_bits({name: plain[name] for name in shared}, shared)


def test_a_site_keeps_only_statistics_and_they_go_on_from_round_to_round(tmp_path):
    folder = run_tiny(tmp_path, "silobn", *SHORT, "train.rounds=3")
    steps = dict.fromkeys(("site 1", "site 2", "site 3"), 0)
    for round_event in events(folder, "round"):
        for site in steps:
            steps[site] += round_event["sites"][site]["steps"]
    for site, count in steps.items():
        kept = kept_of(folder, site, "personal")
        assert kept.keys() == set(groups(new_server("silobn").new_net())["statistics"])
        assert {int(t) for name, t in kept.items() if name.endswith("num_batches_tracked")} == {count}
    one, two = (kept_of(folder, site, "personal") for site in ("site 1", "site 2"))
    assert not torch.equal(one["body.1.running_mean"], two["body.1.running_mean"])
