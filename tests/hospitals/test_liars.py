"""Hospitals that lie about numbers: what they described and what the others report bounds what they are believed."""

from __future__ import annotations

import json
import tracemalloc

import pytest
import torch

pytest.importorskip("flwr")

from equipoise.core.errors import UserError
from equipoise.engine.checkpoint import fingerprint
from equipoise.hospitals.bounds import absurd, share_of
from equipoise.hospitals.descriptions import MOST_IMAGES, agreed_federation, describe, read_description
from equipoise.hospitals.parcels import Parcel, open_parcel, prepare, seal
from equipoise.report import read_run
from equipoise.report.run_facts import left_out
from equipoise.tasks.classification import Classification, counts_problem
from harness import events, server_state
from postbox import Hospitals, Postbox


class Liar(Postbox):
    """Site 2 changes its replies to one action before they leave."""

    action = "train"

    def lie(self, payload, header):
        raise NotImplementedError

    def carry(self, site, parcel):
        reply = super().carry(site, parcel)
        if site != "site 2" or parcel.header["action"] != self.action or "error" in reply.header:
            return reply
        payload, _ = open_parcel(reply)
        header = {name: reply.header[name] for name in ("identity", "kept", "measures", "facts")}
        self.lie(payload, header)
        return seal(prepare(payload), **header)


def lying(lie, action: str = "train") -> type[Liar]:
    return type("Lies", (Liar,), {"lie": lambda self, payload, header: lie(payload, header), "action": action})


def perfect(payload, header):
    """Every image counts as predicted rightly, and a few more."""
    for counts in header["measures"].values():
        kind, rows = counts["confusion"]
        size = len(rows)
        counts["confusion"] = [kind, [[99 if i == j else 0 for j in range(size)] for i in range(size)]]


def unmeasured(payload, header):
    header["measures"].clear()


def huge_loss(payload, header):
    for counts in header["measures"].values():
        counts["loss"] = ["float64", [1e300]]


def huge_training_loss(payload, header):
    header["facts"]["loss"] = 1e300


def endless_seconds(payload, header):
    header["facts"]["seconds"] = 10**400


def no_float(payload, header):
    header["facts"]["loss"] = 10**400


def negative_examples(payload, header):
    header["facts"]["examples"] = -3


def uncalibrated(payload, header):
    for counts in header["measures"].values():
        counts["calibration"][1][0][0] += 5


def above_one(payload, header):
    for counts in header["measures"].values():
        counts["auc"] = ["float64", [7.0] * len(counts["auc"][1])]


def moves_far(payload, header):
    payload["model"] = {name: t * 200 if t.is_floating_point() else t for name, t in payload["model"].items()}


TRAINING_LIES = {
    "rows": (perfect, "described"),
    "unmeasured": (unmeasured, "did not measure 'global.valid'"),
    "loss": (huge_loss, "its loss of 'global.valid' is"),
    "training loss": (huge_training_loss, "its training loss is"),
    "seconds": (endless_seconds, "which no work comes to"),
    "loss of no float": (no_float, "which no work comes to"),
    "examples": (negative_examples, "'examples' is -3, which no work comes to"),
    "calibration": (uncalibrated, "calibration bins"),
    "auc": (above_one, "area under the curve"),
    "weights times 200": (moves_far, "times as large as usual"),
}


@pytest.mark.parametrize("name", TRAINING_LIES)
def test_an_absurd_answer_puts_the_site_out_of_the_round_and_the_report_states_it(tmp_path, name):
    lie, told = TRAINING_LIES[name]
    folder = Hospitals(tmp_path, "fedavg", post=lying(lie)).run()
    for event in events(folder, "round"):
        assert list(event["missing"]) == ["site 2"] and told in event["missing"]["site 2"]
    honest = Hospitals(tmp_path / "without", "fedavg", post=lying(lambda payload, header: payload.clear())).run()
    for key, tensor in server_state(honest).items():
        assert torch.equal(server_state(folder)[key], tensor), "as if the site had not answered"
    absences = left_out(read_run(folder))
    assert absences and all(site == "site 2" and told in why for site, _, why in absences)


