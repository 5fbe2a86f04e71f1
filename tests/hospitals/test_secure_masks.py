"""Secure sums between hospitals: the bits of the simulation, and what neither the server nor a site can see or undo."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from equipoise.contract.protocol import SiteFailure
from equipoise.core.errors import UserError
from equipoise.hospitals.deployment_files import SiteFile
from equipoise.hospitals.pairwise_masks import (
    mask,
    new_key,
    opened,
    own_mask,
    pair_mask,
    public_half,
    sealed,
    secret_of,
    shares_of,
    threshold,
)
from equipoise.hospitals.parcels import Parcel, open_parcel, prepare, seal
from equipoise.hospitals.pilot import lay_out
from equipoise.hospitals.security import signed_by
from equipoise.hospitals.site import identity_of
from equipoise.hospitals.sum_desk import KEYS, OPEN, SUM_ACTIONS, Identity, RefusedSum, SumDesk
from harness import assert_same_bits, events, run_tiny, server_state, tiny_config, with_lost_site
from postbox import Hospitals, Postbox

SECURE = ("privacy.secure_sums=true", "data.phantom.sites=4", "data.phantom.images=200")
SIGNED = ec.ECDSA(hashes.SHA256())


# ---- the arithmetic ---------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(3, 9), st.data())
def test_enough_shares_give_the_secret_back_and_fewer_give_another(secret, sites, data):
    least = threshold(sites)
    shares = dict(enumerate(shares_of(secret, least, sites)))
    chosen = data.draw(st.permutations(range(sites)))[:least]
    assert secret_of({place: shares[place] for place in chosen}) == secret
    with pytest.raises(ValueError, match="do not belong together"):
        secret_of({place: shares[place] for place in chosen[1:]})


def test_the_masks_of_a_pair_cancel_and_differ_from_sum_to_sum():
    a, b = new_key(), new_key()
    one = pair_mask(a, public_half(b), "a", "b", "1", 1000)
    assert not (one + pair_mask(b, public_half(a), "b", "a", "1", 1000)).any()
    assert not torch.equal(one, pair_mask(a, public_half(b), "a", "b", "2", 1000))
    assert abs(float((one < 0).double().mean()) - 0.5) < 0.1 and len(one.unique()) == 1000
    assert not torch.equal(own_mask(a, "1", 9), own_mask(b, "1", 9))


def test_a_mask_is_the_published_key_stream_of_chacha20():
    """RFC 8439, test vector 1 of appendix A.1: a key and a nonce of zeros."""
    assert mask(bytes(32), 2).numpy().tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_what_a_site_seals_for_another_nobody_else_reads():
    a, b, other = new_key(), new_key(), new_key()
    text = sealed(a, public_half(b), "a", "b", "1", b"share")
    assert opened(b, public_half(a), "a", "b", "1", text) == b"share"
    for key, *way in ((other, "a", "b", "1"), (b, "b", "a", "1"), (b, "a", "b", "2")):
        with pytest.raises(InvalidTag):
            opened(key, public_half(a), *way, text)


# ---- a site -----------------------------------------------------------------------------------------------------


class Consortium:
    """Sites with keys that know each other."""

    def __init__(self, folder, *sites: str):
        keys = {site: ec.generate_private_key(ec.SECP384R1()) for site in sites}
        self.desks = {
            site: SumDesk(
                site,
                folder / site,
                "run",
                Identity(
                    False,
                    lambda text, own=own: own.sign(text, SIGNED),
                    lambda other: [keys[other].public_key()] if other in keys else [],
                ),
            )
            for site, own in keys.items()
        }

    def upto_shares(self, number: str = "1"):
        keys = {site: desk.keys(number) for site, desk in self.desks.items()}
        shares = {site: desk.shares(number, keys) for site, desk in self.desks.items()}
        return keys, {site: {other: shares[other][site] for other in shares if other != site} for site in shares}


def test_a_mask_is_never_used_twice(tmp_path):
    sites = Consortium(tmp_path, "a", "b", "c")
    keys, shares = sites.upto_shares()
    desk, vector = sites.desks["a"], torch.arange(5)
    assert not torch.equal(desk.masked("1", "question", shares["a"], vector), vector)
    for question in ("question", "another"):
        with pytest.raises(RefusedSum, match="masks of this sum were used"):
            desk.masked("1", question, shares["a"], vector)
    with pytest.raises(RefusedSum, match="other keys for this sum"):
        desk.shares("1", {**keys, "b": keys["c"]})
    assert (
        desk.keys("1") == {**keys["a"], "signature": desk.keys("1")["signature"]}
        or desk.keys("1")["mask"] == keys["a"]["mask"]
    )


def test_a_sum_is_opened_for_one_set_of_sites_alone(tmp_path):
    sites = Consortium(tmp_path, "a", "b", "c", "d")
    _, shares = sites.upto_shares()
    desk = sites.desks["a"]
    desk.masked("1", "question", shares["a"], torch.arange(5))
    first = desk.open("1", ["a", "b", "c"])
    assert desk.open("1", ["c", "b", "a"]) == first
    for wrong in (["a", "b", "c", "d"], ["a", "b"], ["b", "c", "d"], ["a", "b", "x"]):
        with pytest.raises(RefusedSum):
            desk.open("1", wrong)


def test_equal_numbers_are_added_up_over_one_set_of_sites_alone(tmp_path):
    """The difference of two sums would show what the site sent that is in one of them."""
    sites = Consortium(tmp_path, "a", "b", "c", "d")
    desk = sites.desks["a"]
    for number, work in (("1", "round 1"), ("2", "round 1"), ("3", "round 2")):
        _, shares = sites.upto_shares(number)
        desk.masked(number, "question", shares["a"], torch.arange(5), work)
    assert desk.open("1", ["a", "b", "c", "d"])
    with pytest.raises(RefusedSum, match="added up over a, b, c, d before"):
        desk.open("2", ["a", "b", "c"])
    assert desk.open("3", ["a", "b", "c"])


def test_a_site_takes_no_part_with_sites_that_it_does_not_know(tmp_path):
    sites, strangers = Consortium(tmp_path, "a", "b", "c"), Consortium(tmp_path / "strangers", "b", "x", "y")
    keys = {site: desk.keys("1") for site, desk in sites.desks.items()}
    desk = sites.desks["a"]
    with pytest.raises(RefusedSum, match="has no public key of 'x'"):
        desk.shares("1", {"a": keys["a"], "b": keys["b"], "x": strangers.desks["x"].keys("1")})
    with pytest.raises(RefusedSum, match="'b' did not sign"):
        desk.shares("1", {**keys, "b": strangers.desks["b"].keys("1")})
    with pytest.raises(RefusedSum, match="'b' did not sign"):
        desk.shares("1", {**keys, "b": sites.desks["b"].keys("2")})
    with pytest.raises(RefusedSum, match="needs 3 sites"):
        desk.shares("1", {site: keys[site] for site in ("a", "b")})


# ---- runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fediic", "creff"])
def test_simulation_and_hospitals_give_the_same_bits_and_scores(tmp_path, method):
    little = tiny_config(method).methods.get("creff") and ("creff.feature_steps=3", "creff.classifier_epochs=3")
    here = run_tiny(tmp_path / "here", method, *SECURE, *(little or ()))
    there = Hospitals(tmp_path, method, *SECURE, *(little or ())).run()
    assert_same_bits(server_state(here), server_state(there))
    for kind in ("evaluation", "selection"):
        assert events(here, kind) == events(there, kind)
    assert not [event["missing"] for event in events(there, "round") if event["missing"]]


def test_the_server_sees_no_number_of_a_single_site(tmp_path):
    replies: list[tuple[str, Parcel]] = []

    class Sees(Postbox):
        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            replies.append((parcel.header["action"], reply))
            return reply

    Hospitals(tmp_path, "fediic", *SECURE, post=Sees).run()
    vectors = []
    for action, reply in replies:
        payload, _ = open_parcel(reply)
        if action in SUM_ACTIONS:
            assert not payload
        elif action not in ("describe", "publish"):
            assert payload.keys() == {"masked", "columns"} and not reply.header["measures"]
            assert set(reply.header["facts"]) <= {"seconds"}
            vectors.append(payload["masked"])
    assert {action for action, _ in replies} >= {"survey", "train", "evaluate", *SUM_ACTIONS}
    bits = torch.cat([(vector >> 40) & 1 for vector in vectors]).double().mean()
    assert abs(float(bits) - 0.5) < 0.02, "masked numbers are as good as random"


def test_a_lost_site_is_taken_out_of_the_sum(tmp_path):
    class Loses(Postbox):
        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            header = parcel.header
            lost = site == "site 2" and header["action"] == "train" and header["round"] == 1
            return SiteFailure("lost") if lost else reply

    apart = Hospitals(tmp_path, "fedavg", *SECURE, post=Loses).run()
    local = run_tiny(tmp_path / "local", with_lost_site("fedavg"), *SECURE)
    assert_same_bits(server_state(local), server_state(apart))
    assert [list(event["missing"]) for event in events(apart, "round")] == [["site 2"], []]


def test_with_three_sites_a_lost_one_repeats_the_round_with_new_keys(tmp_path):
    class Loses(Postbox):
        lost = 0

        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            if site == "site 2" and parcel.header["action"] == "train" and not Loses.lost:
                Loses.lost += 1
                return SiteFailure("lost")
            return reply

    three = ("privacy.secure_sums=true",)
    apart = Hospitals(tmp_path, "fedavg", *three, post=Loses).run()
    assert_same_bits(server_state(run_tiny(tmp_path / "local", "fedavg", *three)), server_state(apart))
    assert any("round 1 is repeated" in event["text"] for event in events(apart, "warning"))


def test_a_site_whose_numbers_do_not_fit_is_left_out_by_name(tmp_path):
    class Opens(Postbox):
        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            if site == "site 3" and parcel.header["action"] == "train" and "error" not in reply.header:
                payload, _ = open_parcel(reply)
                fields = {name: reply.header[name] for name in ("identity", "kept", "measures", "facts")}
                return seal(prepare({**payload, "masked": payload["masked"][:-1]}), **fields)
            return reply

    folder = Hospitals(tmp_path, "fedavg", *SECURE, post=Opens).run()
    for event in events(folder, "round"):
        assert event["missing"] == {"site 3": "its part of the secure sum is none"}


def test_a_site_sends_nothing_without_masks(tmp_path):
    class Forgets(Postbox):
        def carry(self, site, parcel):
            header = parcel.header
            if site == "site 2" and header["action"] == "train":
                header.pop("sum")
                parcel = Parcel(json.dumps(header), parcel.tensors)
            return super().carry(site, parcel)

    folder = Hospitals(tmp_path, "fedavg", *SECURE, post=Forgets).run()
    assert all("only under masks" in event["missing"]["site 2"] for event in events(folder, "round"))


def test_a_site_measures_its_own_images_under_no_other_name(tmp_path):
    """A message to another place has no masks."""
    hospitals = Hospitals(tmp_path, "fedavg", *SECURE)
    hospitals.run()
    site, header = next((s, h) for s, h in hospitals.post.carried if h["action"] == "evaluate")
    told = {**header, "site": "common", "data": site, "entries": {}, "plain": {}}
    reply = hospitals.post.offices[site].answer(Parcel(json.dumps({n: v for n, v in told.items() if n != "sum"})))
    assert "own images" in reply.header["error"]


def test_a_site_may_take_part_in_runs_with_secure_sums_alone(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg")
    hospitals.post.offices["site 2"].identity = Identity(alone=True)
    for event in events(hospitals.run(), "round"):
        assert event["missing"] == {"site 2": "this site refuses runs without privacy.secure_sums = true"}


def test_two_sites_are_refused(tmp_path):
    with pytest.raises(UserError, match="with two, each could"):
        Hospitals(tmp_path, "fedavg", "privacy.secure_sums=true", "data.phantom.sites=2").run()


def test_a_run_goes_on_with_the_same_bits_and_new_keys(tmp_path):
    straight = Hospitals(tmp_path / "straight", "scaffold", *SECURE).run()
    halted = Hospitals(tmp_path / "halted", "scaffold", *SECURE, "train.rounds=1")
    halted.run()
    again = Hospitals(tmp_path / "halted", "scaffold", *SECURE)
    folder = again.run(resume=True)
    assert_same_bits(server_state(straight), server_state(folder))
    headers = [header for _, header in (*halted.post.carried, *again.post.carried)]
    numbers = [header["sum"]["number"] for header in headers if header["action"] == KEYS]
    assert len(set(numbers)) * 4 == len(numbers)
    assert not list((folder / "journal").glob("*")), "no reply lies on the server's disk"


def test_a_site_finds_its_peers_keys_in_a_folder_and_knows_no_others(tmp_path):
    _, files = lay_out(tmp_path / "pilot", tiny_config("fedavg"))
    known = SiteFile.read(files["site 1"])
    identity = identity_of(known, insecure=False)
    assert [len(identity.peers(site)) for site in ("site 2", "site 3", "site 1", "stranger")] == [1, 1, 0, 0]
    other = SiteFile.read(files["site 2"])
    signature = identity_of(other, insecure=False).sign(b"text")
    assert signed_by(identity.peers("site 2")[0], signature, b"text")
    assert not signed_by(identity.peers("site 3")[0], signature, b"text")
    assert identity_of(known, insecure=True).sign is None


def test_a_resumed_run_shows_no_difference_of_two_sums(tmp_path):
    """The server died after it had opened a sum over four sites. It goes on without one of them, and then with it."""

    class Dies(Postbox):
        opened = 0

        def carry(self, site, parcel):
            reply = super().carry(site, parcel)
            Dies.opened += parcel.header["action"] == OPEN
            if Dies.opened == 8:  # four about the first model, four about the training
                raise ConnectionAbortedError
            return reply

    class Away(Postbox):
        def carry(self, site, parcel):
            return SiteFailure("away") if site == "site 2" else super().carry(site, parcel)

    with pytest.raises(ConnectionAbortedError):
        Hospitals(tmp_path, "fedavg", *SECURE, post=Dies).run()
    with pytest.raises(UserError, match="added up over site 1, site 2, site 3, site 4 before"):
        Hospitals(tmp_path, "fedavg", *SECURE, post=Away).run(resume=True)
    folder = Hospitals(tmp_path, "fedavg", *SECURE).run(resume=True)
    assert_same_bits(server_state(run_tiny(tmp_path / "local", "fedavg", *SECURE)), server_state(folder))
