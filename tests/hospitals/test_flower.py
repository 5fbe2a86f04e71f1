"""The engine between hospitals, without the network: equal bits, transactions, lies, what may leave, traffic."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from equipoise.contract.protocol import Ask, SiteFailure
from equipoise.core.errors import UserError
from equipoise.data import DataConfig
from equipoise.engine import selection
from equipoise.engine.engine import _difference, _expected
from equipoise.engine.exporting import export_model
from equipoise.engine.prediction import predict_images
from equipoise.engine.states import read_state
from equipoise.engine.summing import length_of_update
from equipoise.hospitals.descriptions import agreed_federation, describe, read_description
from equipoise.hospitals.exchange import FlowerOptions
from equipoise.hospitals.office import Office
from equipoise.hospitals.parcels import Parcel, UnreadableParcel, open_parcel, prepare, seal
from equipoise.hospitals.records import from_records, to_records
from equipoise.hospitals.security import new_key_pair, signer, verifier
from equipoise.report import read_run, selection_note
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


@pytest.mark.parametrize(("method", "setting"), [("fediic", "fediic.k1=0"), ("prr", "prr.prototype_exchange='epoch'")])
def test_dropout_differs_between_the_asks_of_a_round_as_on_the_local_engine(tmp_path, method, setting):
    settings = ("net.dropout=0.3", "train.rounds=1", "train.epochs=2", setting)
    hospitals = Hospitals(tmp_path, method, *settings)
    assert_like_local(tmp_path, hospitals, hospitals.run(), method, *settings)
    assert {header["index"] for _, header in hospitals.post.carried if header["action"] == "train"} - {0}


@pytest.mark.parametrize("method", ["local", "fedbn", "fedavg"])
def test_training_that_diverges_at_the_sites_ends_with_advice(tmp_path, method):
    hospitals = Hospitals(tmp_path, method, "train.optimiser.lr=1e20", "train.rounds=4")
    with pytest.raises(UserError, match=r"NaN or infinity.*lower train\.optimiser\.lr"):
        hospitals.run()


def test_scores_are_those_of_the_local_engine_except_pooled_auc(tmp_path):
    local, apart = run_tiny(tmp_path / "local"), Hospitals(tmp_path).run()
    for mine, theirs in zip(events(local, "final"), events(apart, "final")):
        if mine["scope"] == "pooled":
            assert theirs["metrics"].pop("balanced_auc") is None and mine["metrics"].pop("balanced_auc") is not None
        assert mine == theirs


@pytest.mark.parametrize("select", ["federation", "site"])
def test_scores_after_training_and_of_sites_own_rounds_are_those_of_the_local_engine(tmp_path, select):
    judged = ("evaluation.metric='balanced_auc'", "train.rounds=4", f"evaluation.select='{select}'")
    settings = (*judged, "evaluation.trained_test=true", "data.phantom.images=120")
    local = run_tiny(tmp_path / "local", "fedrep", *settings)
    apart = Hospitals(tmp_path, "fedrep", *settings).run()
    assert events(local, "selection") == events(apart, "selection")
    sites = [[e for e in events(f, "final") if e["scope"] != "pooled"] for f in (local, apart)]
    assert {e["view"] for e in sites[0]} == {"personal", "trained"} and sites[0] == sites[1]


def test_fine_tuned_models_wait_for_the_final_test_and_score_as_on_the_local_engine(tmp_path):
    settings = ("evaluation.view='global'", "fedbabu.finetune_epochs=1", "data.phantom.images=120")
    local = run_tiny(tmp_path / "local", "fedbabu", *settings)
    apart = Hospitals(tmp_path, "fedbabu", *settings).run()
    assert {e["view"] for e in events(apart, "evaluation")} == {"global", "trained"}
    sites = [[e for e in events(f, "final") if e["scope"] != "pooled"] for f in (local, apart)]
    assert {e["view"] for e in sites[0]} == {"global", "personal"} and sites[0] == sites[1]


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
    card = export_model(hospitals.records("site 2") / "test", tmp_path / "model.pt2", "site 2")
    assert card["classes"] == classes and card["scores"] == [], "what a hospital keeps has no test results"


def test_a_model_at_a_hospital_goes_with_images_prepared_as_its_own_were(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", "train.rounds=1")
    hospitals.post.offices["site 2"] = Office(
        "site 2",
        hospitals.federation,
        hospitals.records("site 2"),
        hospitals.post.offices["site 2"].policy,
        data=DataConfig(crop="squash", colour_constancy=True),
    )
    hospitals.run()
    for site, expected in (("site 1", ("centre", False)), ("site 2", ("squash", True))):
        card = export_model(hospitals.records(site) / "test", tmp_path / f"{site}.pt2")
        assert (card["pixels"]["crop"], card["pixels"]["colour_constancy"]) == expected


def test_a_resumed_server_lets_sites_keep_the_state_of_the_selected_round(tmp_path, monkeypatch):
    monkeypatch.setattr(selection, "_merit", lambda choice: -choice["round"])  # the first round stands
    hospitals = Hospitals(tmp_path, "fedrep", "train.rounds=5", post=CrashingPost)
    hospitals.post.before = 7
    with pytest.raises(Crash):
        hospitals.run()
    folder = hospitals.run(resume=True)
    assert events(folder, "selection")[0]["round"] == 1 and not events(folder, "warning")
    undisturbed = Hospitals(tmp_path / "whole", "fedrep", "train.rounds=5").run()
    assert events(folder, "final") == events(undisturbed, "final") != []


# ---- lost, slow and lying sites --------------------------------------------------------------------------


FALSE_NOTES = {
    "facts of words": {"facts": {"seconds": "soon"}},
    "unknown facts": {"facts": {"<b>": 1.0}},
    "facts in a list": {"facts": [1, 2]},
    "unasked counts": {"measures": {"global.train": {}}},
    "misshapen counts": {"measures": {"global.valid": {"confusion": ["int64", [[1]]]}}},
    "verbose": {"error": "x" * 100_000},
}


class Liar(Postbox):
    """A site sends something else than it should when it has trained."""

    lie, liar = "nan", "site 2"

    def carry(self, site, parcel):
        reply = super().carry(site, parcel)
        if site != self.liar or parcel.header["action"] != "train":
            return reply
        header = reply.header
        told = {name: header[name] for name in ("identity", "kept", "measures", "facts")}
        if self.lie in ("nan", "long", "heavy", "wordy", "tensors", "generous", "void"):
            payload, _ = open_parcel(reply)
            tensor = next(t for t in payload["model"].values() if t.is_floating_point())
            spoil = {"nan": float("nan"), "long": 1e6}
            tensor.view(-1)[0] = spoil.get(self.lie, tensor.view(-1)[0])
            claims = {"heavy": 10**9, "wordy": "many", "tensors": torch.ones(2)}
            payload["examples"] = claims.get(self.lie, payload["examples"])
            payload |= {"patients": 12} if self.lie == "generous" else {}
            sealed = seal(prepare(payload), **told)
            return (
                Parcel(sealed.text.replace(f'"examples": {payload["examples"]}', '"examples": null'), sealed.tensors)
                if self.lie == "void"
                else sealed
            )
        if self.lie in FALSE_NOTES:
            return Parcel(json.dumps({**header, **FALSE_NOTES[self.lie]}), reply.tensors)
        if self.lie == "strange numbers":
            text = json.dumps(header).replace('"dtype": "float32"', '"dtype": "nn"')
            return Parcel(text, reply.tensors)
        if self.lie == "deep":
            return Parcel("[" * 100_000, reply.tensors)
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
        ("long", "times as large as usual"),
        ("replay", "another message"),
        ("no header", "not JSON"),
        ("incomplete", "incomplete"),
        ("garbage", "damaged"),
        ("flipped", "not what the header says"),
        ("heavy", "claims 1000000000 training images"),
        ("wordy", "claims many training images"),
        ("tensors", "claims tensor([1., 1.]) training images"),
        ("generous", "'patients' is not on the method's disclosure sheet"),
        ("void", "header is incomplete"),
        ("facts of words", "'seconds' is no entry"),
        ("unknown facts", "is no entry"),
        ("facts in a list", "incomplete"),
        ("unasked counts", "did not request"),
        ("misshapen counts", "the counts of 'global.valid' are confusion"),
        ("verbose", "xxx"),
        ("strange numbers", "header is incomplete"),
        ("deep", "not JSON"),
    ],
)
def test_a_lie_is_refused_and_reported_and_the_round_goes_on(tmp_path, lie, told):
    hospitals = Hospitals(tmp_path, "fedavg", post=type("Lies", (Liar,), {"lie": lie}))
    folder = hospitals.run()
    for event in events(folder, "round"):
        assert list(event["missing"]) == ["site 2"] and told in event["missing"]["site 2"]
        assert len(event["missing"]["site 2"]) < 1000
    assert all(torch.isfinite(t).all() for t in server_state(folder).values())


@pytest.mark.parametrize("lie", ["tensors", "generous", "wordy", "nan"])
def test_one_of_two_sites_cannot_put_the_other_in_the_wrong(tmp_path, lie):
    post = type("Lies", (Liar,), {"lie": lie, "liar": "site 1"})
    folder = Hospitals(tmp_path, "fedavg", "data.phantom.sites=2", post=post).run()
    assert [list(event["missing"]) for event in events(folder, "round")] == [["site 1"]] * 2


SOUND = {"model": ((4,), "torch.float32"), "loss": ((4,), "torch.float32"), "count": ((4,), "torch.int64")}
OTHER = ((5,), "torch.float32")
MOVED, ODD, STRANGE = SOUND | {"model": OTHER}, SOUND | {"loss": OTHER}, SOUND | {"count": OTHER}
SHORT = {name: shape for name, shape in SOUND.items() if name != "model"}


@pytest.mark.parametrize(
    ("replies", "believed"),
    [
        ((SOUND, SOUND, ODD), (0, 1)),
        ((ODD, SOUND), ()),
        ((MOVED, SOUND), (1,)),  # a shape that was sent needs no majority
        ((SHORT, SOUND), ()),
        ((SOUND, SOUND, MOVED, ODD), (0, 1)),
        ((SOUND, SOUND, SOUND, ODD, STRANGE), (0, 1, 2)),
        ((SOUND, ODD, STRANGE), (0,)),  # of each entry two have the same shape
        ((ODD,), (0,)),
    ],
)
def test_a_reply_is_believed_if_it_agrees_with_the_message_and_with_most_sites(replies, believed):
    named = {f"site {place}": own for place, own in enumerate(replies)}
    expected = _expected(named, Ask("survey", list(named), model=torch.zeros(4)))
    assert tuple(place for place, own in enumerate(replies) if _difference(own, expected) is None) == believed


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


class MissesLater(CrashingPost):
    """Site 2 measures the models of some rounds only."""

    measured = (1,)

    def carry(self, site, parcel):
        header = parcel.header
        if site == "site 2" and header["action"] == "evaluate" and header["round"] not in self.measured:
            return SiteFailure("it is not connected")
        return super().carry(site, parcel)


LATER = ("train.rounds=4", "evaluation.metric='balanced_auc'", "data.phantom.images=120")


def validation(folder: Path, number: int) -> float:
    """Mean validation score of a round over the sites that measured it."""
    judged = [e for e in events(folder, "evaluation") if e["part"] == "valid" and e["view"] == "global"]
    found = [e for e in judged if e["round"] == number]
    return sum(e["metrics"]["balanced_auc"] for e in found) / len(found)


@pytest.mark.parametrize("crash", [0, 7])
def test_a_round_that_a_site_did_not_measure_is_not_selected(tmp_path, crash):
    hospitals = Hospitals(tmp_path, "fedavg", *LATER, post=MissesLater)
    hospitals.post.before = crash
    if crash:
        with pytest.raises(Crash):
            hospitals.run()
    folder = hospitals.run(resume=bool(crash))
    assert max(validation(folder, n) for n in (2, 3, 4)) > validation(folder, 1), "the case is worth nothing else"
    (selection,) = events(folder, "selection")
    assert selection["round"] == 1 and "missing" not in selection
    told = [e["text"] for e in events(folder, "warning") if "lacks the validation score of site 2" in e["text"]]
    assert [text.split()[1] for text in told] == ["2", "3", "4"]


def test_the_report_says_where_the_selected_round_was_not_measured(tmp_path):
    post = type("Never", (MissesLater,), {"measured": ()})
    folder = Hospitals(tmp_path, "fedavg", *LATER, post=post).run()
    (selection,) = events(folder, "selection")
    best = max((1, 2, 3, 4), key=lambda number: validation(folder, number))
    assert selection["round"] == best and selection["missing"] == ["site 2"]
    assert "(not measured at site 2)" in selection_note(read_run(folder))


def test_a_run_that_loses_nobody_has_no_incomplete_round(tmp_path):
    drawn = ("data.partition='dirichlet_per_class'", "data.sites=2", "data.alpha=5.0", "train.participation=0.5")
    for number, (method, settings) in enumerate([("fedrep", drawn), ("prr", ("train.participation=0.4",))]):
        folder = Hospitals(tmp_path / str(number), method, *settings).run()
        assert events(folder, "selection") and not events(folder, "warning")


# ---- what may leave --------------------------------------------------------------------------------------


def test_a_final_measurement_and_models_that_a_site_does_not_deliver_are_told(tmp_path):
    class Leaves(Postbox):
        def carry(self, site, parcel):
            header = parcel.header
            self.gone = getattr(self, "gone", False) or header["action"] == "publish"
            return SiteFailure("it is not connected") if self.gone and site == "site 3" else super().carry(site, parcel)

    folder = Hospitals(tmp_path, post=Leaves).run()
    told = "\n".join(event["text"] for event in events(folder, "warning"))
    assert "site 3 did not write out the selected models: it is not connected" in told
    assert "site 3 did not measure the models: it is not connected" in told


def test_all_sites_are_waited_for_when_the_start_is_repeated(tmp_path):
    class Late(Postbox):
        waited = ()

        def carry(self, site, parcel):
            if site == "site 2" and not self.waited:
                return SiteFailure("it is not connected")
            return super().carry(site, parcel)

        def gather(self, sites, enough, patience):
            self.waited = (*self.waited, enough)
            return []

    hospitals = Hospitals(tmp_path, "scaffold", post=Late)
    hospitals.run()
    assert hospitals.post.waited == (3,)


def test_a_damaged_stored_reply_is_computed_again(tmp_path):
    hospitals = Hospitals(tmp_path, "fedrep", post=CrashingPost)
    hospitals.post.after = 2
    with pytest.raises(Crash):
        hospitals.run()
    replies = list((tmp_path / "hospitals").glob("*/test/replies/*.safetensors"))
    assert len(replies) == 3
    replies[0].write_bytes(b"")
    replies[1].unlink()
    replies[1].mkdir()
    content = bytearray(replies[2].read_bytes())
    content[-5] ^= 1
    replies[2].write_bytes(content)
    assert_like_local(tmp_path, hospitals, hospitals.run(resume=True), "fedrep")


def test_a_damaged_journal_is_asked_for_again(tmp_path):
    hospitals = Hospitals(tmp_path, "fediic", post=CrashingPost)
    hospitals.post.before = 3
    with pytest.raises(Crash):
        hospitals.run()
    journaled = list((tmp_path / "run" / "journal").glob("*.safetensors"))
    assert len(journaled) == 3
    journaled[0].write_bytes(b"")
    content = bytearray(journaled[1].read_bytes())
    content[-5] ^= 1
    journaled[1].write_bytes(content)
    notes = journaled[2].with_suffix(".json")
    notes.write_text(re.sub(r"\d", lambda digit: str(9 - int(digit[0])), notes.read_text(), count=1))
    assert_like_local(tmp_path, hospitals, hospitals.run(resume=True), "fediic")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b""), lambda path: path.unlink()])
def test_a_site_whose_committed_state_is_damaged_ends_the_run_by_name(tmp_path, damage):
    class Damages(Postbox):
        def carry(self, site, parcel):
            if site == "site 1" and parcel.header["round"] == 2 and parcel.header["action"] == "train":
                for path in hospitals.records(site).glob("*/states/*.safetensors"):
                    damage(path)
            return super().carry(site, parcel)

    hospitals = Hospitals(tmp_path, "scaffold", post=Damages)
    with pytest.raises(UserError, match=r"site 1 cannot go on: .* every further round would leave site 1"):
        hospitals.run()


def test_a_site_whose_data_has_changed_since_the_run_began_refuses(tmp_path):
    class Swaps(Postbox):
        def carry(self, site, parcel):
            if site == "site 1" and parcel.header["round"] == 2:
                office = self.offices[site]
                office._descriptions[0] = {**office._description(0), "fingerprint": "of other images"}
            return super().carry(site, parcel)

    folder = Hospitals(tmp_path, post=Swaps).run()
    assert [list(event["missing"].values()) for event in events(folder, "round")] == [
        [],
        ["this site's data has changed since the run began"],
    ]


def test_the_next_host_measures_a_common_test_set_when_the_first_is_away(tmp_path):
    drawn = ("data.partition='dirichlet_per_class'", "data.sites=2", "data.alpha=5.0", "evaluation.every=2")

    class FirstIsAway(Postbox):
        def carry(self, site, parcel):
            header = parcel.header
            away = header["action"] == "evaluate" and self.offices[site].site == next(iter(self.offices))
            return SiteFailure("it is not connected") if away else super().carry(site, parcel)

    folder = Hospitals(tmp_path, "fedavg", *drawn, post=FirstIsAway).run()
    local = run_tiny(tmp_path / "local", "fedavg", *drawn)
    common = [[e["confusion"] for e in events(f, "final") if e["site"] == "common"] for f in (folder, local)]
    assert common[0] and common[0] == common[1]


def test_sites_that_hold_the_same_test_set_must_agree_about_it(tmp_path):
    federation = Hospitals(tmp_path).federation
    told = [describe(site.name, federation) for site in federation.sites]
    for number, description in enumerate(told):
        description["cohorts"] = {"abroad": {"test": [number, 1, 1, 1]}}
    with pytest.raises(UserError, match="site 2 holds other images of 'abroad'"):
        agreed_federation("tiny", told)
    for description in told:
        description["cohorts"] = {"site 3": {"test": [1, 1, 1, 1]}}
    with pytest.raises(UserError, match="'site 3', which is a site's name"):
        agreed_federation("tiny", told)


@pytest.mark.parametrize(
    "lie",
    [
        {"counts": {"train": [10**12, 0, 0, 0]}},
        {"counts": {"train": [1, -1, 0, 0]}},
        {"counts": {"train": [1, 2]}},
        {"counts": {"elsewhere": [1, 2, 3, 4]}},
        {"classes": ["one"]},
        {"image_size": 10**9},
        {"more": 1},
    ],
    ids=str,
)
def test_an_absurd_description_is_refused(tmp_path, lie):
    told = describe("site 1", Hospitals(tmp_path).federation)
    assert read_description("site 1", json.loads(json.dumps(told))) == told
    with pytest.raises(UserError, match="what site 1 says of its data is not valid"):
        read_description("site 1", {**told, **lie})
    with pytest.raises(UserError, match="site 1"):
        read_description("site 1", None)


def test_a_long_warning_of_a_site_is_cut_not_refused(tmp_path):
    talkative = dataclasses.replace(Hospitals(tmp_path).federation, warnings=("column " * 100,))
    told = read_description("site 1", describe("site 1", talkative))
    assert told["warnings"][0].endswith("column ...")


def test_a_class_is_missing_only_if_no_site_has_it(tmp_path):
    told = [describe(f"site {n}", Hospitals(tmp_path).federation) for n in (1, 2, 3)]
    for description, train in zip(told, ([5, 0, 1, 0], [0, 5, 1, 0], [3, 3, 0, 0])):
        description["counts"]["train"] = train
    absent = told[0]["classes"][3]
    assert agreed_federation("tiny", told).warnings == (f"no training image of class {absent} at any site",)


def test_a_method_that_asks_for_more_than_the_policy_allows_is_refused_by_name(tmp_path):
    hospitals = Hospitals(tmp_path, "fediic")
    for office in hospitals.post.offices.values():
        office.policy = {"train": ["model", "examples"], "evaluate": ["counts"], "describe": ["counts"]}
    with pytest.raises(UserError, match=r"policy refuses the method 'fediic'.*survey"):
        hospitals.run()


def test_how_training_goes_is_told_only_if_the_policy_allows(tmp_path):
    hospitals = Hospitals(tmp_path)
    silent = hospitals.post.offices["site 1"]
    silent.policy = {action: entries for action, entries in silent.policy.items() if action != "progress"}
    for event in events(hospitals.run(), "round"):
        assert event["missing"] == {} and "loss" not in event["sites"]["site 1"] and "loss" in event["sites"]["site 2"]


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
    assert length_of_update(updates, {"model": {"w": torch.zeros(2)}}) == pytest.approx(2**0.5)


@pytest.mark.parametrize("keep", [False, True])
def test_hospitals_updates_leave_the_servers_disk_with_the_end_of_the_run_unless_they_are_to_stay(tmp_path, keep):
    updates: list[bytes] = []

    class Notes(Postbox):
        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            if parcel.header["action"] == "train":
                updates.extend(t.numpy().tobytes() for t in reply.tensors.values() if t.numel() > 100)
            return reply

    folder = Hospitals(tmp_path, "fedavg", post=Notes).run(keep_updates=keep)
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert updates and all((update in written) is keep for update in updates)


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


def test_a_site_that_also_measures_a_common_set_is_sent_the_model_once(tmp_path):
    drawn = ("data.partition='dirichlet_per_class'", "data.sites=2", "data.alpha=5.0")
    folder = Hospitals(tmp_path, "fedavg", *drawn).run()
    model = sum(t.numel() * t.element_size() for t in server_state(folder).values())
    first = events(folder, "round")[-1]["sites"]
    for facts in first.values():  # down: the model for training, which the evaluation before it had brought already
        assert facts["received"] < 1.5 * model


def test_a_message_that_is_sent_whole_again_counts_twice(tmp_path):
    class Restarts(Postbox):
        def carry(self, site, parcel):
            self.offices[site] = hospitals.office(site)
            return super().carry(site, parcel)

    hospitals = Hospitals(tmp_path, "fediic", "evaluation.every=2", post=Restarts)
    folder = hospitals.run()
    model = sum(t.numel() * t.element_size() for t in server_state(folder).values())
    assert traffic(folder)[-1][1] > 2 * model  # a restarted site is sent the model for the survey and for training


def test_half_precision_keeps_counts_and_large_weights_exact():
    payload = {"model": {"w": torch.tensor([0.1]), "v": torch.tensor([1e5])}, "class_count": torch.tensor([70_001.0])}
    opened, _ = open_parcel(seal(prepare(payload, half=True)))
    assert opened["class_count"] == 70_001 and opened["model"]["v"] == 1e5
    assert opened["model"]["w"] == torch.tensor([0.1]).half().float()


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