@pytest.mark.parametrize(
    ("method", "setting", "action", "entry", "value", "told"),
    [
        ("fediic", "train.rounds=2", "survey", "class_count", lambda t: t + 1, "but it described"),
        ("fediic", "train.rounds=2", "survey", "class_loss", lambda t: t * 1e12, "'class_loss' is"),
        ("fednova", "train.rounds=2", "train", "steps", lambda _: 0.0, "its training does not come to"),
        ("fednova", "train.rounds=2", "train", "steps", lambda _: 10**6, "its training does not come to"),
        ("fednova", "train.rounds=2", "train", "steps", lambda _: 10**400, "which no work comes to"),
        ("prr", "train.rounds=2", "train", "prototypes", lambda t: t * 1e9, "its update is"),
        ("ida", "ida.accuracy=true", "train", "accuracy", lambda _: 17.0, "no share"),
        ("climb", "climb.primal_rounds=1", "measure", "loss", lambda _: 1e300, "'loss' is"),
        (
            "scaffold",
            "train.rounds=2",
            "train",
            "variate_change",
            lambda d: {k: t * 1e9 for k, t in d.items()},
            "'variate_change' is",
        ),
    ],
)
def test_numbers_that_methods_ask_for_are_bounded(tmp_path, method, setting, action, entry, value, told):
    def lie(payload, header):
        name = next(name for name in payload if name.endswith(entry))
        payload[name] = value(payload[name])

    folder = Hospitals(tmp_path, method, setting, post=lying(lie, action)).run()
    reported = [event["missing"] for event in events(folder, "round")]
    assert reported and all(list(missing) == ["site 2"] and told in missing["site 2"] for missing in reported), reported


def test_a_forged_measurement_of_the_rounds_model_counts_as_none(tmp_path):
    folder = Hospitals(tmp_path, "fedavg", post=lying(perfect, "evaluate")).run()
    measured = [e["site"] for e in events(folder, "evaluation") if e["view"] == "global"]
    assert measured and "site 2" not in measured
    told = [e["text"] for e in events(folder, "warning") if "site 2 did not measure the models" in e["text"]]
    assert told and "described" in told[0]
    (pooled,) = [e for e in events(folder, "final") if e["scope"] == "pooled"]
    (mine,) = [e for e in events(folder, "final") if e["scope"] == "site" and e["site"] == "site 1"]
    assert pooled["n"] < 2 * 99 and mine["n"] > 0


def test_a_loss_beside_the_others_losses_is_believed_up_to_a_multiple():
    losses = {"a": 1.0, "b": 2.0, "c": 150.0}
    assert not absurd(losses, dict.fromkeys(losses, 100.0))
    assert list(absurd({**losses, "c": 151.0}, dict.fromkeys(losses, 100.0))) == ["c"]
    assert not absurd({"a": 1e-9, "b": 1e-9, "c": 5.0}, dict.fromkeys("abc", 100.0), least=1.1)
    assert set(absurd({"a": 1.0, "b": 1e9}, dict.fromkeys("ab", 100.0))) == {"a", "b"}


def test_a_hospital_with_more_images_may_go_further():
    examples = {"small": 100, "usual": 100, "large": 3000}
    assert share_of(examples, "large", list(examples)) == 30
    assert share_of(examples, "small", list(examples)) == 1


