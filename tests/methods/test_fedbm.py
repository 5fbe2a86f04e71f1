"""FedBM as a whole: its limit cases, what its generator makes, switches, runs and presets."""

import pytest
import torch

from composed import client_of, server_of, setting_of
from equipoise.contract.config_files import preset_names
from equipoise.contract.protocol import Replies
from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.engine.loop import Run
from equipoise.engine.opening import ineffective
from equipoise.engine.runs import make_config
from equipoise.methods import get_method
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


# ---- whole runs ----------------------------------------------------------------------------------------------


@torch.no_grad()
def share_classified_as_asked(server):
    """How many generated images the global model takes for what they were made as."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(server.setting.num_classes, (150,), generator=random)
    parts = server.sides["generator"].parts
    parts.generator.load_state_dict(server.state.generator)
    parts.generator.eval()
    images = parts.generator(parts.codes.draw(labels, random))
    parts.net.load_state_dict(server.state.model)
    parts.net.eval()
    return (parts.classifier(parts.net(parts.show(images))).argmax(1) == labels).float().mean()


def test_generated_images_are_classified_as_asked(tmp_path):
    folder = run_tiny(tmp_path / "teacher", "fedbm", "fedbm.cgde=false", *EASY)
    steps = ("fedbm.generator_width=8", "fedbm.generator_steps=80", "fedbm.generator_lr=0.003")
    server = server_of(setting_of("fedbm", *EASY, *steps, "fedbm.generator_batch=32", "train.rounds=6"))
    server.state.model = model_of(folder)
    before = share_classified_as_asked(server)
    server.sides["generator"].after(5, Replies([]), {}, server.state.model)
    assert before < 0.5
    assert share_classified_as_asked(server) > 0.8


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


@pytest.mark.parametrize(("classifier", "replaced"), [("distribution", True), ("learned", False)])
def test_a_frozen_classifier_has_a_loss_in_place_of_the_configured_one(classifier, replaced):
    settings = (f"fedbm.classifier={classifier}", "train.loss=focal", "fedbm.cgde=false")
    setting = setting_of("fedbm", *settings)
    sentences = list(ineffective(setting, get_method("fedbm"), (), "global"))
    assert [sentence.split(" = ")[0] for sentence in sentences] == ["train.loss"] * replaced
    logits, labels = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    plain = torch.nn.functional.cross_entropy(logits, labels)
    assert torch.equal(client_of(setting).supervised(logits, labels), plain) is replaced


def test_a_run_says_that_its_generator_is_never_trained():
    for rounds, told in ((5, ["fedbm.cgde"]), (6, [])):
        setting = setting_of("fedbm", f"train.rounds={rounds}")
        sentences = list(ineffective(setting, get_method("fedbm"), (), "global"))
        assert [sentence.split(" = ")[0] for sentence in sentences] == told


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
