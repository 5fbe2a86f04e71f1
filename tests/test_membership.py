"""LiRA and the numbers that an audit reports."""

import json

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from equipoise import Federation, train
from equipoise.core.errors import UserError
from equipoise.engine import auditing
from equipoise.engine.auditing import audit
from equipoise.membership import attacked, confidence, likelihood_ratios
from harness import run_tiny


def test_confidence_is_the_log_odds_of_the_label():
    found = confidence([[0.8, 0.2], [0.5, 0.5], [1.0, 0.0]], [0, 1, 1])
    assert found[:2] == pytest.approx([np.log(4), 0.0])
    assert np.isfinite(found).all() and found[2] < -20


@pytest.mark.parametrize("shadows", [8, 64])
def test_scores_are_log_ratios_of_normal_densities(shadows):
    """With few shadow models images share a variance, with many each has its own; here all variances are 1."""
    random = np.random.default_rng(0)
    inside = random.random((shadows, 4000)) < 0.5
    middle = random.normal(size=4000)
    values = middle + 2.0 * inside + random.normal(size=inside.shape)
    member = random.random(4000) < 0.5
    target = middle + 2.0 * member + random.normal(size=4000)
    scores = likelihood_ratios(target, values, inside)
    best = roc_auc_score(member, 2.0 * (target - middle - 1.0))
    assert best - 0.06 < attacked(scores, member, draws=20).auc[0] <= best + 0.01


def test_shadow_models_that_all_saw_the_same_are_refused():
    with pytest.raises(UserError, match="same images"):
        likelihood_ratios(np.zeros(3), np.zeros((4, 3)), np.ones((4, 3), dtype=bool))


def test_area_and_finds_are_exact_with_ties_and_intervals_hold_them():
    random = np.random.default_rng(1)
    member = random.random(500) < 0.4
    scores = np.round(random.normal(size=500) + member, 1)
    attack = attacked(scores, member)
    assert attack.auc[0] == pytest.approx(roc_auc_score(member, scores), abs=1e-12)
    assert attack.auc[1] < attack.auc[0] < attack.auc[2]
    allowed = max(t for t in range(int(0.01 * (~member).sum()) + 1))
    limit = np.sort(scores[~member])[::-1][allowed]
    assert attack.found[0] == pytest.approx((scores[member] > limit).mean())


def test_no_attack_is_worth_half_and_one_per_cent():
    random = np.random.default_rng(2)
    attack = attacked(random.normal(size=20_000), random.random(20_000) < 0.5, draws=200)
    assert attack.auc[1] < 0.5 < attack.auc[2] and attack.found[1] < 0.011 < 0.011 + attack.found[2]
    assert attacked(np.zeros(10), np.arange(10) < 5, draws=10).auc[0] == 0.5


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["local", pytest.param("fedavg", marks=pytest.mark.slow)])
def test_an_audit_finds_the_training_images_of_a_model_that_knows_them_by_heart(tmp_path, monkeypatch, method):
    """Labels are drawn by lot, so that a model can only learn its images by heart."""
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (160, 16, 16, 3), dtype=np.uint8)
    labels = (random.random(160) < 0.4).astype(int)
    fed = Federation.from_arrays(images, labels, ["A", "B"] * 80, classes=["often", "rare"])
    settings = {"augment.name": "none", "evaluation.rule": "last", "train.optimiser.name": "adam"}
    result = train(fed, method, rounds=3, epochs=7, batch_size=8, lr=0.003, out=tmp_path / "run", settings=settings)
    found = result.audit(shadows=6)
    assert list(zip(found["scope"], found["name"]))[1:] == [
        ("class", "rare"),
        ("class", "often"),
        ("site", "A"),
        ("site", "B"),
    ]  # the rarest class first
    assert found["auc_low"][0] > 0.6, found
    told = json.loads((tmp_path / "run" / "audit.json").read_text())
    assert told["shadows"] == 6 and told["view"] == ("global" if method == "fedavg" else "personal")


def test_an_audit_goes_on_where_it_was_stopped_and_repeats_itself(tmp_path, monkeypatch):
    run_tiny(tmp_path, "fedavg")
    whole = audit(tmp_path, 4)
    (tmp_path / "audit" / "shadow-1-3.npz").unlink()
    trained = []
    usual = auditing.Run.execute
    monkeypatch.setattr(auditing.Run, "execute", lambda run: (trained.append(run.folder.name), usual(run)))
    assert audit(tmp_path, 4) == whole
    assert trained == ["shadow-1-3"]


def test_too_few_shadow_runs_and_unfinished_runs_are_refused(tmp_path):
    run_tiny(tmp_path, "fedavg")
    with pytest.raises(UserError, match="shadow runs say little"):
        audit(tmp_path, 2)
    with pytest.raises(UserError, match="holds no run"):
        audit(tmp_path / "nothing", 4)
