"""Encoders of MONAI and Hugging Face: how images are made ready for them, and how they are cut at a layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from monai.networks.nets import DenseNet
from typer.testing import CliRunner

import tinyhub
from equipoise.cli.app import app
from equipoise.core.errors import UserError
from equipoise.engine.exporting import export_model
from equipoise.engine.prediction import load_predictor
from equipoise.engine.runs import make_config, prepare_run
from equipoise.nets import NetConfig, groups
from equipoise.nets.encoders import build_encoder, hub_preparation
from harness import TINY

pytest.importorskip("transformers", reason="needs equipoise[hub]")
DENSE = {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)}


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """The tiny models of Hugging Face, and the weights of a tiny net of MONAI."""
    folder = tinyhub.written(tmp_path_factory.mktemp("hub"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = DenseNet(spatial_dims=2, in_channels=3, out_channels=2, **DENSE)
    torch.save(net.state_dict(), folder / "densenet.pt")
    return folder


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))


def told_of(kind: str, hub: Path, layer: str | None = None) -> NetConfig:
    """The settings of an encoder."""
    more = {} if layer is None else {"freeze_up_to": layer}
    if kind == "densenet":
        more |= {"encoder_weights": str(hub / "densenet.pt"), "arguments": DENSE}
    return NetConfig(encoder="monai:DenseNet" if kind == "densenet" else f"hf:{hub / kind}", **more)


def settings_of(net: NetConfig) -> list[str]:
    """The settings of a net, as the command line takes them."""
    named = {"encoder": net.encoder, "encoder_weights": net.encoder_weights, "freeze_up_to": net.freeze_up_to}
    told = [f"net.{key}='{value}'" for key, value in named.items() if value is not None]
    dense = "{init_features = 8, growth_rate = 4, block_config = [2, 2]}"
    return [*told, *([f"net.arguments={dense}"] if net.arguments else [])]


def test_a_model_of_a_hub_is_given_images_as_its_own_preparation_says(hub):
    encoder = build_encoder(told_of("vit", hub))
    assert encoder.size == 32 and encoder.statistics == (tinyhub.MEAN, tinyhub.STD)
    assert hub_preparation(str(hub / "convnext")) == (48, (tinyhub.MEAN, tinyhub.STD))
    assert hub_preparation(str(hub)) == (0, None)


def test_a_net_of_monai_takes_arguments_and_the_weights_of_a_file(hub):
    encoder = build_encoder(told_of("densenet", hub)).module.module
    stored = torch.load(hub / "densenet.pt", weights_only=True)
    (first,) = [value for name, value in encoder.state_dict().items() if name.endswith("features.conv0.weight")]
    assert torch.equal(first, stored["features.conv0.weight"])
    with pytest.raises(UserError, match="comes without weights"):
        build_encoder(NetConfig(encoder="monai:DenseNet", arguments=DENSE))


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing cannot be loaded: there is no such folder"):
        build_encoder(NetConfig(encoder=f"hf:{tmp_path / 'nothing'}"))


@pytest.mark.parametrize(
    ("kind", "layer", "later", "earlier"),
    [
        ("vit", "layers.0", "layers.1.", "layers.0."),
        ("convnext", "stages.2", "stages.3.", "stages.1."),
        ("densenet", "denseblock1", "denseblock2.", "conv0."),
    ],
)
def test_both_halves_of_a_cut_give_what_the_whole_gives_and_share_no_weights(hub, kind, layer, later, earlier):
    whole, halves = build_encoder(told_of(kind, hub)), build_encoder(told_of(kind, hub, layer))
    images = torch.rand(3, 3, 64 if kind == "densenet" else whole.size, whole.size or 64)
    with torch.no_grad():
        stored = halves.module.eval()(images)
        assert torch.allclose(halves.rest.eval()(stored), whole.module(images)[:, :, 0, 0], atol=3e-3)
    assert stored.ndim == 4 and halves.width == whole.shape(3, images.shape[-1])[0]
    first, second = ([*part.state_dict()] for part in (halves.module, halves.rest))
    assert any(later in name for name in second) and not any(later in name for name in first)
    assert any(earlier in name for name in first) and not any(earlier in name for name in second)
    assert halves.parameters == whole.parameters, "each weight is in one half"
    assert all(p.requires_grad for p in halves.rest.parameters())
    assert not any(p.requires_grad for p in halves.module.parameters())


def test_layers_are_offered_where_the_named_one_is_missing(hub):
    with pytest.raises(UserError, match=r"net.freeze_up_to = 'stem' is no layer of .*vit.layers.0, vit.layers.1"):
        build_encoder(told_of("vit", hub, "stem"))


def test_layers_after_a_cut_train_and_are_exported_with_those_before(hub, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    told = settings_of(told_of("vit", hub, "layers.0"))
    folder = tmp_path / "run"
    prepare_run(make_config(None, [*TINY, *told, "train.rounds=1", "net.hidden=8"], method="fedbn"), folder).execute()
    predictor = load_predictor(folder, "site 1")
    net = predictor._client.net
    assert any("layers.1.layernorm_before" in name for name in groups(net)["norm"])
    begun = dict(build_encoder(told_of("vit", hub, "layers.0")).rest.named_parameters())
    (trained,) = [value for name, value in net.named_parameters() if name.endswith("layers.1.mlp.fc1.weight")]
    (before,) = [value for name, value in begun.items() if name.endswith("layers.1.mlp.fc1.weight")]
    assert not torch.equal(trained, before)
    export_model(folder, tmp_path / "model.onnx", "site 1")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    (found,) = session.run(["probabilities"], {session.get_inputs()[0].name: pixels.numpy()})
    assert torch.allclose(torch.from_numpy(found), predictor(pixels), atol=1e-4)


@pytest.mark.parametrize(("kind", "layer", "shape"), [("vit", None, "16"), ("densenet", "denseblock1", "16x")])
def test_the_command_computes_features_and_views_of_them(hub, kind, layer, shape):
    told = [*TINY[2:], *settings_of(told_of(kind, hub, layer))]
    (encoder,) = [text for text in told if text.startswith("net.encoder=")]
    words = ["data", "features", "phantom", "--encoder", encoder.partition("=")[2].strip("'"), "--views", "2"]
    words += [word for text in told if text != encoder for word in ("--set", text)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert f"features {shape}" in result.output and "of 2 augmented views" in result.output
    assert "480 computed" in result.output, "160 images, plain and in two views"
