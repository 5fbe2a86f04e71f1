"""FedBM: its limit cases, the frozen classifier, the generator and the images that it gives to the sites."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from equipoise.components._generator_training import jittered, norm_inputs
from equipoise.contract.config import preset_names
from equipoise.contract.method import Batch, PerBatch, Setting
from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.engine.loop import Run
from equipoise.engine.runs import make_config
from equipoise.losses import balanced_softmax, diversity, norm_statistics_gap
from equipoise.methods import get_method
from equipoise.methods.fedbm import FedBMClient, FedBMServer
from equipoise.nets.concepts import find_bank
from equipoise.prototypes import concept_statistics
from harness import all_state, assert_same_bits, events, run_tiny, server_state, tiny_config, tiny_federation

SMALL = ("fedbm.generator_width=2", "fedbm.generator_steps=3", "fedbm.generator_batch=6", "fedbm.synthetic=5")
EASY = (
    "data.phantom.classes=3",
    "data.phantom.images=320",
    "data.phantom.imbalance=1",
    "data.phantom.difficulty=0.3",
    "data.phantom.shift=0",
    "data.phantom.missing=0",
    "augment.name='fedbm'",
    "train.batch_size=16",
    "train.rounds=4",
    "train.optimiser.lr=0.05",
)


def setting_of(*settings):
    config = tiny_config("fedbm", *settings)
    return Setting.of(config, get_method("fedbm"), tiny_federation(config))


def model_of(folder):
    """The global model that a run ended with."""
    state = server_state(folder)
    return {name.removeprefix("model/"): value for name, value in state.items() if name.startswith("model/")}


# ---- limit cases ---------------------------------------------------------------------------------------------


def test_a_learned_classifier_without_generator_is_fedavg_bit_for_bit(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg")
    ours = run_tiny(tmp_path / "fedbm", "fedbm", "fedbm.classifier='learned'", "fedbm.cgde=false")
    assert_same_bits(all_state(plain), all_state(ours))


def test_until_the_generator_is_first_trained_it_changes_nothing(tmp_path):
    without = run_tiny(tmp_path / "without", "fedbm", "fedbm.cgde=false")
    later = run_tiny(tmp_path / "later", "fedbm", "fedbm.every=2", *SMALL)
    for name, value in model_of(without).items():
        assert torch.equal(model_of(later)[name], value), name


# ---- the frozen classifier (LKCC) ----------------------------------------------------------------------------


def test_the_classifier_is_the_statistics_of_the_bank_and_stays_so(tmp_path):
    state = server_state(run_tiny(tmp_path / "run", "fedbm", "fedbm.cgde=false"))
    config = tiny_config("fedbm")
    mean, variance = concept_statistics(find_bank(config.data, tiny_federation(config).classes).embeddings)
    assert torch.equal(state["classifier/mean"], mean)
    assert torch.equal(state["classifier/variance"], variance)
    assert state["model/head.weight"].shape == (384, 128)


def test_averaged_and_random_classifiers_have_no_variance():
    averaged = FedBMServer(setting_of("fedbm.classifier='averaged'", "fedbm.cgde=false")).state.classifier
    full = FedBMServer(setting_of("fedbm.cgde=false")).state.classifier
    random = FedBMServer(setting_of("fedbm.classifier='random'", "fedbm.cgde=false")).state.classifier
    assert torch.equal(averaged["mean"], full["mean"])
    assert averaged["variance"].abs().max() == random["variance"].abs().max() == 0 < full["variance"].max()
    torch.testing.assert_close(random["mean"].norm(dim=1), torch.ones(4))
    again = FedBMServer(setting_of("fedbm.classifier='random'", "fedbm.cgde=false")).state.classifier
    assert torch.equal(random["mean"], again["mean"])


def test_a_share_of_the_prompts_is_drawn_from_the_seed():
    def mean(*settings):
        return FedBMServer(setting_of("fedbm.cgde=false", *settings)).state.classifier["mean"]

    half = mean("fedbm.prompt_share=0.5")
    assert torch.equal(half, mean("fedbm.prompt_share=0.5"))
    assert not torch.equal(half, mean("fedbm.prompt_share=0.5", "seed=2"))
    assert not torch.equal(half, mean())
    codes = FedBMServer(setting_of("fedbm.prompt_share=0.5", *SMALL)).state.codes
    assert codes["spread"].shape == (4, 12, 384)


def test_one_frozen_classifier_serves_every_site_and_the_evaluation():
    client = FedBMClient(setting_of("fedbm.cgde=false"))
    trained = {id(parameter) for parameter in client.phases["main"].optimiser.parameters}
    assert trained == {id(parameter) for parameter in client.net.parameters()}
    server = FedBMServer(client.setting)
    client.begin(server.message(), None)
    client.set_mode(False)
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        h = F.normalize(client.net(images), dim=1)
        predicted = client.predict("global", Batch(image=images))
    mean, variance = server.state.classifier["mean"], server.state.classifier["variance"]
    torch.testing.assert_close(predicted, 12.5 * (h @ mean.T + 12.5 / 2 * h.square() @ variance.T))


def test_data_without_a_bank_is_refused_with_the_command(tmp_path):
    with pytest.raises(UserError, match="equipoise concepts build phantom --encoder roberta-base"):
        run_tiny(tmp_path / "run", "fedbm", "fedbm.encoder='roberta-base'")


# ---- the generator (CGDE) ------------------------------------------------------------------------------------


@torch.no_grad()
def share_classified_as_asked(server):
    """How many generated images the global model takes for what they were made as."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(server.setting.num_classes, (150,), generator=random)
    parts = server.parts
    parts.generator.load_state_dict(server.state.generator)
    parts.generator.eval()
    images = parts.generator(parts.codes.draw(labels, random))
    parts.net.load_state_dict(server.state.model)
    parts.net.eval()
    return (parts.classifier(parts.net(parts.show(images))).argmax(1) == labels).float().mean()


