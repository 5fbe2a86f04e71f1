"""Secure sums in the simulation: the server sees sums alone, and they equal plain ones within the stated error."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.components._merging import average, average_by, mean_by_class, total
from equipoise.contract.protocol import Replies, Reply, SingleReplies, Sums
from equipoise.contract.summed import added, averaged, averaged_by_class, terms_of, whole_of
from equipoise.core.errors import UserError
from equipoise.engine.loop import Run
from equipoise.engine.summing import ALL_SITES
from equipoise.methods import get_method, method_names
from equipoise.sums import (
    PLAIN_BITS,
    TooLarge,
    decoded,
    encoded,
    largest_error,
    layout_of,
    layout_text,
    read_layout,
    sum_of,
    term,
)
from harness import (
    all_state,
    assert_same_bits,
    events,
    run_tiny,
    server_state,
    tiny_config,
    tiny_federation,
    with_client,
)

SECURE = "privacy.secure_sums=true"
SHEET = {
    "model": averaged("weights"),
    "examples": added("number of images"),
    "class_counts": added("number of images of each class"),
    "prototypes": averaged_by_class("mean feature of each class"),
    "gradients": averaged_by_class("mean gradient of each class", weighting="uniform"),
}
#: methods whose server reads what each site sent, and the one that pools images; a new method may be another
SINGLE = {"prr", "ida", "climb", "central"}


def adds_up(method: str) -> bool:
    """Whether secure sums take a method."""
    try:
        tiny_config(method, SECURE)
    except UserError as refused:
        assert method in str(refused) and "privacy.secure_sums = false" in str(refused)
        return False
    return True


def reply(seed: int, size: int = 5) -> dict:
    """What a site with this seed sends."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 9, (size,), generator=draw).float()
    counts[seed % size] = 0
    return {
        "model": {"weight": torch.randn(4, 3, generator=draw), "seen": torch.tensor(10 * seed + 3)},
        "examples": int(counts.sum()),
        "class_counts": counts,
        "prototypes": torch.randn(size, 6, generator=draw),
        "gradients": torch.randn(size, 2, 3, generator=draw),
    }


def summed(replies: list[dict], weighting: str) -> Sums:
    """The sum of some replies, as an engine makes it."""
    terms = [terms_of(one, SHEET, weighting) for one in replies]
    layout = read_layout(layout_text(layout_of(terms[0])))
    sums = decoded(sum_of([encoded(one, len(replies)) for one in terms]), layout)
    whole = whole_of(sums, layout, SHEET, weighting, len(replies), torch.device("cpu"))
    return Sums(whole, [f"site {number}" for number in range(len(replies))])


@pytest.mark.parametrize("weighting", ["size", "uniform"])
@pytest.mark.parametrize("sites", [3, 8])
def test_sums_equal_what_the_server_makes_of_single_replies(weighting, sites):
    sent = [reply(seed) for seed in range(1, sites + 1)]
    plain, secure = Replies([Reply(str(i), one) for i, one in enumerate(sent)]), summed(sent, weighting)
    assert len(secure) == sites
    for name, value in average(plain, "model", weighting).items():
        torch.testing.assert_close(average(secure, "model", weighting)[name], value, rtol=1e-6, atol=1e-7)
    assert torch.equal(total(secure, "class_counts"), total(plain, "class_counts"))
    for entry, kind in (("prototypes", weighting), ("gradients", "uniform")):
        ours, known = mean_by_class(secure, entry, kind)
        theirs, there = mean_by_class(plain, entry, kind)
        assert torch.equal(known, there)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=12),
    st.lists(st.integers(1, 10_000), min_size=12, max_size=12),
)
def test_a_mean_lies_within_the_stated_error(values, weights):
    weights = weights[: len(values)]
    vectors = [encoded({"x": term(torch.tensor(v), w)}, len(values)) for v, w in zip(values, weights)]
    layout = layout_of({"x": term(torch.tensor(values[0]), weights[0])})
    found = decoded(sum_of(vectors), layout)["x"].item() / sum(weights)
    exact = sum(v * w for v, w in zip(values, weights)) / sum(weights)
    assert abs(found - exact) <= largest_error(len(values), sum(weights)) + 1e-12 * abs(exact)


