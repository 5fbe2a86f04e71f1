"""The engine between hospitals, without the network: equal bits, transactions, lies, what may leave, traffic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from equipoise.deploy.descriptions import agreed_federation, describe
from equipoise.deploy.office import Office
from equipoise.deploy.records import from_records, to_records
from equipoise.deploy.security import new_key_pair, signer, verifier
from equipoise.engine.flower import FlowerOptions, _length
from equipoise.engine.parcels import Parcel, UnreadableParcel, open_parcel, prepare, seal
from equipoise.engine.protocol import SiteFailure
from equipoise.engine.states import read_state
from equipoise.errors import UserError
from equipoise.prediction import predict_images
from harness import assert_same_bits, events, last_checkpoint, run_tiny, server_state, site_states
from postbox import Hospitals, Postbox


def kept_at_sites(hospitals: Hospitals, folder: Path) -> dict[str, torch.Tensor]:
    """What sites keep on their own disks after the last round, named as `site_states` does."""
    manifest = json.loads((last_checkpoint(folder) / "manifest.json").read_text())
    return {
        f"{site}/kept/{name}": tensor
        for site, version in manifest["sites"].items()
        for name, tensor in read_state(hospitals.records(site) / "test" / "states" / f"{version}.safetensors").items()
    }


def assert_like_local(tmp_path: Path, hospitals: Hospitals, folder: Path, method: str, *settings: str) -> None:
    local = run_tiny(tmp_path / "local", method, *settings)
    assert_same_bits(server_state(local), server_state(folder))
    assert_same_bits(site_states(local), kept_at_sites(hospitals, folder))


# ---- the same results ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fediic", "prr", "fedbm", "fedbn", "fedrep"])
def test_server_and_personal_state_are_those_of_the_local_engine(tmp_path, method):
    hospitals = Hospitals(tmp_path, method)
    assert_like_local(tmp_path, hospitals, hospitals.run(), method)


def test_scores_are_those_of_the_local_engine_except_pooled_auc(tmp_path):
    local, apart = run_tiny(tmp_path / "local"), Hospitals(tmp_path).run()
    for mine, theirs in zip(events(local, "final"), events(apart, "final")):
        if mine["scope"] == "pooled":
            assert theirs["metrics"].pop("balanced_auc") is None and mine["metrics"].pop("balanced_auc") is not None
        assert mine == theirs


def test_a_common_test_set_is_measured_where_it_lies(tmp_path):
    drawn = ("data.partition='dirichlet_per_class'", "data.sites=2", "data.alpha=5.0")
    hospitals = Hospitals(tmp_path, "fedavg", *drawn)
    folder = hospitals.run()
    local = run_tiny(tmp_path / "local", "fedavg", *drawn)
    finals = [{e["site"]: e["confusion"] for e in events(f, "final")} for f in (folder, local)]
    assert "common" in finals[0] and finals[0] == finals[1]


# ---- rounds are transactions -------------------------------------------------------------------------


class Crash(Exception):
    """The server dies."""


class CrashingPost(Postbox):
    """The server dies just before, or just after, the n-th exchange."""

    before = after = 0
    exchanges = 0

    def exchange(self, parcels, timeout):
        self.exchanges += 1
        if self.exchanges == self.before:
            raise Crash
        replies = super().exchange(parcels, timeout)
        if self.exchanges == self.after:
            raise Crash
        return replies


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("exchange", [1, 2, 3, 5, 6])
def test_a_server_that_dies_in_any_exchange_resumes_with_the_same_bits(tmp_path, where, exchange):
    hospitals = Hospitals(tmp_path, "fediic", "evaluation.every=2", post=CrashingPost)
    setattr(hospitals.post, where, exchange)
    with pytest.raises(Crash):
        hospitals.run()
    folder = hospitals.run(resume=True)
    assert_like_local(tmp_path, hospitals, folder, "fediic", "evaluation.every=2")


def test_journaled_replies_are_not_asked_for_again(tmp_path):
    hospitals = Hospitals(tmp_path, "fediic", post=CrashingPost)
    hospitals.post.before = 3  # after the survey of round 1, before its training
    with pytest.raises(Crash):
        hospitals.run()
    hospitals.post.carried.clear()
    hospitals.run(resume=True)
    surveys = [header["round"] for _, header in hospitals.post.carried if header["action"] == "survey"]
    assert surveys == [2, 2, 2]


def test_a_repeated_message_is_answered_from_disk(tmp_path, monkeypatch):
    hospitals = Hospitals(tmp_path, "fedrep", post=CrashingPost)
    hospitals.post.after = 2  # sites have trained and answered; the server dies before it notes the replies
    with pytest.raises(Crash):
        hospitals.run()
    trained = []
    perform = Office._perform
    monkeypatch.setattr(
        Office,
        "_perform",
        lambda self, w, r, h, m: trained.append((h["action"], h["round"])) or perform(self, w, r, h, m),
    )
    folder = hospitals.run(resume=True)
    assert ("train", 1) not in trained and ("train", 2) in trained
    assert_like_local(tmp_path, hospitals, folder, "fedrep")


class LosesOne(Postbox):
    """The reply of site 1 in round 2 never arrives, though the site has trained and written its next state."""

    def carry(self, site, parcel):
        reply = super().carry(site, parcel)
        header = parcel.header
        late = site == "site 1" and header["action"] == "train" and header["round"] == 2
        return SiteFailure("no answer within 1 s") if late else reply


def test_a_late_site_rolls_back_and_is_welcome_again(tmp_path):
    hospitals = Hospitals(tmp_path, "fedrep", "train.rounds=3", post=LosesOne)
    folder = hospitals.run()
    missing = [event["missing"] for event in events(folder, "round")]
    assert missing == [{}, {"site 1": "no answer within 1 s"}, {}]
    bases = [h["base"] for site, h in hospitals.post.carried if site == "site 1" and h["action"] == "train"]
    assert bases == ["", "00001-0-0", "00001-0-0"]


def test_sites_delete_versions_that_no_checkpoint_needs(tmp_path):
    hospitals = Hospitals(tmp_path, "fedrep", "train.rounds=5", "checkpoint.keep=1", "evaluation.rule='last'")
    hospitals.run()
    left = {path.stem for path in (hospitals.records("site 1") / "test" / "states").iterdir()}
    assert left == {"00004-0-0", "00005-0-0"}


def test_a_restarted_site_finds_its_personal_state_and_is_sent_everything_again(tmp_path):
    class Restarts(Postbox):
        def carry(self, site, parcel):
            self.offices[site] = hospitals.office(site)  # a new process for every message
            return super().carry(site, parcel)

    hospitals = Hospitals(tmp_path, "fedrep", post=Restarts)
    assert_like_local(tmp_path, hospitals, hospitals.run(), "fedrep")


def test_selected_models_are_written_at_the_site_and_predict(tmp_path):
    from PIL import Image

    hospitals = Hospitals(tmp_path, "fedrep")
    folder = hospitals.run()
    assert (folder / "models" / "global.safetensors").exists() and not (folder / "models" / "personal").exists()
    Image.new("RGB", (16, 16)).save(tmp_path / "image.png")
    classes, rows = predict_images(hospitals.records("site 2") / "test", [tmp_path / "image.png"], "site 2")
    assert len(classes) == 4 and rows.sum() == pytest.approx(1.0)


# ---- lost, slow and lying sites --------------------------------------------------------------------------


class Liar(Postbox):
    """Site 2 sends something else than it should when it has trained."""

    lie = "nan"

    def carry(self, site, parcel):
        reply = super().carry(site, parcel)
        if site != "site 2" or parcel.header["action"] != "train":
            return reply
        header = reply.header
        if self.lie in ("nan", "long"):
            payload, _ = open_parcel(reply)
            tensor = next(t for t in payload["model"].values() if t.is_floating_point())
            tensor.view(-1)[0] = float("nan") if self.lie == "nan" else 1e6
            told = {name: header[name] for name in ("identity", "kept", "measures", "facts")}
            return seal(prepare(payload), **told)
        if self.lie == "replay":
            return Parcel(json.dumps({**header, "identity": "of another message"}), reply.tensors)
        if self.lie == "no header":
            return Parcel("<html>", reply.tensors)
        if self.lie == "incomplete":
            return Parcel(json.dumps({k: v for k, v in header.items() if k != "measures"}), reply.tensors)
        records = to_records(reply)
        array = next(iter(records.array_records["tensors"].values()))
        array.data = b"garbage" if self.lie == "garbage" else array.data[:-4] + b"\0\0\0\0"
        try:
            return from_records(records)
        except UnreadableParcel as problem:
            return SiteFailure(f"its reply cannot be read: {problem}")


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ("nan", "NaN"),
        ("long", "times as long"),
        ("replay", "another message"),
        ("no header", "not JSON"),
        ("incomplete", "incomplete"),
        ("garbage", "damaged"),
        ("flipped", "not what the header says"),
    ],
)
def test_a_lie_is_refused_and_reported_and_the_round_goes_on(tmp_path, lie, told):
    hospitals = Hospitals(tmp_path, "fedavg", post=type("Lies", (Liar,), {"lie": lie}))
    folder = hospitals.run()
    for event in events(folder, "round"):
        assert list(event["missing"]) == ["site 2"] and told in event["missing"]["site 2"]
    assert all(torch.isfinite(t).all() for t in server_state(folder).values())


def test_a_site_that_cannot_measure_is_left_out_of_the_scores_with_a_warning(tmp_path):
    class Silent(Postbox):
        def carry(self, site, parcel):
            silent = site == "site 3" and parcel.header["action"] == "evaluate"
            return SiteFailure("it is not connected") if silent else super().carry(site, parcel)

    folder = Hospitals(tmp_path, post=Silent).run()
    assert {event["site"] for event in events(folder, "evaluation") if event["view"] == "global"} == {
        "site 1",
        "site 2",
    }
    assert "site 3 did not measure the models: it is not connected" in events(folder, "warning")[0]["text"]


# ---- what may leave --------------------------------------------------------------------------------------


def test_a_method_that_asks_for_more_than_the_policy_allows_is_refused_by_name(tmp_path):
    hospitals = Hospitals(tmp_path, "fediic")
    for office in hospitals.post.offices.values():
        office.policy = {"train": ["model", "examples"], "evaluate": ["counts"], "describe": ["counts"]}
    with pytest.raises(UserError, match=r"policy refuses the method 'fediic'.*survey"):
        hospitals.run()


def test_scores_of_single_patients_never_travel(tmp_path):
    hospitals = Hospitals(tmp_path)
    seen = []

    class Watched(Postbox):
        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            seen.extend(name for counts in reply.header.get("measures", {}).values() for name in counts)
            return reply

    hospitals.post = Watched(hospitals.post.offices)
    hospitals.run()
    assert set(seen) == {"confusion", "calibration", "auc", "loss"}


def test_an_office_works_on_its_own_images_only(tmp_path):
    hospitals = Hospitals(tmp_path)
    misled = {**hospitals.post.offices, "site 1": hospitals.post.offices["site 2"]}
    reply = None

    class Misleads(Postbox):
        def carry(self, site, parcel):
            nonlocal reply
            reply = reply or misled[site].answer(parcel).header.get("error")
            return super().carry(site, parcel)

    hospitals.post = Misleads(hospitals.post.offices)
    hospitals.run()
    assert reply == "this is 'site 2'; it has no images of 'site 1'"


def test_only_messages_that_the_coordinator_signed_are_obeyed(tmp_path):
    for name in ("coordinator", "stranger"):
        new_key_pair(tmp_path / f"{name}.key", tmp_path / f"{name}.pub")
    verify = verifier(tmp_path / "coordinator.pub")
    parcel = seal(prepare({"model": torch.ones(3)}), action="train")
    verify(signer(tmp_path / "coordinator.key")(parcel))
    for forged in (parcel, signer(tmp_path / "stranger.key")(parcel)):
        with pytest.raises(UnreadableParcel, match="did not sign"):
            verify(forged)
    signed = signer(tmp_path / "coordinator.key")(parcel)
    with pytest.raises(UnreadableParcel, match="not what the header says"):
        open_parcel(Parcel(signed.text, {digest: t + 1 for digest, t in signed.tensors.items()}, signed.signature))


def test_what_fails_at_a_site_is_told_without_local_details(tmp_path, monkeypatch):
    hospitals = Hospitals(tmp_path)
    monkeypatch.setattr(Office, "_perform", lambda *_: (_ for _ in ()).throw(ValueError("patient-0815.png")))
    with pytest.raises(UserError, match="failed 3 times"):
        hospitals.run()
    told = [event["text"] for event in events(hospitals.folder / "run", "warning")]
    assert told and not any("0815" in text for text in told) and any("ValueError at the site" in text for text in told)


def test_sums_over_images_may_differ_as_much_as_hospitals_do():
    updates = {"model": {"w": torch.ones(2)}, "class_loss": torch.tensor([1e9])}
    assert _length(updates, {"model": {"w": torch.zeros(2)}}) == pytest.approx(2**0.5)


# ---- agreement between sites ---------------------------------------------------------------------------------


def test_sites_must_agree_on_classes_and_sizes(tmp_path):
    federation = Hospitals(tmp_path).federation
    told = [describe(site.name, federation) for site in federation.sites]
    told[1]["classes"] = told[1]["classes"][::-1]
    with pytest.raises(UserError, match=r"disagree about classes: site 1 .* site 2"):
        agreed_federation("tiny", told)


def test_the_server_knows_numbers_of_images_but_cannot_read_one(tmp_path):
    hospitals = Hospitals(tmp_path)
    remote = agreed_federation("tiny", [describe(s.name, hospitals.federation) for s in hospitals.federation.sites])
    for mine, theirs in zip(remote.sites, hospitals.federation.sites):
        assert (mine.class_counts(4) == theirs.class_counts(4)).all()
    with pytest.raises(RuntimeError, match="cannot be read here"):
        remote.sites[0].splits["train"].images(torch.arange(1))


# ---- traffic ---------------------------------------------------------------------------------------------------


def traffic(folder: Path) -> list[tuple[float, float]]:
    """Bytes sent and received by site 1 in each round."""
    return [(e["sites"]["site 1"]["sent"], e["sites"]["site 1"]["received"]) for e in events(folder, "round")]


def test_unchanged_tensors_are_not_sent_again(tmp_path):
    folder = Hospitals(tmp_path, "fediic", "train.rounds=3").run()
    model = sum(t.numel() * t.element_size() for t in server_state(folder).values())
    # Survey, training and evaluation each need the model; it travels down once a round.
    for _, received in traffic(folder)[1:]:
        assert model < received < 2 * model


def test_half_precision_halves_the_traffic_and_hardly_moves_the_weights(tmp_path):
    brief = ("train.rounds=1", "train.steps=1", "train.optimiser.lr=0.001")  # rounding does not grow
    full = Hospitals(tmp_path / "full", "fedavg", *brief).run()
    half = Hospitals(tmp_path / "half", "fedavg", *brief).run(FlowerOptions(half=True))
    header = 5_000
    for (sent, received), (sent_half, received_half) in zip(traffic(full), traffic(half)):
        assert sent_half - header < sent / 2 < sent_half + header
        assert received_half - 3 * header < received / 2 < received_half + 3 * header
    first, second = server_state(full), server_state(half)
    for name, tensor in first.items():
        assert second[name].dtype == tensor.dtype
        torch.testing.assert_close(second[name], tensor, atol=1e-3, rtol=1e-3)