def test_generated_images_are_classified_as_asked(tmp_path):
    folder = run_tiny(tmp_path / "teacher", "fedbm", "fedbm.cgde=false", *EASY)
    steps = ("fedbm.generator_width=8", "fedbm.generator_steps=80", "fedbm.generator_lr=0.003")
    server = FedBMServer(setting_of(*EASY, *steps, "fedbm.generator_batch=32"))
    server.state.model = model_of(folder)
    before = share_classified_as_asked(server)
    server.state.generator = server.train_generator(server.random("generator", 5))
    assert before < 0.5
    assert share_classified_as_asked(server) > 0.8


def test_the_generators_loss_is_the_weighted_sum_of_its_three_terms():
    def loss(div, dis):
        weights = (f"fedbm.lambda_div={div}", f"fedbm.lambda_dis={dis}")
        server = FedBMServer(setting_of(*SMALL, *weights))
        server.parts.net.eval()
        server.generator_training.random.manual_seed(1)
        return server.generator_training.loss(images, codes, labels), server

    random = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 16, 16, generator=random)
    codes, labels = torch.randn(8, 384, generator=random), torch.arange(8) % 4
    semantic, server = loss(0, 0)
    shown = server.parts.show(jittered(images[None], torch.Generator().manual_seed(1))[0])
    with norm_inputs(server.parts.net) as seen, torch.no_grad():
        output = server.parts.net(shown)
    torch.testing.assert_close(semantic, server.parts.classifier.loss(output, labels))
    torch.testing.assert_close(loss(2, 0)[0] - semantic, 2 * diversity(codes, images, labels, 4))
    torch.testing.assert_close(loss(0, 0.1)[0] - semantic, 0.1 * norm_statistics_gap(*zip(*seen)))


