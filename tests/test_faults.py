"""A slice of the campaign of faults; `python benchmarks/faults.py` runs thousands."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import faults as script
from campaign import faults as campaign
from equipoise.hospitals import flower_engine

SLICE = [*campaign.faults(20, 16, ["fedavg", "prr"], [*campaign.KINDS])]


@pytest.mark.parametrize("fault", SLICE, ids=lambda fault: f"{fault.number}-{fault.kind}-{fault.place}-{fault.method}")
def test_nothing_is_lost_by_a_fault(fault):
    _, how, about, _ = script.verdict(fault)
    assert how in campaign.GOOD, about


def test_every_fault_can_be_drawn_again():
    assert [*campaign.faults(20, 16, ["fedavg", "prr"], [*campaign.KINDS])] == SLICE
    assert [fault.draw.random() for fault in SLICE] == [fault.draw.random() for fault in SLICE]


def test_the_campaign_sees_a_lie_that_nobody_refuses(monkeypatch):
    monkeypatch.setattr(flower_engine, "absurd", lambda *_, **__: {})
    monkeypatch.setattr(campaign, "LIES", {"times 200": campaign.LIES["times 200"]})
    lie = next(fault for fault in campaign.faults(20, 64, ["fedavg"], ["lies"]))
    assert script.verdict(lie)[1] == "silent lie"


def test_the_campaign_sees_a_bit_that_changes(monkeypatch):
    usual = campaign.World.left
    monkeypatch.setattr(campaign.World, "left", lambda world: usual(world) | {"scores": "other"})
    slow = next(fault for fault in campaign.faults(20, 64, ["fedavg"], ["slow"]))
    script.undisturbed.cache_clear()
    script.undisturbed("flower", "fedavg")
    monkeypatch.setattr(campaign.World, "left", lambda world: usual(world) | {"scores": "another"})
    assert script.verdict(slow)[1] == "differing bits"
    script.undisturbed.cache_clear()


def test_a_campaign_goes_on_where_it_stopped_and_tries_again_what_did_harm(tmp_path):
    first, second, third = SLICE[:3]
    log = script.Log(tmp_path / "faults.jsonl")
    log.write((first, "same bits", "", 0.1))
    log.write((second, "lost", "a run", 0.2))
    again = script.Log(tmp_path / "faults.jsonl")
    assert again.lacks([first, second, third]) == [second, third]
    assert script.summary(again.verdicts.values())["harm"][0]["number"] == second.number
    again.write((second, "same bits", "", 0.2))
    told = script.summary(script.Log(tmp_path / "faults.jsonl").verdicts.values())
    assert told["faults"] == 2 and not told["harm"] and "| all | 2 | 2 |" in script.table(told["kinds"])
