"""FedBM's generator: its loss on the server, its training every few rounds, and its images at the sites."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from composed import client_of, noise_of, server_of, setting_of
from equipoise.components._generator_training import GeneratorTraining, jittered, norm_inputs
from equipoise.contract.composed_client import ComposedClient
from equipoise.contract.method import Batch, PerBatch
from equipoise.contract.protocol import Replies, Tensors
from equipoise.losses import balanced_softmax, diversity, norm_statistics_gap
from harness import assert_same_bits, run_tiny

SMALL = ("fedbm.generator_width=2", "fedbm.generator_steps=3", "fedbm.generator_batch=6", "fedbm.synthetic=5")


def generator_trained(server: Any) -> Tensors:
    """The generator after the round in which the server trains it, against the present model."""
    side = server.sides["generator"]
    side.after(side.options.every, Replies([]), {}, server.state.model)
    return server.state.generator


# ---- on the server -------------------------------------------------------------------------------------------


def test_the_generators_loss_is_the_weighted_sum_of_its_three_terms():
    def loss(div, dis):
        weights = (f"fedbm.lambda_div={div}", f"fedbm.lambda_dis={dis}")
        side = server_of(setting_of("fedbm", *SMALL, *weights)).sides["generator"]
        side.parts.net.eval()
        side.training.random.manual_seed(1)
        return side.training.loss(images, codes, labels), side.parts

    random = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 16, 16, generator=random)
    codes, labels = torch.randn(8, 384, generator=random), torch.arange(8) % 4
    semantic, parts = loss(0, 0)
    shown = parts.show(jittered(images[None], torch.Generator().manual_seed(1))[0])
    with norm_inputs(parts.net) as seen, torch.no_grad():
        output = parts.net(shown)
    torch.testing.assert_close(semantic, parts.classifier.loss(output, labels))
    torch.testing.assert_close(loss(2, 0)[0] - semantic, 2 * diversity(codes, images, labels, 4))
    torch.testing.assert_close(loss(0, 0.1)[0] - semantic, 0.1 * norm_statistics_gap(*zip(*seen)))


def test_without_a_frozen_classifier_the_nets_own_logits_say_what_an_image_shows():
    weights = ("fedbm.classifier='learned'", "fedbm.lambda_div=0", "fedbm.lambda_dis=0")
    side = server_of(setting_of("fedbm", *SMALL, *weights)).sides["generator"]
    side.parts.net.eval()
    images, labels = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    side.training.random.manual_seed(1)
    found = side.training.loss(images, torch.zeros(8, 384), labels)
    shown = side.parts.show(jittered(images[None], torch.Generator().manual_seed(1))[0])
    torch.testing.assert_close(found, F.cross_entropy(side.parts.net(shown), labels))


def test_a_share_of_the_prompts_makes_the_codes():
    codes = server_of(setting_of("fedbm", "fedbm.prompt_share=0.5", *SMALL)).state.codes
    assert codes["spread"].shape == (4, 12, 384)


def test_generator_and_teacher_work_in_the_precision_of_the_sites(monkeypatch):
    training = server_of(setting_of("fedbm", *SMALL)).sides["generator"].training
    inside, entered = [False], []

    @contextmanager
    def precision():
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(training, "precision", precision)
    for part in (training.parts.generator, training.parts.net):
        part.register_forward_pre_hook(lambda *_: entered.append(inside[0]))
    training.step()
    assert entered == [True, True]


@pytest.mark.parametrize(("device", "precision", "expected"), [("cuda", "bf16", True), ("cuda", "tf32", False)])
def test_autocast_is_for_bfloat16(device, precision, expected):
    setting = setting_of("fedbm", f"compute.precision={precision!r}", device=device)
    assert setting.autocasts == expected
    assert not setting_of("fedbm", "compute.precision='bf16'").autocasts, "on a CPU"


def golden_teacher(arrays):
    """The small teacher of the golden case, in eval mode."""
    layers = []
    for number, padding in ((1, 1), (2, 0)):
        weight = arrays[f"conv{number}"]
        convolution = nn.Conv2d(weight.shape[1], weight.shape[0], 3, padding=padding, bias=False)
        convolution.weight = nn.Parameter(weight, requires_grad=False)
        norm = nn.BatchNorm2d(weight.shape[0])
        norm.running_mean, norm.running_var = arrays[f"bn{number}_mean"], arrays[f"bn{number}_var"]
        layers += [convolution, norm, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval()


def test_batch_norm_inputs_give_the_golden_gap_and_leave_no_hook(golden):
    arrays = golden("fedbm/bn_distribution_loss")
    net = golden_teacher(arrays)
    images = arrays["images"].clone().requires_grad_()
    with norm_inputs(net) as seen:
        net(images)
    gap = norm_statistics_gap(*zip(*seen))
    (gradient,) = torch.autograd.grad(gap, images)
    torch.testing.assert_close(gap, arrays["loss"].reshape(()), rtol=2e-5, atol=0)
    torch.testing.assert_close(gradient, arrays["grad_images"], rtol=2e-5, atol=1e-7)
    assert not any(part._forward_pre_hooks for part in net.modules())


def test_generated_images_are_shifted_and_flipped_all_alike_in_a_batch_and_otherwise_in_the_next():
    image = torch.arange(1.0, 65.0).reshape(1, 1, 1, 8, 8)
    moved = jittered(image.repeat(40, 3, 1, 1, 1), torch.Generator().manual_seed(0))
    assert moved.shape == (40, 3, 1, 8, 8)
    assert torch.equal(moved[:, 0], moved[:, 1]) and torch.equal(moved[:, 0], moved[:, 2])
    assert set(moved.unique().tolist()) <= {0.0, *image.unique().tolist()}
    assert len({tuple(batch.flatten().tolist()) for batch in moved[:, 0]}) > 30


def test_a_shift_takes_what_comes_in_as_black_and_keeps_the_order_or_turns_it():
    image = torch.arange(1.0, 65.0).reshape(1, 1, 1, 8, 8)
    for seed in range(20):
        moved = jittered(image, torch.Generator().manual_seed(seed))[0, 0, 0]
        rows = moved[moved.any(1)][:, moved.any(0)]
        down, right = rows[1:, :1] - rows[:-1, :1], rows[:1, 1:] - rows[:1, :-1]
        assert down.unique().abs().tolist() == [8.0] and right.unique().abs().tolist() == [1.0]
        assert rows.shape[0] >= 4 and rows.shape[1] >= 4


def test_training_the_generator_leaves_the_state_it_starts_from_alone():
    setting = setting_of("fedbm", *SMALL, "train.rounds=9")
    server = server_of(setting)
    first = {**server.state.generator, **server.state.model}
    before = {name: value.clone() for name, value in first.items()}
    trained = generator_trained(server)
    assert_same_bits(first, before)
    assert not torch.equal(trained["expand.weight"], before["expand.weight"])
    assert_same_bits(trained, generator_trained(server_of(setting)))


def test_no_generator_is_trained_after_the_last_round(tmp_path, monkeypatch):
    trained, whole = [], GeneratorTraining.run
    monkeypatch.setattr(GeneratorTraining, "run", lambda self, random: trained.append(1) or whole(self, random))
    run_tiny(tmp_path / "run", "fedbm", "train.rounds=3", "fedbm.every=1", *SMALL)
    assert len(trained) == 2


# ---- at the sites --------------------------------------------------------------------------------------------


def test_sites_train_on_generated_images_only_once_there_is_a_generator(tmp_path, monkeypatch):
    noted = set()
    original = ComposedClient.loss

    def loss(self, batch, out):
        made = len(getattr(batch, "synthetic", ()))
        assert len(out.output) == len(batch.label) + made
        assert len(out.features) == len(batch.label)
        noted.add((self.workplace.round, made))
        return original(self, batch, out)

    monkeypatch.setattr(ComposedClient, "loss", loss)
    run_tiny(tmp_path / "run", "fedbm", "train.rounds=4", "fedbm.every=2", *SMALL)
    assert noted == {(1, 0), (2, 0), (3, 5), (4, 5)}


def test_prepared_images_are_the_generators_in_eval_mode_and_differ_from_batch_to_batch():
    setting = setting_of("fedbm", *SMALL, "train.rounds=9")
    server, client = server_of(setting), client_of(setting)
    side, generator = client.sides["generator"], generator_trained(server)
    client.workplace.begin({**server.message(), "codes": server.state.codes, "generator": generator}, None)
    client.workplace.set_mode(True)
    assert not side.generator.training
    client.workplace.site, client.workplace.round = "site 1", 2
    side.synthesis = client.random("synthesis")
    with torch.no_grad():
        fields = client.prepare(Batch(batches=3))
    images, labels = fields["synthetic"], fields["synthetic_label"]
    assert isinstance(images, PerBatch) and images.rows.shape == (3, 5, 3, 16, 16)
    assert labels.rows.shape == (3, 5)
    assert labels.rows.min() >= 0 and labels.rows.max() < 4
    assert not torch.equal(images.rows[0], images.rows[1])
    pixels = images.rows * torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    pixels = pixels + torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    assert pixels.min() > -1e-6 and pixels.max() < 1 + 1e-6


@pytest.mark.parametrize("last", [False, True])
def test_generated_images_lie_in_memory_as_local_ones(last):
    client = client_of(setting_of("fedbm", *SMALL, f"compute.channels_last={str(last).lower()}"))
    client.workplace.set_mode(True)
    client.sides["generator"].synthesis = torch.Generator().manual_seed(0)
    with torch.no_grad():
        batches = client.prepare(Batch(batches=3))["synthetic"].rows
    assert all(batch.is_contiguous(memory_format=torch.channels_last) == last for batch in batches)


@pytest.fixture
def both():
    """Three images of a site's own and four that a generator made."""
    own, made = noise_of(3), noise_of(4)
    return Batch(image=own.image, label=own.label, synthetic=made.image, synthetic_label=torch.tensor([3, 2, 2, 3]))


