"""FedPer is FedAvg with the component personal-head."""

from __future__ import annotations

from clients import SHORT, kept_of
from harness import all_state, assert_same_bits, events, run_tiny, server_state


def test_it_is_fedavg_with_a_personal_head_bit_for_bit(tmp_path):
    method = run_tiny(tmp_path / "method", "fedper", *SHORT)
    composed = run_tiny(tmp_path / "composed", "fedavg", *SHORT, 'components=["personal-head"]')
    assert_same_bits(all_state(method), all_state(composed))


def test_the_classifier_stays_and_personal_models_are_measured(tmp_path):
    folder = run_tiny(tmp_path, "fedper", *SHORT)
    assert not any("head" in name for name in server_state(folder))
    assert {name.split(".")[0] for name in kept_of(folder, "site 1", "stays")} == {"head"}
    assert {event["view"] for event in events(folder, "final")} == {"personal"}
