"""Nets from outside: how they are named and made, where head and norm layers are found, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn import functional as F

import equipoise as eq
from equipoise.core.errors import UserError
from equipoise.nets import NetConfig, build_net, groups
from equipoise.nets.outside_modules import named
from equipoise.nets.outside_nets import WholeNet
from harness import all_state, assert_same_bits

PHANTOM = {"images": 160, "sites": 2, "classes": 4, "size": 16}
SMALL = {"train.batch_size": 8, "augment.name": "flips"}
SOURCE = """
from torch import nn

def make(num_classes, channels, width=6):
    layers = [nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))
"""


class Two(nn.Module):
    """A net with a scale layer called a norm, and two linear layers of which the second makes the logits."""

    class FrameNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, images):
            return images * self.weight

    def __init__(self, classes: int, after: bool = False) -> None:
        super().__init__()
        self.scale = self.FrameNorm()
        self.stem = nn.Conv2d(3, 5, 3)
        self.first, self.last = nn.Linear(5, classes), nn.Linear(classes, classes)
        self.after = after

    def forward(self, images):
        features = self.stem(self.scale(images)).mean((2, 3))
        logits = self.last(F.relu(self.first(features)))
        return 2 * logits if self.after else logits


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    (tmp_path / "mynets.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def built(name: str, classes: int = 4, **more) -> nn.Module:
    torch.manual_seed(0)
    return build_net(NetConfig(name=name, **more), classes, 3)


# ---- head and norm layers ------------------------------------------------------------------------------------------


def test_the_head_is_the_layer_that_makes_the_logits():
    module = Two(4).eval()
    net = built(named(module)).eval()
    images = torch.rand(3, 3, 20, 20)
    assert not isinstance(net, WholeNet) and net.head.weight.shape == (4, 4)
    assert torch.equal(net(images), module(images)) and torch.equal(net.classify(net.features(images)), net(images))
    assert net.feature_size == 4
    found = groups(net)
    assert set(found["head"]) == {"head.weight", "head.bias"} and found["norm"] == ("body.module.scale.weight",)


def test_the_user_names_head_and_norm_layers():
    name = named(Two(4))
    assert groups(built(name, norm=("stem",)))["norm"] == ("body.module.stem.weight", "body.module.stem.bias")
    with pytest.raises(UserError, match=r"net.head = 'stem' is no linear layer .* first, last"):
        built(name, head="stem")
    with pytest.raises(UserError, match=r"net.norm names 'nothing'"):
        built(name, norm=("nothing",))


def test_a_net_without_a_known_head_gives_logits_and_nothing_else():
    module = Two(4, after=True).eval()
    net = built(named(module)).eval()
    images = torch.rand(3, 3, 20, 20)
    assert isinstance(net, WholeNet) and torch.equal(net(images), module(images))
    for asked in (lambda: net.feature_size, lambda: net.head, lambda: groups(net)["head"]):
        with pytest.raises(UserError, match=r"the method needs .* name it with net.head"):
            asked()
    assert len(groups(net)["body"]) == 6


def test_weights_of_an_object_are_those_that_every_site_starts_from():
    module = Two(4)
    first, second = built(named(module)), built(named(module))
    assert torch.equal(first.body.module.stem.weight, module.stem.weight)
    with torch.no_grad():
        first.body.module.stem.weight.zero_()
    assert torch.equal(second.body.module.stem.weight, module.stem.weight)


# ---- names ---------------------------------------------------------------------------------------------------------


def test_functions_of_modules_and_files():
    sys.path.pop(0)  # the working folder is looked in all the same
    by_module, by_file = built("mynets:make"), built("mynets.py:make")
    assert all(torch.equal(a, b) for a, b in zip(by_module.state_dict().values(), by_file.state_dict().values()))
    assert built("mynets:make", arguments={"width": 9}).feature_size == 9
    import mynets

    assert named(mynets.make) == "mynets:make", "every process can look it up"


def test_monai():
    net = built("monai:DenseNet121")
    assert net.feature_size == 1024 and net(torch.rand(2, 3, 32, 32)).shape == (2, 4)
    assert built("monai:EfficientNetBN", arguments={"model_name": "efficientnet-b0"}).feature_size == 1280


def test_hugging_face_from_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    about = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(about).save_pretrained(tmp_path / "vit")
    config = NetConfig(name="hf:vit")
    assert config.weights == "pretrained" and NetConfig(**config.model_dump()).weights == "pretrained"
    first, second = (build_net(config, 4, 3) for _ in range(2))
    keys = [key for key in first.state_dict() if key.startswith("body.")]
    assert keys and all(torch.equal(first.state_dict()[key], second.state_dict()[key]) for key in keys)
    assert first.feature_size == 16 and first(torch.rand(2, 3, 32, 32)).shape == (2, 4)
    assert any("norm" in name for name in groups(first)["norm"])
    with pytest.raises(UserError, match=r"cannot take images of the shape .* with augment.size"):
        first(torch.rand(2, 3, 20, 20))


def test_hugging_face_without_a_connection(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"hf:nobody/nothing cannot be loaded: .*copy the model's folder"):
        built("hf:nobody/nothing")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mynets:mke", "did you mean mynets:make"),
        ("nowhere.at.all:make", "No module named 'nowhere'"),
        ("none.py:make", "there is no file none.py"),
        ("monai:DenseNet12", "(?i)did you mean monai:DenseNet121"),
        ("monai:ViT", "give what it needs in net.arguments"),
        ("python:gone-12345678", "was given as an object to another Python process"),
        ("mynets:nn.Flatten", "gave Flatten|takes no images|gives"),
    ],
)
def test_names_that_lead_nowhere_are_told(name, told):
    with pytest.raises(UserError, match=told):
        built(name)


def test_settings_for_nets_from_outside_alone():
    with pytest.raises(ValidationError, match="did you mean 'resnet18'"):
        NetConfig(name="resnet-18")
    with pytest.raises(ValidationError, match=r"net.head is for nets from outside"):
        NetConfig(head="fc")
    with pytest.raises(UserError, match="gives 5 logits, but the data has 4 classes"):
        built(named(Two(5)))
    with pytest.raises(UserError, match="is no net"):
        named("resnet18")  # type: ignore[arg-type]


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_a_run_with_a_function_of_a_module_resumes_in_workers_and_predicts():
    fed = eq.load_federation("phantom", phantom=PHANTOM)
    import mynets

    whole = eq.train(fed, "fediic", net=mynets.make, rounds=2, out="whole", settings=SMALL)
    part = eq.train(fed, "fediic", net="mynets:make", rounds=1, workers=2, out="part", settings=SMALL)
    assert_same_bits(all_state(whole.path), all_state(part.resume(rounds=2).path))
    assert whole.model()(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)).shape == (1, 4)


def test_a_run_with_an_object_needs_it_again_in_another_process(monkeypatch):
    from equipoise.core import outside

    fed = eq.load_federation("phantom", phantom=PHANTOM)
    module = Two(4)
    result = eq.train(fed, net=module, rounds=1, out="run", settings=SMALL)
    monkeypatch.setattr(outside, "_objects", {})
    with pytest.raises(UserError, match="give it again"):
        result.model()
    with pytest.raises(UserError, match="but the run was made with"):
        eq.load_result("run", net=Two(4))
    assert eq.load_result("run", net=module).model() is not None
    with pytest.raises(UserError, match="worker processes"):
        eq.train(fed, net=module, rounds=1, workers=2, out="spread", settings=SMALL)


def test_a_method_that_needs_features_says_so_before_anything_is_written(tmp_path):
    fed = eq.load_federation("phantom", phantom=PHANTOM)
    logits_only = Two(4, after=True)
    assert eq.train(fed, "fedprox", net=logits_only, rounds=1, out="run", settings=SMALL).finished
    for method in ("fedrep", "fedproto"):
        with pytest.raises(UserError, match=r"the method needs .* of its net"):
            eq.train(fed, method, net=logits_only, rounds=1, out="refused", settings=SMALL)
    assert not (tmp_path / "refused").exists()