@pytest.mark.parametrize("classifier", ["distribution", "learned"])
def test_local_and_generated_images_weigh_alike_in_one_mean(both, classifier):
    setting = setting_of("fedbm", f"fedbm.classifier='{classifier}'", *SMALL)
    client = client_of(setting)
    client.workplace.begin(server_of(setting).message(), None)
    client.workplace.set_mode(False)
    single = F.cross_entropy if classifier == "learned" else client.sides["concepts"].classifier.loss
    output = client.net(torch.cat([both.image, both.synthetic]))
    labels = torch.cat([both.label, both.synthetic_label])
    apart = [single(output[i : i + 1], labels[i : i + 1]) for i in range(7)]
    torch.testing.assert_close(client.loss(both, client.outputs(both)), torch.stack(apart).mean())


@pytest.mark.parametrize("classifier", ["distribution", "learned"])
def test_class_counts_of_the_site_do_not_bear_on_generated_images(both, classifier):
    settings = (f"fedbm.classifier='{classifier}'", "components=['balanced-softmax']", *SMALL)
    client = client_of(setting_of("fedbm", *settings))
    client.workplace.begin(server_of(client.setting).message(), None)
    client.class_counts.copy_(torch.tensor([9.0, 1.0, 0.0, 0.0]))
    client.workplace.set_mode(False)
    output = client.net(torch.cat([both.image, both.synthetic]))
    expected, logits = torch.zeros(()), output
    if classifier == "distribution":  # any loss of the logits may stand in for the cross entropy of Eq. 4
        frozen, labels = client.sides["concepts"].classifier, torch.cat([both.label, both.synthetic_label])
        logits = frozen(output)
        expected = frozen.loss(output, labels) - F.cross_entropy(logits, labels)
    local = balanced_softmax(logits[:3], both.label, client.class_counts)
    made = F.cross_entropy(logits[3:], both.synthetic_label)
    torch.testing.assert_close(client.loss(both, client.outputs(both)), expected + (3 * local + 4 * made) / 7)


@pytest.mark.parametrize("classifier", ["distribution", "learned"])
def test_what_changes_logits_of_local_images_goes_on_beside_generated_ones(both, classifier):
    def loss(*settings):
        client = client_of(setting_of("fedbm", f"fedbm.classifier='{classifier}'", *SMALL, *settings))
        client.workplace.begin(server_of(client.setting).message(), None)
        client.class_counts.copy_(torch.tensor([9.0, 1.0, 1.0, 0.0]))
        client.workplace.set_mode(False)
        local = Batch(image=both.image, label=both.label)
        return [client.loss(batch, client.outputs(batch)) for batch in (local, both)]

    (plain, plain_of_both), (restricted, restricted_of_both) = loss(), loss("components=['restricted']")
    assert restricted > plain
    torch.testing.assert_close(7 * (restricted_of_both - plain_of_both), 3 * (restricted - plain))
