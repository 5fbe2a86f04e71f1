"""Updates in fewer bits: rounding errors are bounded, kept at the site, and make themselves good."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from flwr.supercore.inflatable import inflatable_object

from equipoise.contract.protocol import flatten
from equipoise.engine.states import read_state
from equipoise.hospitals.brisk import quicken
from equipoise.hospitals.compression import RESIDUAL, compress, residuals_of, rounded, with_residuals, without_residuals
from equipoise.hospitals.exchange import FlowerOptions
from equipoise.hospitals.parcels import Packer, Parcel, UnreadableParcel, open_parcel, prepare, seal, widened
from equipoise.hospitals.post import LANES, GridPost
from equipoise.hospitals.records import RecordMaker
from harness import assert_same_bits, events, server_state
from postbox import Hospitals, Postbox

BRIEF = ("train.rounds=3", "train.steps=2", "train.batch_size=4")


def opened(contents, exact):
    return open_parcel(seal(contents), exact=flatten(exact)[0])[0]


def traffic(folder):
    return [[sum(s[way] for s in e["sites"].values()) for way in ("received", "sent")] for e in events(folder, "round")]


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_the_error_of_a_change_is_bounded_in_each_row(wire):
    change = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 5).view(
        5, 1, 1, 1
    )
    change[2] = 0
    error = (change - widened(*rounded(change, wire))).flatten(1).abs()
    largest = change.flatten(1).abs().amax(1)
    bound = largest / 254 if wire == "int8" else largest * 2**-11 + 2**-25
    assert (error.amax(1) <= bound * 1.0001).all() and not error[2].any()


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_all_that_was_told_differs_from_all_changes_by_the_last_residual_alone(wire):
    generator, kept = torch.Generator().manual_seed(2), {}
    told, true = torch.zeros(4, 6), torch.zeros(4, 6)
    without_feedback = torch.zeros(4, 6)
    for _ in range(60):
        sent = {"model": {"w": torch.randn(4, 6, generator=generator)}}
        change = 0.01 * torch.randn(4, 6, generator=generator) + torch.tensor([5.0, *[1e-4] * 5])
        contents, kept = compress({"model": {"w": sent["model"]["w"] + change}}, sent, wire, kept)
        true += change
        told += opened(contents, sent)["model"]["w"] - sent["model"]["w"]
        without_feedback += widened(*rounded(change, wire))
    torch.testing.assert_close(told + kept["model/w"], true, atol=1e-3, rtol=1e-5)
    assert (told - true).abs().max() < 0.3 * (without_feedback - true).abs().max()


def test_small_and_lone_tensors_travel_as_they_are():
    sent = {"model": {"w": torch.zeros(2, 3), "bias": torch.zeros(3), "steps": torch.tensor(1)}}
    reply = {
        "model": {"w": torch.ones(2, 3), "bias": torch.full((3,), 0.1), "steps": torch.tensor(7)},
        "counts": torch.tensor([[70_001.0, 0.3]]),
        "fresh": {"v": torch.full((2, 2), 0.1)},
        "loss": 0.1,
    }
    contents, errors = compress(reply, sent, "int8", {})
    assert errors.keys() == {"model/w"}
    found = opened(contents, sent)
    assert_same_bits(flatten(found)[0], flatten(reply)[0] | {"model/w": found["model"]["w"]})
    assert found["loss"] == 0.1 and found["model"].keys() == reply["model"].keys()


def test_changes_are_added_to_what_the_server_has_and_not_to_what_was_rounded():
    exact = {"model": {"w": torch.tensor([[0.1, 0.2]])}}
    received = open_parcel(seal(prepare(exact, half=True)))[0]
    assert not torch.equal(received["model"]["w"], exact["model"]["w"])
    contents, _ = compress(received, received, "int8", {})  # a site that has not trained
    assert torch.equal(opened(contents, exact)["model"]["w"], exact["model"]["w"])


def test_a_change_of_something_that_was_not_sent_is_refused():
    sent = {"model": {"w": torch.zeros(2, 3)}}
    contents, _ = compress({"model": {"w": torch.ones(2, 3)}}, sent, "int8", {})
    for exact in ({}, {"model/w": torch.zeros(3, 2)}):
        with pytest.raises(UnreadableParcel, match="was not sent"):
            open_parcel(seal(contents), exact=exact)
    with pytest.raises(UnreadableParcel, match="does not know"):
        compress(sent, sent, "int4", {})


def test_residuals_lie_beside_the_state_of_the_method_and_survive_other_actions():
    before = {"head": torch.ones(1), f"{RESIDUAL}train/model/w": torch.ones(2)}
    assert without_residuals(before) == {"head": before["head"]} and without_residuals({}) == {}
    assert without_residuals({f"{RESIDUAL}train/w": torch.ones(1)}) is None
    assert residuals_of(before, "train").keys() == {"model/w"} and not residuals_of(before, "survey")
    assert with_residuals(None, before, "survey", {}) is None
    after = with_residuals(None, before, "survey", {"model/w": torch.zeros(2)})
    assert after.keys() == before.keys() | {f"{RESIDUAL}survey/model/w"}
    assert with_residuals({"head": torch.zeros(1)}, before, "train", {})["head"] == 0


@pytest.mark.parametrize(("wire", "share"), [("fp16", 0.5), ("int8", 0.25)])
def test_a_run_moves_fewer_bytes_and_ends_near_the_exact_one(tmp_path, wire, share):
    full = Hospitals(tmp_path / "full", "fedavg", *BRIEF).run()
    brief = Hospitals(tmp_path / wire, "fedavg", *BRIEF).run(FlowerOptions(wire=wire))
    for (down, up), (fewer_down, fewer_up) in zip(traffic(full), traffic(brief)):
        header = 3 * 8_000  # of three sites, with biases and norms
        assert fewer_down < 0.5 * down + header and fewer_up < share * up + header
    first, second = server_state(full), server_state(brief)
    distance = sum(float((second[n] - t).double().square().sum()) for n, t in first.items() if t.is_floating_point())
    length = sum(float(t.double().square().sum()) for t in first.values() if t.is_floating_point())
    assert 0 < distance < (0.05**2) * length


@pytest.mark.parametrize("method", ["fedavg", "prr"])
def test_residuals_are_part_of_the_state_that_a_resumed_run_goes_on_from(tmp_path, method):
    settings = ("train.rounds=3", "train.epochs=1" if method == "prr" else "train.steps=1")
    whole = Hospitals(tmp_path / "whole", method, *settings)
    folder = whole.run(FlowerOptions(wire="int8"))

    class Stops(Postbox):
        def carry(self, site, parcel):
            if parcel.header.get("round") == 3 and parcel.header["action"] == "train" and not stopped:
                stopped.append(site)
                raise KeyboardInterrupt
            return super().carry(site, parcel)

    stopped = []
    halted = Hospitals(tmp_path / "halted", method, *settings, post=Stops)
    with pytest.raises(KeyboardInterrupt):
        halted.run(FlowerOptions(wire="int8"))
    assert stopped
    again = Hospitals(tmp_path / "halted", method, *settings)
    assert_same_bits(server_state(folder), server_state(again.run(FlowerOptions(wire="int8"), resume=True)))
    newest = sorted(whole.records(stopped[0]).glob("test/states/*"))[-1]
    assert any(name.startswith(RESIDUAL) for name in read_state(newest))


def test_parts_of_a_model_that_a_site_does_not_change_do_not_come_back(tmp_path):
    class Weighs(Postbox):
        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            if parcel.header["action"] == "train":
                sizes.append(reply.size)
            return reply

    sizes = []
    settings = ("train.rounds=1", "train.steps=1", "train.optimiser.lr=1e-30")  # lost in rounding
    folder = Hospitals(tmp_path, "fedavg", *settings, post=Weighs).run()
    model = sum(tensor.nbytes for tensor in server_state(folder).values())
    assert sizes and all(size < 0.1 * model for size in sizes)


def test_a_model_that_the_server_does_not_change_goes_down_once(tmp_path):
    class Weighs(Postbox):
        def carry(self, site, parcel):
            sizes.setdefault(site, []).append(parcel.size)
            return super().carry(site, parcel)

    sizes = {}
    two = ("data.phantom.sites=2", "train.aggregation='uniform'")  # of two equal numbers the mean is that number
    settings = ("train.rounds=3", "train.steps=1", "train.optimiser.lr=1e-30", "net.name='small-cnn'", *two)
    folder = Hospitals(tmp_path, "fedavg", *settings, post=Weighs).run()
    model = sum(tensor.nbytes for tensor in server_state(folder).values())
    for own in sizes.values():
        assert len(own) > 6 and model < sum(own) < 1.3 * model


def test_tensors_that_messages_share_are_packed_once_and_hashed_once(monkeypatch):
    weight, packer = torch.randn(700, 700), Packer()
    one, other = (packer.prepare({"model": {"w": weight}, "own": {"v": torch.full((2,), n)}}) for n in (1.0, 2.0))
    digest = one.entries["model/w"]["digest"]
    assert one.tensors[digest] is other.tensors[digest]

    quicken()
    hashed = []
    genuine = inflatable_object.get_object_id
    monkeypatch.setattr(inflatable_object, "get_object_id", lambda text: hashed.append(len(text)) or genuine(text))
    maker, shared = RecordMaker(), prepare({"model": {"w": weight}})
    for number in range(3):
        with inflatable_object.no_object_id_recompute():
            inflatable_object.get_all_nested_objects(maker.make(Parcel(f"message {number}", shared.tensors)))
    assert sum(size > weight.nbytes / 2 for size in hashed) == 1


def test_replies_are_pulled_in_lanes_that_overlap():
    """Each pull waits until all lanes pull: one after the other, the first would wait in vain."""
    together = threading.Barrier(LANES, timeout=30)

    class Grid:
        def __init__(self):
            self.asked = []

        def pull_messages(self, lane):
            together.wait()
            self.asked += lane
            return [*lane]

    grid, wanted = Grid(), [f"message {number}" for number in range(10)]
    found = GridPost(grid, {})._pull(wanted, time.monotonic() + 60)
    assert sorted(found) == sorted(grid.asked) == sorted(wanted)