def test_counts_of_a_model_are_checked_against_what_was_described():
    logits, labels = torch.randn(40, 3, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
    counts = Classification(("a", "b", "c")).measure(logits, labels)
    assert counts_problem(counts, [14, 13, 13]) is None
    assert "class 1" in counts_problem(counts, [13, 14, 13])
    moved = counts["confusion"].clone()
    moved[0, 0], moved[0, 1] = moved[0].sum(), 0
    moved[0, 2] = 0
    assert "calibration" in counts_problem({**counts, "confusion": moved}, [14, 13, 13])
    assert "area" in counts_problem({**counts, "auc": torch.tensor([0.5, 0.5, 1.5]).double()}, [14, 13, 13])


def test_a_description_costs_the_server_nothing_however_many_images_it_claims(tmp_path):
    told = describe("site 1", Hospitals(tmp_path).federation)
    told["counts"] = {"train": [MOST_IMAGES // 2] * 2 + [0, 0]}
    tracemalloc.start()
    federation = agreed_federation("tiny", [read_description("site 1", json.loads(json.dumps(told)))])
    assert federation.sites[0].class_counts(4).tolist() == [MOST_IMAGES // 2] * 2 + [0, 0]
    fingerprint(federation)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    for more in (
        {"counts": {"train": [MOST_IMAGES, 1, 0, 0]}},
        {"common": {f"place {n}": {"test": [1, 1, 1, 1]} for n in range(101)}},
        {"warnings": ["slow"] * 101},
        {"classes": [str(n) for n in range(1001)]},
        {"cohorts": {f"place {n}": {"test": [MOST_IMAGES // 4, 0, 0, 0]} for n in range(5)}},
    ):
        with pytest.raises(UserError, match="what site 1 says of its data is not valid"):
            read_description("site 1", {**told, **more})


def test_what_stands_for_images_elsewhere_is_what_arrays_would_be(tmp_path):
    federation = Hospitals(tmp_path).federation
    remote = agreed_federation("tiny", [describe(s.name, federation) for s in federation.sites])
    for site in remote.sites:
        for split in site.splits.values():
            assert len(split) == len(split.rows) == len(split.labels) == sum(split.class_counts(4))
            assert b"".join(s.tobytes() for s in split.stretches()) == split.rows.tobytes() + split.labels.tobytes()


def test_a_parcel_that_is_no_parcel_is_no_lie_to_believe(tmp_path):
    class Garbles(Postbox):
        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            return Parcel('{"facts": 1}') if site == "site 2" else reply

    folder = Hospitals(tmp_path, post=Garbles).run()
    assert all(list(event["missing"]) == ["site 2"] for event in events(folder, "round"))


def test_a_tensor_under_many_names_takes_the_memory_of_one():
    """Or a small message could fill the server's memory."""
    half = seal(prepare({"model": {str(place): torch.full((64,), 0.5) for place in range(50)}}, half=True))
    assert len(half.tensors) == 1
    payload, _ = open_parcel(half)
    assert len({tensor.data_ptr() for tensor in payload["model"].values()}) == 1


def test_a_small_reply_cannot_fill_the_servers_disk(tmp_path):
    """Tensors of equal numbers travel once, and the journal has each."""

    def lie(payload, header):
        payload["model"] = {f"layer {place}": torch.zeros(10_000) for place in range(500)}

    hospitals = Hospitals(tmp_path, "fedavg", "train.rounds=1", post=lying(lie))
    (event,) = events(hospitals.run(keep_updates=True), "round")
    assert "far more than have travelled" in event["missing"]["site 2"]
    sizes = [path.stat().st_size for path in (hospitals.folder / "run" / "journal").iterdir()]
    assert sizes and max(sizes) < 10_000_000


def test_steps_on_images_that_a_site_holds_back_are_no_lie(tmp_path):
    hospitals = Hospitals(tmp_path, "fednova", "privacy.least=12", "train.batch_size=2")
    folder = hospitals.run()
    held = [office.described(hospitals.config)["counts"]["train"] for office in hospitals.post.offices.values()]
    sites = hospitals.federation.training_sites()
    assert any(len(site.splits["train"]) > sum(told) + 1 for site, told in zip(sites, held))
    assert [event["missing"] for event in events(folder, "round")] == [{}, {}]
