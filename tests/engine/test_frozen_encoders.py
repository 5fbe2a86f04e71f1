"""Runs on features of a frozen encoder: what is stored, what trains on it, and what leaves the run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import equipoise as eq
from equipoise.cli.app import app
from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.data.feature_store import ABOUT, FEATURES, Draft
from equipoise.engine.exporting import export_model
from equipoise.engine.prediction import load_predictor
from equipoise.engine.runs import make_config, prepare_run, with_encoder
from equipoise.nets import NetConfig, build_net, groups
from equipoise.nets import features as computing
from equipoise.nets.encoders import build_encoder
from equipoise.report import read_run
from equipoise.report.page import render
from equipoise.report.run_facts import costs
from equipoise.report.wording import traffic
from harness import TINY, all_state, assert_same_bits, events
from tinyencoder import FEATURES as WIDTH

TESTS = Path(__file__).parents[1]
ENCODER = f"{TESTS / 'tinyencoder.py'}:encoder"
SMALL = (*TINY, f'net.encoder="{ENCODER}"', "net.hidden=8")


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))


def config_of(method: str = "fedavg", *settings: str):
    return make_config(None, [*SMALL, *settings], method=method)


def run(folder: Path, method: str = "fedavg", *settings: str) -> Path:
    prepare_run(config_of(method, *settings), folder).execute()
    return folder


class Killed(Exception):
    pass


class KilledInRound2:
    """An observer that ends a run after its first round."""

    def event(self, event, **fields):
        if event == "round" and fields["round"] == 2:
            raise Killed


def featured(*settings: str):
    config = config_of("fedavg", *settings)
    return with_encoder(config, load_federation(config.data, config.seed))


def store_of(federation):
    (store,) = {split.store for place in federation.places() for split in place.splits.values()}
    return store


# ---- what is stored ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stored", "apart"), [("float16", 2e-3), ("float32", 1e-5)])
def test_features_are_what_the_encoder_gives_for_the_plain_images(stored, apart):
    config, federation = featured(f'net.stored="{stored}"')
    store = store_of(federation)
    images = store.pictures.packed.astype(np.float32) / 255
    pixels = torch.from_numpy(images)
    pixels = torch.nn.functional.interpolate(pixels, (20, 20), mode="bilinear", antialias=True, align_corners=False)
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.5, 0.4, 0.3), (0.5, 0.5, 0.25)))
    from tinyencoder import encoder

    with torch.no_grad():
        expected = encoder().eval()((pixels - mean) / std)
    assert store.packed.dtype == stored and store.shape == (WIDTH, 1, 1) == federation.features.shape
    found = store.images(np.arange(len(images)))[:, 0, :, 0, 0].float()
    assert torch.allclose(found, expected, atol=apart)
    assert config.net.encoder_digest == federation.features.encoder


def test_a_killed_computation_goes_on_with_the_same_bits(monkeypatch):
    monkeypatch.setattr(computing, "BATCH", 16)
    whole = store_of(featured("net.views=2")[1])
    expected = whole.packed.copy()
    for path in whole.folder.iterdir():
        path.unlink()
    whole.folder.rmdir()
    write, written = Draft.write, []

    def failing(self, rows, view, values):
        if len(written) == 17:
            raise Killed
        written.append((view, len(rows)))
        write(self, rows, view, values)

    monkeypatch.setattr(Draft, "write", failing)
    with pytest.raises(Killed):
        featured("net.views=2")
    monkeypatch.setattr(Draft, "write", write)
    again = store_of(featured("net.views=2")[1])
    assert again.folder == whole.folder and np.array_equal(again.packed, expected)
    assert again.about["computed"] == 3 * len(expected) - sum(count for _, count in written)


def test_views_are_augmented_and_drawn():
    federation = featured("net.views=3")[1]
    store = store_of(federation)
    packed = store.packed[:, :, :, 0, 0].astype(np.float32)
    assert packed.shape[1] == 4 and not np.array_equal(packed[:, 1], packed[:, 2])
    assert np.abs(packed[:, 1:] - packed[:, :1]).max() > 0.01, "flips change features"
    from equipoise.data.augment import stored_augmentation

    augmentation = stored_augmentation(federation.features)
    rows = np.arange(100)
    random = torch.Generator().manual_seed(1)
    drawn = augmentation.view(0)(store.images(rows), random)[:, :, 0, 0]
    which = [
        int((torch.from_numpy(packed[row, 1:]) == value).all(1).nonzero()[0, 0]) for row, value in zip(rows, drawn)
    ]
    assert set(which) == {0, 1, 2}, "all views are drawn, and no plain one"
    assert torch.equal(augmentation.plain(store.images(rows))[:, :, 0, 0], torch.from_numpy(packed[rows, 0]))


def test_each_view_of_a_method_is_drawn_from_its_own_pipeline():
    _, federation = featured("net.views=5", 'augment.name="fediic"')
    from equipoise.data.augment import stored_augmentation

    first, second = stored_augmentation(federation.features).views
    assert (first.first, first.every, first.count) == (1, 2, 3)
    assert (second.first, second.every, second.count) == (2, 2, 2)


@pytest.mark.parametrize(
    "settings",
    [
        ("data.phantom.seed=5",),
        ("augment.size=24",),
        ('augment.normalise="half"',),
        ('net.stored="float32"',),
        ("net.views=1",),
        ('net.encoder="small-cnn"', 'net.encoder_weights="none"'),
        ('net.freeze_up_to="3"',),
    ],
)
def test_other_images_encoders_and_settings_have_features_of_their_own(settings):
    assert store_of(featured()[1]).folder != store_of(featured(*settings)[1]).folder


def test_features_of_other_weights_are_stale(tmp_path):
    net = build_net(NetConfig(name="small-cnn"), 2)
    weights, told = tmp_path / "weights.safetensors", ("net.encoder='small-cnn'",)
    save_file(net.state_dict(), weights)
    told += (f"net.encoder_weights='{weights}'",)
    folder = run(tmp_path / "run", "fedavg", *told)
    first = store_of(featured(*told)[1])
    save_file({key: value * 1.5 for key, value in net.state_dict().items()}, weights)
    assert store_of(featured(*told)[1]).folder != first.folder
    with pytest.raises(UserError, match="has changed since the run began"):
        load_predictor(folder)
    with pytest.raises(UserError, match="has changed since the run began"):
        prepare_run(make_config(str(folder / "config.toml")), folder)


def test_equal_images_of_another_store_are_not_computed_again(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (80, 16, 16, 3), dtype=np.uint8)
    labels, encoder = np.arange(80) % 2, NetConfig(encoder=ENCODER)
    first = eq.Federation.from_arrays(images[:60], labels[:60], ["a"] * 60)
    second = eq.Federation.from_arrays(images[20:], labels[20:], ["a"] * 60)
    config = make_config(None, [])
    stores = [store_of(computing.with_features(fed, encoder, config.augment)) for fed in (first, second)]
    assert [store.about["computed"] for store in stores] == [60, 20]
    assert np.array_equal(stores[0].packed[20:], stores[1].packed[:40])


def test_the_command_computes_once_and_tells_what_it_took():
    words = ["data", "features", "phantom", "--encoder", ENCODER]
    words += [word for text in TINY[2:] for word in ("--set", text)]
    told = [CliRunner().invoke(app, words).output for _ in range(2)]
    assert all("features 24 of 160 images" in text and "160 computed from 20 pixels" in text for text in told)
    assert "features by" in told[0] and "features by" not in told[1]


# ---- what trains on it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "workers", "settings"),
    [
        ("fedavg", 2, ("net.views=2",)),
        ("fednpr", 1, ("net.views=2",)),
        ("fediic", 1, ("net.views=2", 'augment.name="fediic"')),
        (
            "fedbm",
            1,
            ("fedbm.every=1", "fedbm.generator_steps=2", "fedbm.generator_batch=8", "fedbm.generator_width=4"),
        ),
        ("prr", 2, ("train.epochs=2", "net.views=2")),
        ("fedbn", 1, ()),
    ],
)
def test_methods_resume_and_spread_on_features_with_the_same_bits(tmp_path, method, workers, settings):
    whole = run(tmp_path / "whole", method, *settings)
    config, part = config_of(method, *settings, f"compute.workers={workers}"), tmp_path / "part"
    with pytest.raises(Killed):
        prepare_run(config, part, [KilledInRound2()]).execute()
    prepare_run(config, part).execute(resume=True)
    assert_same_bits(all_state(whole), all_state(part))
    (start,) = events(whole, "start")
    assert start["features"] == [WIDTH, 1, 1] and start["image_size"] == 16 and start["channels"] == 3


@pytest.mark.parametrize("method", ["fedavg", "fednpr", "fediic"])
def test_a_linear_adapter_is_a_head_on_the_encoders_features(tmp_path, method):
    folder = run(tmp_path / "run", method, 'net.adapter="linear"')
    predictor = load_predictor(folder)
    net = predictor._client.net
    assert net.feature_size == WIDTH and not [*net.body.parameters()]


@pytest.mark.parametrize(
    ("method", "settings", "layers"),
    [
        ("fedbn", ('net.adapter="linear"',), "norm layers"),
        ("prr", ('net.hidden_norm="none"',), "norm layers"),
        ("silobn", ('net.hidden_norm="layer"',), "batch-norm layers"),
        ("fedbm", ('net.hidden_norm="layer"',), "batch-norm layers"),
    ],
)
def test_methods_that_need_norm_layers_refuse_adapters_without(method, settings, layers):
    with pytest.raises(UserError, match=f"needs {layers} in the net, which .* adapter does not have.*; set net"):
        config_of(method, *settings)


def test_methods_that_need_no_batch_norm_take_a_layer_norm(tmp_path):
    folder = run(tmp_path / "run", "fedbn", 'net.hidden_norm="layer"')
    assert groups(load_predictor(folder, "site 1")._client.net)["norm"]
    config_of("fedbm", 'net.hidden_norm="layer"', "fedbm.lambda_dis=0")


def test_fedbm_says_that_generated_features_are_a_variant_of_ours(tmp_path):
    folder = run(tmp_path / "run", "fedbm", "fedbm.every=1", "fedbm.generator_steps=2", "fedbm.generator_batch=8")
    assert any("variant of Equipoise's own" in text for text in events(folder, "start")[0]["warnings"])


def test_the_layers_after_a_cut_train_on_stored_maps(tmp_path):
    folder = run(tmp_path / "run", "fedavg", 'net.freeze_up_to="2"', "train.rounds=1", "net.views=2")
    assert events(folder, "start")[0]["features"] == [8, 10, 10]
    predictor = load_predictor(folder)
    from tinyencoder import encoder

    first, trained = encoder(), dict(predictor._client.net.named_parameters())
    (weight,) = [value for name, value in trained.items() if value.shape == first[3].weight.shape]
    assert not torch.equal(weight, first[3].weight), "the later layers train"
    assert torch.equal(next(iter(predictor.encoder.parameters())), first[0].weight), "the earlier ones do not"


def test_a_layer_that_is_not_there_is_refused_with_one_that_is():
    with pytest.raises(UserError, match=r"net.freeze_up_to = 'blok.3' is no layer of .*"):
        build_encoder(NetConfig(encoder=ENCODER, freeze_up_to="blok.3"))


# ---- what leaves the run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "site"), [("fedavg", None), ("prr", "site 1")])
def test_encoder_and_adapter_are_exported_as_one_graph(tmp_path, method, site):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    folder = run(tmp_path / "run", method, "train.rounds=1")
    card = export_model(folder, tmp_path / "model.onnx", site)
    assert card["pixels"]["shape"] == ["n", 3, 16, 16]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    predictor = load_predictor(folder, site)
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    (found,) = session.run(["probabilities"], {session.get_inputs()[0].name: pixels.numpy()})
    assert torch.allclose(torch.from_numpy(found), predictor(pixels), atol=1e-4)


def test_a_model_predicts_images_as_the_run_did_their_features(tmp_path):
    folder = run(tmp_path / "run", "fedavg")
    result = eq.load_result(folder)
    told = result.predictions(load_federation(result.config.data, result.config.seed))
    assert told["name"].notna().all(), "predictions name images, not features"
    federation = load_federation(result.config.data, result.config.seed)
    own = result.evaluate(federation, split="test").set_index(["scope", "site"])
    kept = result.evaluate(split=None)
    kept = kept[kept["split"] == "test"].set_index(["scope", "site"])
    both = own.index.intersection(kept.index)
    assert len(both) > 2
    np.testing.assert_allclose(
        own.loc[both, "accuracy"].astype(float), kept.loc[both, "accuracy"].astype(float), atol=0.05
    )


def test_a_runs_own_model_is_an_encoder(tmp_path):
    first = tmp_path / "first"
    prepare_run(make_config(None, [*TINY, "net.name='small-cnn'"], method="fedavg"), first).execute()
    encoder = build_encoder(NetConfig(encoder=f"run:{first}"))
    net = load_predictor(first)._client.net
    images = torch.rand(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(encoder.module(images)[:, :, 0, 0], net.features(images), atol=2e-3)
    assert encoder.size == 16
    run(tmp_path / "second", "fedavg", f"net.encoder='run:{first}'")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("net.encoder='resnet81'",), "there is no encoder 'resnet81'"),
        (("net.encoder='small-cnn'",), "comes without weights"),
        (("net.encoder='run:nowhere'",), "nowhere holds no finished run"),
        (("net.name='small-cnn'",), "net.encoder is for the net adapter"),
    ],
)
def test_what_is_no_encoder_is_refused(settings, told):
    with pytest.raises(UserError, match=told):
        featured(*settings)


def test_features_tell_what_made_them():
    about = json.loads((store_of(featured()[1]).folder / ABOUT).read_text())
    assert about["encoder"] == ENCODER and about["pixels"] == 20 and about["computed"] == 160
    assert (store_of(featured()[1]).folder / FEATURES).is_file()


def test_a_report_shows_what_full_training_would_cost(tmp_path):
    folder = run(tmp_path / "run")
    told = costs(read_run(folder))
    from tinyencoder import encoder

    count = sum(p.numel() for p in encoder().parameters())
    sent = read_run(folder).work["sent"].mean()
    assert told["Sent per round, full training"] == traffic(sent + 4 * count)
    assert "Time per round, full training (estimate)" in told
    assert "Sent per round, full training" in render([read_run(folder)])
    plain = tmp_path / "plain"
    prepare_run(make_config(None, [*TINY], method="fedavg"), plain).execute()
    assert not [title for title in costs(read_run(plain)) if "full training" in title]
    assert "full training" in render([read_run(folder), read_run(plain)])