def test_a_number_that_does_not_fit_is_refused_and_never_wraps_round():
    for value in (float("nan"), float("inf"), 2.0**31):
        with pytest.raises(TooLarge, match="'x'"):
            encoded({"x": term(torch.tensor(value, dtype=torch.float64))}, 3)
    near = torch.tensor(2.0 ** (62 - PLAIN_BITS) / 3, dtype=torch.float64)
    vectors = [encoded({"x": term(near)}, 3)] * 3
    assert decoded(sum_of(vectors), layout_of({"x": term(near)}))["x"].item() == pytest.approx(3 * near.item())


def test_a_server_that_reads_single_replies_meets_a_refusal_in_words():
    secure = summed([reply(seed) for seed in (1, 2, 3)], "size")
    for read in (lambda: secure[0], lambda: list(secure), lambda: secure.values("model")):
        with pytest.raises(SingleReplies, match=r"privacy\.secure_sums = false"):
            read()
    with pytest.raises(SingleReplies):
        average_by([1.0, 1.0, 1.0], secure)


@pytest.mark.parametrize("method", sorted(SINGLE))
def test_a_method_that_needs_single_replies_is_refused_by_name(method):
    with pytest.raises(UserError, match=rf"(?s){method}.*privacy.secure_sums = false"):
        tiny_config(method, SECURE)


def test_settings_that_need_single_scores_are_refused():
    for setting, named in (
        ("evaluation.select='site'", "evaluation.select"),
        ("evaluation.metric='balanced_auc'", "balanced_auc"),
    ):
        with pytest.raises(UserError, match=named):
            tiny_config("fedavg", SECURE, setting)


def test_an_entry_without_a_mark_is_refused_by_its_name(tmp_path):
    def tells_more(client):
        sheet = {"train": {**client.discloses["train"], "secret": "something of one site"}}
        return type("Tells", (client,), {"discloses": sheet})

    changed = with_client("fedavg", tells_more)
    object.__setattr__(changed, "client", tells_more(changed.client))
    with pytest.raises(UserError, match="'secret' of 'train'"):
        changed.components_of(tiny_config("fedavg", SECURE))


def test_two_sites_are_refused_before_anything_is_written(tmp_path):
    config = tiny_config("fedavg", SECURE, "data.phantom.sites=2")
    with pytest.raises(UserError, match="with two, each could"):
        Run(config, get_method("fedavg"), tiny_federation(config), tmp_path / "run").execute()
    assert not (tmp_path / "run" / "events.jsonl").exists()


LITTLE = ("train.rounds=1", "data.phantom.images=120", "train.batch_size=16")


