"""Features of a run's images: those that the head gets, one model or each site's own, drawn on a page."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import equipoise as eq
from equipoise.cli.embed import embed
from equipoise.engine.runs import make_config, prepare_run
from equipoise.evidence.embedding import embedding_of, mapped, principal
from harness import TINY, run_tiny

ENCODER = f"{Path(__file__).parents[1] / 'tinyencoder.py'}:encoder"


@pytest.mark.parametrize("more", [(), (f"net.encoder='{ENCODER}'", "net.hidden=8")], ids=["images", "encoder"])
def test_the_head_makes_the_runs_predictions_of_the_features(tmp_path, monkeypatch, more):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    folder = tmp_path / "run"
    prepare_run(make_config(None, [*TINY, *more], method="fedavg"), folder).execute()
    found = embedding_of(folder)
    net = eq.load_result(folder).model()._client.net
    logits = net.head(torch.from_numpy(found.features)).softmax(1).detach().numpy()
    table = eq.load_result(folder).predictions()
    place = {image: row for row, image in enumerate(found.image)}
    again = logits[[place[image] for image in table["image"]]]
    assert again == pytest.approx(table.filter(like="p(").to_numpy(), abs=1e-4)
    assert set(found.split) == {"train", "valid", "test"} and not found.personal


def test_without_a_global_model_each_sites_own_gives_features(tmp_path):
    found = embedding_of(run_tiny(tmp_path / "run", "fedbn"), most=60)
    assert found.personal and set(found.site) == {"site 1", "site 2", "site 3"} and len(found.label) <= 70


def test_runs_are_drawn_side_by_side_and_kept_as_files(tmp_path):
    runs = [run_tiny(tmp_path / name, name) for name in ("fedavg", "fedbn")]
    embed(runs, tmp_path / "out", ["pca", "t-sne"], 80)
    page = (tmp_path / "out" / "features.html").read_text()
    assert "t-SNE" in page and "fedavg, fedbn" in page and "went through that site" in page
    with np.load(tmp_path / "out" / "fedavg.npz") as file:
        assert len(file["features"]) == len(file["label"]) == len(file["image"])


def test_principal_components_are_centred_uncorrelated_and_the_widest_first():
    features = np.random.default_rng(0).normal(size=(50, 6)) * [5, 3, 1, 1, 1, 1]
    found = principal(features, 3)
    covariance = np.cov(found.T)
    assert found.mean(0) == pytest.approx(np.zeros(3), abs=1e-9)
    assert covariance - np.diag(covariance.diagonal()) == pytest.approx(np.zeros((3, 3)), abs=1e-9)
    assert (np.diff(covariance.diagonal()) < 0).all()


def test_t_sne_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(eq.UserError, match=r"install the extra embed.*--map pca"):
        mapped(np.zeros((20, 3)), "t-sne")
