"""LoRA on a model of Hugging Face: small matrices within a frozen encoder train and travel, and nothing else of it."""

from pathlib import Path

import pytest
import torch

import tinyhub
from equipoise.core.errors import UserError
from equipoise.engine.exporting import export_model
from equipoise.engine.prediction import load_predictor
from equipoise.engine.runs import make_config, prepare_run
from equipoise.nets import NetConfig, build_net, groups
from equipoise.nets.encoders import build_encoder
from equipoise.report import read_run
from equipoise.report.run_facts import costs
from equipoise.report.wording import traffic
from harness import TINY, all_state, assert_same_bits, events
from tinyhub import LAYERS, MEAN, WIDTH

pytest.importorskip("transformers", reason="needs equipoise[hub]")
pytest.importorskip("peft", reason="needs equipoise[hub]")

RANK = 4
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    return tinyhub.written(tmp_path_factory.mktemp("hub"))


@pytest.fixture(autouse=True)
def own_data(tmp_path, monkeypatch):
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))


def config_of(encoder: str, *settings: str, method: str = "fedavg"):
    told = (f'net.encoder="{encoder}"', 'net.adapter="lora"', f"net.lora_rank={RANK}", "train.rounds=2")
    return make_config(None, [*TINY, *told, *settings], method=method)


def net_of(encoder: str, **more):
    torch.manual_seed(1)
    return build_net(NetConfig(encoder=encoder, adapter="lora", lora_rank=RANK, **more), 4)


class Killed(Exception):
    pass


class KilledInRound2:
    """An observer that ends a run after its first round."""

    def event(self, event, **fields):
        if event == "round" and fields["round"] == 2:
            raise Killed


# ---- the net -------------------------------------------------------------------------------------------------------


def test_the_state_holds_two_matrices_for_queries_and_values_of_each_layer_and_the_head(hub):
    net = net_of(f"hf:{hub / 'vit'}")
    shapes = sorted(tuple(value.shape) for value in net.state_dict().values())
    assert shapes == sorted([(RANK, WIDTH), (WIDTH, RANK)] * 2 * LAYERS + [(4, WIDTH), (4,)])
    assert set(net.state_dict()) == {name for name, _ in net.named_parameters()}
    assert not groups(net)["norm"] and len(groups(net)["body"]) == 4 * LAYERS
    whole = build_encoder(NetConfig(encoder=f"hf:{hub / 'vit'}")).parameters
    assert net.frozen_parameters == whole


def test_before_training_features_are_the_encoders_and_training_mode_leaves_them(hub):
    name = f"hf:{hub / 'vit'}"
    net, images = net_of(name, scale="none"), torch.rand(3, 3, 32, 32)
    expected = build_encoder(NetConfig(encoder=name, stored="float32")).module(images)[:, :, 0, 0]
    with torch.no_grad():
        assert torch.allclose(net.train().features(images), expected, atol=1e-5), "dropout of the encoder is off"
        for key, value in net.state_dict().items():
            value.add_(0.1 if "lora_B" in key else 0)
        assert not torch.allclose(net.features(images), expected, atol=1e-2), "the matrices take part"


def test_users_name_other_layers(hub):
    net = net_of(f"hf:{hub / 'convnext'}", lora_layers=("pwconv1",))
    assert len([key for key in net.state_dict() if "pwconv1.lora_A" in key]) == 4
    assert not [key for key in net.state_dict() if "pwconv2" in key]


@pytest.mark.parametrize(
    ("encoder", "layers", "told"),
    [
        ("convnext", None, r"no linear layers for queries and values in .*with net.lora_layers: .*pwconv2"),
        ("vit", ("stem",), r"no linear layers called stem in .*with net.lora_layers: .*fc2"),
        (f"{TESTS / 'tinyencoder.py'}:encoder", None, r"it has none at all; set net.adapter = \"hidden\""),
    ],
)
def test_encoders_without_such_layers_are_refused(hub, encoder, layers, told):
    with pytest.raises(UserError, match=told):
        net_of(encoder if ":" in encoder else f"hf:{hub / encoder}", lora_layers=layers)


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_resumes_with_the_same_bits_and_sends_lora_and_head_alone(hub, tmp_path):
    name = f"hf:{hub / 'vit'}"
    whole, part = tmp_path / "whole", tmp_path / "part"
    prepare_run(config_of(name), whole).execute()
    with pytest.raises(Killed):
        prepare_run(config_of(name), part, [KilledInRound2()]).execute()
    prepare_run(config_of(name), part).execute(resume=True)
    assert_same_bits(all_state(whole), all_state(part))
    (start,) = events(whole, "start")
    classes = len(start["classes"])
    trained = 2 * LAYERS * 2 * RANK * WIDTH + classes * (WIDTH + 1)
    assert start["parameters"] == trained and start["config"]["augment"]["mean"] == list(MEAN)
    record = read_run(whole)
    assert record.work["sent"].max() < 4 * trained + 2000
    frozen = build_encoder(NetConfig(encoder=name)).parameters
    assert costs(record)["Sent per round, full training"] == traffic(record.work["sent"].mean() + 4 * frozen)


def test_the_matrices_train_and_the_exported_model_predicts_as_the_run_does(hub, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    folder = tmp_path / "run"
    prepare_run(config_of(f"hf:{hub / 'vit'}", "train.rounds=1"), folder).execute()
    predictor = load_predictor(folder)
    second = [value for key, value in predictor._client.net.state_dict().items() if "lora_B" in key]
    assert len(second) == 2 * LAYERS and all(value.abs().max() > 0 for value in second), "they begin as zeros"
    export_model(folder, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    pixels = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    (found,) = session.run(["probabilities"], {session.get_inputs()[0].name: pixels.numpy()})
    assert torch.allclose(torch.from_numpy(found), predictor(pixels), atol=1e-4)


@pytest.mark.parametrize(
    ("method", "more"),
    [("perfedavg", ()), pytest.param("fedavg", ("privacy.epsilon=8",), marks=pytest.mark.slow)],  # Opacus is a wait
)
def test_second_derivatives_and_private_steps_reach_the_matrices(hub, tmp_path, method, more):
    folder = tmp_path / "run"
    config = config_of(f"hf:{hub / 'vit'}", "train.rounds=1", "train.epochs=1", *more, method=method)
    prepare_run(config, folder).execute()
    second = [value for key, value in load_predictor(folder)._client.net.state_dict().items() if "lora_B" in key]
    assert second and all(torch.isfinite(value).all() and value.abs().max() > 0 for value in second)


def test_another_encoder_is_refused_where_a_run_goes_on(hub, tmp_path):
    with pytest.raises(UserError, match="has changed since the run began"):
        prepare_run(config_of(f"hf:{hub / 'vit'}", 'net.encoder_digest="00000000"'), tmp_path / "run")


@pytest.mark.parametrize("method", ["fedbn", "prr"])
def test_methods_that_need_norm_layers_refuse_lora(hub, method):
    with pytest.raises(UserError, match="needs norm layers in the net, which the lora adapter does not train; set net"):
        config_of(f"hf:{hub / 'vit'}", method=method)


@pytest.mark.parametrize("setting", ['net.freeze_up_to="1"', "net.views=2", "net.group_norm=true", 'net.init="torch"'])
def test_settings_that_would_change_the_encoder_or_store_features_are_refused(hub, setting):
    with pytest.raises(UserError, match=r"does not go with net\.adapter = 'lora'"):
        config_of(f"hf:{hub / 'vit'}", setting)
