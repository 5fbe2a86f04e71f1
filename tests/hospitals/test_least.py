"""`privacy.least`: no number that leaves a site is of 1 to least - 1 images, for every method and alike everywhere."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr")

from equipoise import metrics
from equipoise.checks.limits import FEW, TAIL, small_numbers
from equipoise.components import component_names, get_component
from equipoise.contract.disclosed import Entry, held_back, shown
from equipoise.core.errors import UserError
from equipoise.engine.loop import Run
from equipoise.engine.slot import Slot
from equipoise.hospitals.coordinator import with_least
from equipoise.hospitals.deployment_files import LEAST
from equipoise.hospitals.descriptions import describe
from equipoise.hospitals.exchange import FlowerOptions
from equipoise.mask_metrics import CASE
from equipoise.methods import get_method, method_names
from equipoise.tasks.classification import Classification
from equipoise.tasks.segmentation import Segmentation
from equipoise.tasks.small_counts import merged_bins, merged_cells
from harness import assert_same_bits, events, run_tiny, server_state, tiny_config, tiny_federation
from postbox import Hospitals

SHORT = (*TAIL, "train.rounds=2", f"privacy.least={FEW}")


def test_class_rows_below_the_limit_leave_as_zeros():
    counts = torch.tensor([0.0, 1.0, 4.0, 5.0, 90.0])
    sheet = {
        "prototypes": Entry("means"),
        "present": Entry("which classes"),
        "class_counts": Entry("counts", "counts"),
        "examples": Entry("images", "images"),
        "loss": Entry("summed loss", "total"),
        "model": "weights",
    }
    reply = {
        "prototypes": torch.ones(5, 3),
        "present": counts > 0,
        "class_counts": counts,
        "examples": 100,
        "loss": 50.0,
        "model": {"head.weight": torch.ones(5, 3)},
    }
    told = held_back(reply, sheet, counts, FEW)
    assert told["prototypes"].sum(1).tolist() == [0, 0, 0, 3, 3]
    assert told["present"].tolist() == [False, False, False, True, True]
    assert told["class_counts"].tolist() == shown(counts, FEW).tolist() == [0, 0, 0, 5, 90]
    assert told["examples"] == 95 and told["loss"] == pytest.approx(47.5)
    assert told["model"] is reply["model"], "weights are no entry of a class"
    assert held_back(reply, sheet, counts, 0) is reply


@pytest.mark.parametrize(("share", "told"), [(0.0, 0), (0.03, 0), (0.05, 0.05), (0.96, 1), (0.95, 0.95), (1.0, 1)])
def test_a_share_of_few_images_is_none_or_all(share, told):
    sheet = {"accuracy": Entry("accuracy", "share")}
    assert held_back({"accuracy": share}, sheet, torch.tensor([40.0, 60.0]), FEW)["accuracy"] == told


@given(st.lists(st.lists(st.integers(0, 12), min_size=4, max_size=4), min_size=4, max_size=4), st.integers(2, 9))
def test_confusion_cells_are_none_or_enough_and_rows_keep_their_sums(cells, least):
    confusion = torch.tensor(cells)
    confusion[confusion.sum(1) < least] = 0
    found = merged_cells(confusion.numpy(), least)
    assert (found.sum(1) == confusion.numpy().sum(1)).all()
    assert not ((found > 0) & (found < least)).any()


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=15, max_size=15), st.integers(2, 9))
def test_calibration_bins_are_of_none_or_enough_images_right_ones_and_wrong_ones(drawn, least):
    images = torch.tensor([float(n) for n, _ in drawn])
    right = (images * torch.tensor([share for _, share in drawn])).round()
    confidence = images * (torch.arange(15) + 0.5) / 15
    bins = torch.stack([images, confidence, right]).double().numpy()
    if 0 < bins[0].sum() < least:
        return
    found = merged_bins(bins, least)
    assert found[0].sum() == bins[0].sum() and found[1].sum() == pytest.approx(bins[1].sum())
    for numbers in (found[0], found[2], found[0] - found[2]):
        assert not ((numbers > 0) & (numbers < least)).any()
    enough = merged_bins(found, least)
    assert (enough == found).all(), "what is enough stays"


def test_metrics_of_merged_counts_stay_near_and_leave_out_classes_of_few():
    draw = torch.Generator().manual_seed(2)
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate((300, 60, 12, 3))])
    logits = torch.randn(len(labels), 4, generator=draw) + 2 * torch.nn.functional.one_hot(labels, 4)
    task = Classification(("a", "b", "c", "d"))
    split = SimpleNamespace(labels=labels.numpy(), class_counts=lambda size: np.bincount(labels, minlength=size))
    told = torch.from_numpy(task.told(split, FEW))
    assert torch.equal(told, labels < 3)
    exact = metrics.measure({k: v.numpy() for k, v in task.measure(logits[told], labels[told]).items()})
    near = metrics.measure(
        {k: v.numpy() for k, v in task.merged(task.measure(logits[told], labels[told]), FEW).items()}
    )
    assert near["balanced_auc"] == exact["balanced_auc"] and near["loss"] == exact["loss"]
    assert abs(near["balanced_accuracy"] - exact["balanced_accuracy"]) < 0.12
    assert abs(near["ece"] - exact["ece"]) < 0.05


def test_structures_of_few_patients_count_as_if_nobody_had_them():
    task = Segmentation(("background", "lesion", "ulcer"))
    counts = {name: torch.ones_like(tensor) for name, tensor in task.template.items()}
    counts["volumes"] = torch.tensor([9, 5, 4])
    found = task.merged(counts, FEW)
    assert found["volumes"].tolist() == [9, 5, 0]
    assert all(found[name].tolist() == [1, 1, 0] for name in CASE)
    assert torch.equal(found["confusion"], counts["confusion"])


# ---- every method -----------------------------------------------------------------------------------------------


#: whole numbers that are of no images
NO_COUNTS = {"steps", "normalised-steps.steps", "loss"}


def assert_nothing_small(tmp_path, monkeypatch, method: str, *settings: str) -> None:
    """Run a method, and look at every reply, fact and count of every site."""
    config = tiny_config(method, *SHORT, *settings, *get_method(method).options.at_little_cost)
    federation = tiny_federation(config)
    counts = {site.name: torch.from_numpy(site.class_counts(len(federation.classes))) for site in federation.sites}
    few = {site: (own > 0) & (own < FEW) for site, own in counts.items()}
    assert any(own.any() for own in few.values()), "no class of few images: nothing would be shown"
    found, looked = [], set()
    perform = Slot.perform

    def watched(self, request, *rest):
        outcome = yield from perform(self, request, *rest)
        for entry, value in outcome.payload.items():
            looked.add(entry)
            if entry.rpartition(".")[2] not in NO_COUNTS:
                found.extend(f"{request.action}.{entry}: {what}" for what in small_numbers(value, few[request.site]))
        for place, measured in outcome.measures.items():
            bins, cells = measured["calibration"], measured["confusion"]
            for numbers in (bins[0], bins[2], bins[0] - bins[2], cells, cells.sum(1)):
                if bool(((numbers > 0) & (numbers < FEW)).any()):
                    found.append(f"{place}: {numbers.tolist()}")
            defined = measured["auc"] >= 0
            assert not bool((cells.sum(1)[defined] < FEW).any()) and "scores" not in measured
        if "examples" in outcome.facts:
            own, seen = counts[request.site], outcome.facts["examples"]
            few_there = bool(few[request.site].any())
            assert not few_there or seen % int(own.sum()), "the number of all images tells that of the few"
        return outcome

    monkeypatch.setattr(Slot, "perform", watched)
    Run(config, get_method(method), federation, tmp_path / "run").execute()
    assert not found, found
    sheet = get_method(method).client_class(config).discloses
    assert looked == {entry for entries in sheet.values() for entry in entries}
    log = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    for event in map(json.loads, log):
        for row in event.get("confusion") or ():
            assert event.get("rounds") or not any(0 < cell < FEW for cell in row)


@pytest.mark.parametrize("method", sorted(set(method_names()) - {"central"}))
def test_nothing_that_a_method_sends_is_of_few_images(tmp_path, monkeypatch, method):
    assert_nothing_small(tmp_path, monkeypatch, method)


TELLING = [name for name in component_names() if get_component(name)().discloses()]


@pytest.mark.parametrize("component", TELLING)
def test_nothing_that_a_component_sends_is_of_few_images(tmp_path, monkeypatch, component):
    needs = {"inter-contrast": "projector", "mean-model": "local-norm"}.get(component)
    names = [component, needs] if needs else [component]
    settings = [f"components={json.dumps(names)}", *get_component(component).at_little_cost]
    if component == "inverse-distance":
        settings.append("inverse-distance.accuracy=true")
    assert_nothing_small(tmp_path, monkeypatch, "fedavg", *settings)


def test_central_learning_is_refused_for_it_pools_all_images(tmp_path):
    config = tiny_config("central", *SHORT)
    with pytest.raises(UserError, match="central pools all images"):
        Run(config, get_method("central"), tiny_federation(config), tmp_path / "run").execute()


@pytest.mark.parametrize("method", ["fedavg", "fediic", "fednh", "fedproto"])
def test_simulation_and_hospitals_give_the_same_bits_and_scores(tmp_path, method):
    here = run_tiny(tmp_path / "here", method, *SHORT)
    hospitals = Hospitals(tmp_path, method, *SHORT)
    there = hospitals.run(FlowerOptions(norm_bound=1e9, loss_bound=1e9))
    assert_same_bits(server_state(here), server_state(there))
    for kind in ("evaluation", "selection"):
        assert events(here, kind) == events(there, kind)
    started = [events(folder, "start")[0]["sites"] for folder in (here, there)]
    assert started[0] == started[1]
    assert not [event["missing"] for event in events(there, "round") if event["missing"]]


# ---- hospitals --------------------------------------------------------------------------------------------------


def test_a_description_tells_of_no_few_images_nor_warnings_about_them():
    federation = tiny_federation(tiny_config("fedavg", *TAIL))
    object.__setattr__(federation, "warnings", ("3 images were left out", "lesions lie in 12 groups", "no class b"))
    told = describe(federation.sites[0].name, federation, FEW)
    assert told["warnings"] == ["lesions lie in 12 groups", "no class b"]
    exact = describe(federation.sites[0].name, federation)
    for part, numbers in exact["counts"].items():
        assert told["counts"][part] == [n if n >= FEW else 0 for n in numbers]


def test_a_site_refuses_a_run_that_would_tell_of_fewer_images(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", "privacy.least=3")
    for office in hospitals.post.offices.values():
        office.least = FEW
    with pytest.raises(UserError, match=r"reports no number below 5 images: set privacy\.least to 5"):
        hospitals.run()


def test_hospitals_hold_back_by_default_and_a_run_that_goes_on_keeps_its_limit(tmp_path):
    config = tiny_config("fedavg")
    assert config.privacy.least == 0
    assert with_least(config, tmp_path, resume=False).privacy.least == LEAST == 5
    assert with_least(tiny_config("fedavg", "privacy.least=0"), tmp_path, resume=False).privacy.least == 0
    assert with_least(tiny_config("fedavg", "privacy.secure_sums=true"), tmp_path, resume=False).privacy.least == 5
    older = run_tiny(tmp_path / "older", "fedavg", "train.rounds=1")
    assert with_least(config, older, resume=True).privacy.least == 0
    newer = run_tiny(tmp_path / "newer", "fedavg", "train.rounds=1", "privacy.least=7", *TAIL)
    assert with_least(config, newer, resume=True).privacy.least == 7


def test_runs_without_a_limit_have_the_bits_and_digests_of_before():
    assert tiny_config("fedavg").digest() == tiny_config("fedavg", "privacy.least=0").digest()
    assert tiny_config("fedavg").digest() != tiny_config("fedavg", "privacy.least=1").digest()