def test_generator_and_teacher_work_in_the_precision_of_the_sites(monkeypatch):
    training = FedBMServer(setting_of(*SMALL)).generator_training
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
    config = tiny_config("fedbm", f"compute.precision={precision!r}")
    setting = Setting.of(config, get_method("fedbm"), tiny_federation(config), device)
    assert setting.autocasts == expected
    assert not setting_of("compute.precision='bf16'").autocasts, "on a CPU"


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
    server = FedBMServer(setting_of(*SMALL))
    before = {name: value.clone() for name, value in (server.state.generator | server.state.model).items()}
    trained = server.train_generator(server.random("generator", 1))
    for name, value in (server.state.generator | server.state.model).items():
        assert torch.equal(value, before[name]), name
    assert not torch.equal(trained["expand.weight"], before["expand.weight"])
    again = FedBMServer(server.setting)
    assert_same_bits(trained, again.train_generator(again.random("generator", 1)))


# ---- what sites do with it -----------------------------------------------------------------------------------


def test_sites_train_on_generated_images_only_once_there_is_a_generator(tmp_path, monkeypatch):
    noted = set()
    original = FedBMClient.loss

    def loss(self, batch, out):
        made = len(getattr(batch, "synthetic", ()))
        assert len(out.output) == len(batch.label) + made
        assert len(out.features) == len(batch.label)
        noted.add((self.round, made))
        return original(self, batch, out)

    monkeypatch.setattr(FedBMClient, "loss", loss)
    run_tiny(tmp_path / "run", "fedbm", "train.rounds=4", "fedbm.every=2", *SMALL)
    assert noted == {(1, 0), (2, 0), (3, 5), (4, 5)}


def test_prepared_images_are_the_generators_in_eval_mode_and_differ_from_batch_to_batch():
    setting = setting_of(*SMALL)
    server, client = FedBMServer(setting), FedBMClient(setting)
    generator = server.train_generator(server.random("generator", 1))
    client.begin({**server.message(), "codes": server.state.codes, "generator": generator}, None)
    client.set_mode(True)
    assert not client.generator.training
    client.site, client.round = "site 1", 2
    client.synthesis = client.random("synthesis")
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
    client = FedBMClient(setting_of(*SMALL, f"compute.channels_last={str(last).lower()}"))
    client.set_mode(True)
    client.synthesis = torch.Generator().manual_seed(0)
    with torch.no_grad():
        batches = client.prepare(Batch(batches=3))["synthetic"].rows
    assert all(batch.is_contiguous(memory_format=torch.channels_last) == last for batch in batches)


@pytest.mark.parametrize("classifier", ["distribution", "learned"])
def test_local_and_generated_images_weigh_alike_in_one_mean(classifier):
    setting = setting_of(f"fedbm.classifier='{classifier}'", *SMALL)
    client, server = FedBMClient(setting), FedBMServer(setting)
    client.begin(server.message(), None)
    single = client.classifier.loss if setting.options.frozen else F.cross_entropy
    random = torch.Generator().manual_seed(0)
    width = len(server.state.model["head.bias"])
    output, labels = torch.randn(7, width, generator=random), torch.tensor([0, 1, 2, 3, 1, 0, 2])
    batch = Batch(label=labels[:3], synthetic=output[3:], synthetic_label=labels[3:])
    together = client.loss(batch, Batch(output=output))
    apart = [single(output[i : i + 1], labels[i : i + 1]) for i in range(7)]
    torch.testing.assert_close(together, torch.stack(apart).mean())


def test_class_counts_of_the_site_do_not_bear_on_generated_images():
    setting = setting_of("fedbm.classifier='learned'", "train.loss='balanced_softmax'", *SMALL)
    client = FedBMClient(setting)
    client.class_counts.copy_(torch.tensor([9.0, 1.0, 0.0, 0.0]))
    output, labels = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 1, 3, 2, 2, 3])
    batch = Batch(label=labels[:3], synthetic=output[3:], synthetic_label=labels[3:])
    local = balanced_softmax(output[:3], labels[:3], client.class_counts)
    made = F.cross_entropy(output[3:], labels[3:])
    torch.testing.assert_close(client.loss(batch, Batch(output=output)), (3 * local + 4 * made) / 7)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """A run in whose second round the generator's images count."""
    return run_tiny(tmp_path_factory.mktemp("fedbm") / "full", "fedbm", "fedbm.every=1", *SMALL)


