"""A hospital keeps its own predictions: nothing of them leaves, and its intervals can be had at the site."""

import numpy as np
import pytest

import equipoise as eq
from equipoise.engine.image_scores import hashed_names
from equipoise.evidence.recomputed import read_predictions
from harness import events, run_tiny
from postbox import Hospitals


@pytest.mark.parametrize("method", ["fedavg", "fedbn"])
def test_a_site_has_predictions_of_its_own_images_and_the_server_none(tmp_path, method):
    hospitals = Hospitals(tmp_path, method)
    folder = hospitals.run()
    assert not (folder / "predictions.npz").exists()
    for site in hospitals.federation.training_sites():
        own = read_predictions(hospitals.records(site.name) / "test")
        assert set(own.columns["site"]) == {site.name} and set(own.columns["split"]) == {"valid", "test"}
        assert (own.columns["split"] == "test").sum() == len(site.splits["test"])


def test_a_sites_scores_are_those_that_the_server_was_told(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg")
    folder = hospitals.run()
    for event in (e for e in events(folder, "final") if e["scope"] == "site"):
        at_site = eq.Result(hospitals.records(event["site"]) / "test").evaluate(split="test", interval=True)
        own = at_site[at_site["scope"] == "site"].iloc[0]
        assert own["balanced_accuracy"] == event["metrics"]["balanced_accuracy"]
        assert own["low(accuracy)"] <= event["metrics"]["accuracy"] <= own["high(accuracy)"]


def test_results_are_the_same_as_on_one_machine(tmp_path):
    there = Hospitals(tmp_path / "there", "fedavg").run()
    here = run_tiny(tmp_path / "here", "fedavg")
    scores = [[e["metrics"] for e in events(run, "final") if e["scope"] == "site"] for run in (there, here)]
    assert scores[0] == scores[1]


def test_no_reply_holds_a_single_prediction(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg")
    replies = []
    office = hospitals.post.offices["site 1"]
    answer = office.answer
    office.answer = lambda parcel: replies.append(answer(parcel)) or replies[-1]  # type: ignore[method-assign]
    hospitals.run()
    assert replies and not any(
        word in reply.text for reply in replies for word in ('"scores"', '"predictions"', '"labels"')
    )
    assert np.all([not {"scores", "labels"} & set(reply.tensors) for reply in replies])


def test_predictions_belong_to_their_images_where_classes_of_few_images_are_left_out(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", "privacy.least=2")
    hospitals.run()
    left_out = 0
    for site in hospitals.federation.training_sites():
        split = site.splits["test"]
        told = split.class_counts(len(hospitals.federation.classes))[split.labels] >= 2
        left_out += int(told.any() and not told.all())
        own = read_predictions(hospitals.records(site.name) / "test")
        own = own.where(own.columns["split"] == "test")
        labels = dict(zip(hashed_names(split)[0].tolist(), split.labels.tolist()))
        assert own.columns["label"].tolist() == [labels[image] for image in own.columns["image"].tolist()]
        assert len(own) == told.sum() == len(own.columns["group"])
    assert left_out, "a site has classes of both kinds"
