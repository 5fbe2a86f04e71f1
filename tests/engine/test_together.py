"""Small sites are measured in batches of several sites' images, and every score is the same to the bit."""

from __future__ import annotations

import pytest

from equipoise.engine import local_engine as local
from equipoise.engine import together
from equipoise.engine.training import observed
from harness import events, run_tiny, with_client

#: sites with no, one and several images in the parts that are measured
MANY = (
    "data.phantom.sites=12",
    "data.phantom.images=200",
    "evaluation.batch_size=16",
    "train.epochs=1",
    "train.steps=1",
    "train.participation=0.2",
    "evaluation.rule='mean_last'",
)
WORKERS = (1, pytest.param(2, marks=pytest.mark.slow))


def scores(folder):
    return [e for kind in ("evaluation", "final") for e in events(folder, kind)]


def one_by_one(monkeypatch):
    """Every request alone, as they were before."""
    monkeypatch.setattr(local, "groups", lambda requests, *_: [[place] for place in range(len(requests))])


@pytest.fixture
def joint(monkeypatch):
    """The numbers of sites in the groups that were measured together."""
    sizes = []

    def counting(slot, requests, *rest):
        sizes.append(len(requests))
        return (yield from together.perform_together(slot, requests, *rest))

    monkeypatch.setattr(local, "perform_together", counting)
    return sizes


@pytest.mark.parametrize("workers", WORKERS)
def test_scores_are_those_of_sites_measured_one_by_one(tmp_path, monkeypatch, joint, workers):
    ours = run_tiny(tmp_path / "joint", "fedavg", *MANY, f"compute.workers={workers}")
    assert workers > 1 or (max(joint) > 2 and len(joint) > 3)
    one_by_one(monkeypatch)
    assert scores(run_tiny(tmp_path / "alone", "fedavg", *MANY)) == scores(ours)


def test_a_model_that_predicts_with_what_is_a_sites_own_is_measured_site_by_site(tmp_path, monkeypatch):
    def with_own_prior(client):
        class Prior(client):
            def predict(self, view, batch):
                return super().predict(view, batch) + self.class_counts

        return Prior

    method = with_client("fedavg", with_own_prior)
    ours = run_tiny(tmp_path / "joint", method, *MANY)
    one_by_one(monkeypatch)
    assert scores(run_tiny(tmp_path / "alone", method, *MANY)) == scores(ours)


def test_personal_models_are_measured_one_by_one(tmp_path, joint):
    run_tiny(tmp_path, "fedbn", *MANY)
    assert joint == []


def test_a_group_holds_no_more_images_than_a_batch(tmp_path, monkeypatch):
    seen = []

    def noting(client, part, *rest):
        seen.append(len(part))
        return observed(client, part, *rest)

    monkeypatch.setattr(together, "observed", noting)
    run_tiny(tmp_path, "fedavg", *MANY)
    assert max(seen) <= 16 and min(seen) == 1