@pytest.mark.parametrize(
    "switch", ["fedbm.classifier='learned'", "fedbm.condition='gaussian'", "fedbm.lambda_div=0", "fedbm.lambda_dis=0"]
)
def test_each_switch_changes_the_result(tmp_path, full_run, switch):
    less = run_tiny(tmp_path / "less", "fedbm", "fedbm.every=1", *SMALL, switch)
    assert not torch.equal(model_of(full_run)["body.0.weight"], model_of(less)["body.0.weight"])


def test_nothing_but_model_and_size_leaves_a_site(full_run):
    (start,) = events(full_run, "start")
    assert start["disclosure"]["train"].keys() == {"model", "examples"}


class Crash:
    """Ends a run in the middle of a round."""

    def __init__(self, round_number):
        self.round = round_number

    def event(self, event, **fields):
        if event == "round" and fields["round"] == self.round:
            raise KeyboardInterrupt


def test_a_run_resumes_bit_for_bit_with_its_generator(tmp_path):
    settings = ("train.rounds=4", "fedbm.every=1", "train.participation=0.7", "train.optimiser.keep=true", *SMALL)
    config = tiny_config("fedbm", *settings)
    with pytest.raises(KeyboardInterrupt):
        Run(config, get_method("fedbm"), tiny_federation(config), tmp_path / "broken", [Crash(3)]).execute()
    run_tiny(tmp_path / "broken", "fedbm", *settings, resume=True)
    assert_same_bits(all_state(run_tiny(tmp_path / "whole", "fedbm", *settings)), all_state(tmp_path / "broken"))


def test_no_generator_is_trained_after_the_last_round(tmp_path, monkeypatch):
    trained, whole = [], FedBMServer.train_generator
    monkeypatch.setattr(FedBMServer, "train_generator", lambda self, random: trained.append(1) or whole(self, random))
    run_tiny(tmp_path / "run", "fedbm", "train.rounds=3", "fedbm.every=1", *SMALL)
    assert len(trained) == 2


def test_the_loss_falls_on_the_phantom(tmp_path):
    generator = ("fedbm.generator_width=4", "fedbm.generator_steps=20", "fedbm.generator_lr=0.003")
    settings = (*EASY, *generator, "fedbm.generator_batch=16", "fedbm.synthetic=8", "fedbm.every=3", "train.rounds=6")
    rounds = events(run_tiny(tmp_path / "run", "fedbm", *settings), "round")
    losses = [sum(site["loss"] for site in event["sites"].values()) for event in rounds]
    assert losses[2] < 0.9 * losses[0]
    assert losses[5] < 0.9 * losses[3]


# ---- presets -------------------------------------------------------------------------------------------------


PAPER = {"oct": (12, 2, 200), "kvasir": (10, 2, 200), "ham10000": (10, 1, 200), "pbc": (12, 10, 50)}


@pytest.mark.parametrize("alpha", [0.05, 0.1])
@pytest.mark.parametrize("data", PAPER)
def test_presets_have_the_papers_sites_epochs_and_rounds(data, alpha):
    config = make_config(f"fedbm-{data}-{alpha}")
    assert (config.method, config.data.name, config.data.alpha) == ("fedbm", data, alpha)
    assert (config.data.sites, config.train.epochs, config.train.rounds) == PAPER[data]
    assert (config.train.batch_size, config.train.participation, config.net.name) == (8, 0.5, "resnet18")
    assert (config.data.partition, config.augment.name) == ("dirichlet_per_class", "fedbm")


@pytest.mark.parametrize("preset", [n for n in preset_names() if n.startswith(("fedbm-oct", "fedbm-kv", "fedbm-fem"))])
def test_a_preset_whose_source_is_not_built_names_it(preset):
    config = make_config(preset)
    with pytest.raises(UserError, match=config.data.name):
        load_federation(config.data, config.seed)