@pytest.mark.parametrize("method", method_names())
def test_weights_equal_plain_averaging_within_the_stated_error(tmp_path, method):
    """Up to the rounding of float32 sums, which plain averaging has too."""
    if not adds_up(method):
        return
    options = get_method(method).options
    settings = (*LITTLE, *options.at_little_cost)
    plain = server_state(run_tiny(tmp_path / "plain", method, *settings))
    secure = server_state(run_tiny(tmp_path / "secure", method, *settings, SECURE))
    assert plain.keys() == secure.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(secure[name], tensor, rtol=2e-6, atol=1e-6, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize("added", ["control-variates", "retrained-head", "mean-model,local-norm", "margins,projector"])
def test_components_get_sums_under_their_own_names(tmp_path, added):
    names = ",".join(f"'{name}'" for name in added.split(","))
    settings = (
        *LITTLE,
        f"components=[{names}]",
        "retrained-head.feature_steps=3",
        "retrained-head.classifier_epochs=2",
    )
    settings = settings if "retrained" in added else settings[:-2]
    plain = server_state(run_tiny(tmp_path / "plain", "fedavg", *settings))
    secure = server_state(run_tiny(tmp_path / "secure", "fedavg", *settings, SECURE))
    for name, tensor in plain.items():
        torch.testing.assert_close(secure[name], tensor, rtol=1e-5, atol=2e-6, msg=partial("{}: {}".format, name))


def test_the_log_holds_scores_of_all_sites_together_and_no_loss_of_one(tmp_path):
    plain, secure = run_tiny(tmp_path / "plain"), run_tiny(tmp_path / "secure", "fedavg", SECURE)
    for event in events(secure, "evaluation"):
        assert event["site"] == ALL_SITES
    assert {event["site"] for event in events(secure, "final")} <= {ALL_SITES, None}
    for event in events(secure, "round"):
        assert all("loss" not in facts and "examples" not in facts for facts in event["sites"].values())
    chosen = [
        next(e for e in events(run, "final") if e["scope"] == "pooled" and e["view"] == "global")
        for run in (plain, secure)
    ]
    assert chosen[0]["confusion"] == chosen[1]["confusion"]
    assert chosen[1]["metrics"]["balanced_accuracy"] == chosen[0]["metrics"]["balanced_accuracy"]
    assert not list(secure.glob("predictions*")), "scores of single images were kept"


def test_resume_gives_the_same_bits(tmp_path):
    straight = run_tiny(tmp_path / "straight", "fediic", SECURE, "train.rounds=2")
    run_tiny(tmp_path / "halted", "fediic", SECURE, "train.rounds=1")
    run_tiny(tmp_path / "halted", "fediic", SECURE, "train.rounds=2", resume=True)
    assert_same_bits(all_state(straight), all_state(tmp_path / "halted"))


@pytest.mark.slow
def test_workers_change_no_bit(tmp_path):
    one = run_tiny(tmp_path / "one", "fedavg", SECURE, "train.rounds=1")
    two = run_tiny(tmp_path / "two", "fedavg", SECURE, "train.rounds=1", "compute.workers=2")
    assert_same_bits(all_state(one), all_state(two))
    assert events(one, "evaluation") == events(two, "evaluation")


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_site_with_numbers_that_cannot_be_added_is_left_out_by_name(tmp_path, value):
    def breaks(client):
        class Broken(client):
            def update(self):
                found = super().update()
                if self.workplace.site == "site 2":
                    first = next(iter(found["model"]))
                    found["model"] = {**found["model"], first: torch.full_like(found["model"][first], value)}
                return found

        return Broken

    method = with_client("fedavg", breaks)
    folder = run_tiny(tmp_path / "run", method, SECURE, "train.rounds=1", "data.phantom.sites=4")
    (told,) = events(folder, "round")
    assert set(told["missing"]) == {"site 2"}
    assert all(torch.isfinite(tensor).all() for tensor in server_state(folder).values() if tensor.is_floating_point())


def straying(site: str, factor: float):
    """FedAvg with a site that sends the multiple of its weights."""

    def breaks(client):
        class Straying(client):
            def update(self):
                found = super().update()
                if self.workplace.site == site:
                    found["model"] = {
                        name: tensor * factor if tensor.is_floating_point() else tensor
                        for name, tensor in found["model"].items()
                    }
                return found

        return Straying

    return with_client("fedavg", breaks)


def test_a_site_checks_the_length_of_its_own_update(tmp_path):
    """The server sees no single update, so that it cannot compare them."""
    common = (SECURE, "train.rounds=1", "data.phantom.sites=4")
    usual = run_tiny(tmp_path / "usual", straying("site 2", 8.0), *common)
    assert not events(usual, "round")[0]["missing"]
    folder = run_tiny(tmp_path / "long", straying("site 2", 20.0), *common)
    assert "privacy.update_bound = 10" in events(folder, "round")[0]["missing"]["site 2"]
    wide = run_tiny(tmp_path / "wide", straying("site 2", 20.0), *common, "privacy.update_bound=30")
    assert not events(wide, "round")[0]["missing"]


def test_with_two_answers_of_three_nothing_is_opened(tmp_path):
    def breaks(client):
        class Broken(client):
            def update(self):
                found = super().update()
                return {**found, "examples": float("nan")} if self.workplace.site == "site 2" else found

        return Broken

    with pytest.raises(UserError, match="round 1 failed"):
        run_tiny(tmp_path / "run", with_client("fedavg", breaks), SECURE, "train.rounds=1")
