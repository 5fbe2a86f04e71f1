"""The closed form in a federation: equal to pooling, without a seed, exact when sites come and go, and private."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from equipoise.closed_form import discriminant, noise_scale
from equipoise.components._closed_form import as_sums
from equipoise.contract.method import Batch, Setting
from equipoise.data import Federation
from equipoise.data.federation import Site, Split
from equipoise.engine.exporting import export_model
from equipoise.engine.local_engine import LocalEngine
from equipoise.engine.slot import exhaust
from equipoise.methods import get_method
from equipoise.nets import build_net
from harness import assert_same_bits, events, run_tiny, server_state, site_states, tiny_config, tiny_federation

#: as many components for every partition
FIXED = ("closed.dimensions=8", "closed.per_dimension=0")
SECURE = "privacy.secure_sums=true"
SUMS = ("gram", "by_class", "class_counts")


class Federated:
    """A server and its sites, for conversations one by one."""

    def __init__(self, folder: Path, *settings: str, federation: Federation | None = None):
        config, method = tiny_config("closed", *settings), get_method("closed")
        self.data = federation or tiny_federation(config)
        setting = Setting.of(config, method, self.data)
        self.engine = LocalEngine(method, setting, self.data, folder)
        self.server = method.server_class(config)(setting)
        self.sites = [site.name for site in self.data.training_sites()]
        self.rounds = 0

    def talk(self, conversation_of, sites):
        """One round, of these sites."""
        self.rounds += 1
        self.engine.begin(self.rounds, 0)
        conversation, replies = conversation_of(sites), None
        while True:
            try:
                ask = next(conversation) if replies is None else conversation.send(replies)
            except StopIteration:
                break
            replies = exhaust(self.engine.ask(ask))
        self.server.state.check()
        self.engine.commit()

    def round(self, sites=None):
        self.talk(lambda asked: self.server.round(self.rounds, asked), sites or self.sites)

    def leave(self, leaving):
        self.talk(lambda asked: self.server.leave(leaving, asked), self.sites)

    def kept(self, site):
        return self.engine.states.load(site)

    def logits(self, view="global", site=None):
        """Logits of 40 images of noise."""
        client, noise = self.engine.client(self.server.setting), torch.Generator().manual_seed(1)
        client.workplace.begin(self.server.message(), self.kept(site) if site else None)
        client.workplace.set_mode(False)
        images = torch.randn(40, 3, 16, 16, generator=noise)
        with torch.no_grad():
            return client.predict(view, Batch(image=images))


@pytest.fixture
def federated(tmp_path):
    made = []

    def make(*settings, **more):
        made.append(Federated(tmp_path / str(len(made)), *settings, **more))
        return made[-1]

    yield make
    for one in made:
        one.engine.__exit__(None, None, None)


def assert_totals(federated, sites):
    """The server's total is the sum of what these sites have sent, to the last bit."""
    for name in SUMS:
        wanted = sum(federated.kept(site)[f"sent.{name}/"] for site in sites)
        assert federated.server.state.total[name].equal(wanted), name


def dealt(federation: Federation, count: int) -> Federation:
    """The federation's training images, dealt to so many sites in turn."""
    split = federation.pooled().sites[0].splits["train"]
    shares = (Split(split.store, split.rows[place::count], split.labels[place::count]) for place in range(count))
    return replace(
        federation, sites=tuple(Site(f"site {place}", {"train": share}) for place, share in enumerate(shares))
    )


@pytest.mark.parametrize("sites", [1, 2, 7])
def test_the_common_model_equals_pooling_for_every_partition(federated, sites):
    """Up to the last bits of an image's features, which differ from batch to batch."""
    one = federated("data.phantom.images=300", *FIXED)
    other = federated("data.phantom.images=300", *FIXED, federation=dealt(one.data, sites))
    one.round()
    other.round()
    torch.testing.assert_close(one.logits(), other.logits(), rtol=1e-6, atol=1e-6)


def test_by_default_another_dealing_to_as_many_sites_gives_the_same_model(federated):
    one = federated("data.phantom.images=300")
    other = federated("data.phantom.images=300", federation=dealt(one.data, 3))
    one.round()
    other.round()
    assert one.server.state.components == 210 // 3 // 8
    torch.testing.assert_close(one.logits(), other.logits(), rtol=1e-6, atol=1e-6)


def test_the_model_has_no_seed(federated, tmp_path):
    config = tiny_config("closed")
    net = build_net(config.net, 4, 3)
    save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, tmp_path / "net.safetensors")
    weights = f"net.weights='{tmp_path / 'net.safetensors'}'"
    data = tiny_federation(config)
    found = [federated(f"seed={seed}", weights, federation=data) for seed in (1, 2)]
    for one in found:
        one.round()
    net_head = {"head.weight", "head.bias"}
    assert net_head <= set(net.state_dict())
    assert found[0].logits().equal(found[1].logits())


@pytest.mark.parametrize("settings", [(), (SECURE, "data.phantom.sites=5")], ids=["plain", "secure sums"])
def test_sites_that_come_add_their_sums_and_sites_that_leave_take_them_back(federated, settings):
    here = federated(*settings)
    early, late = here.sites[: 3 if settings else 1], here.sites
    here.round(early)
    before = dict(here.server.state.total)
    here.round(late)
    assert_totals(here, late)
    here.round(late)  # what was sent is not added twice
    assert_totals(here, late)
    here.leave([site for site in late if site not in early])
    assert all(here.server.state.total[name].equal(before[name]) for name in SUMS)


def test_a_site_may_come_back(federated):
    here = federated()
    here.round()
    before = dict(here.server.state.total)
    here.leave(["site 2"])
    here.round(["site 2"])
    assert all(here.server.state.total[name].equal(before[name]) for name in SUMS)


def test_secure_sums_give_the_same_bits(tmp_path):
    plain = server_state(run_tiny(tmp_path / "plain", "closed"))
    assert_same_bits(plain, server_state(run_tiny(tmp_path / "secure", "closed", SECURE)))


def test_a_sites_own_model_goes_from_its_own_sums_to_the_common_model(federated):
    here, alone = federated("closed.others=1", *FIXED), federated("closed.others=0", *FIXED)
    here.round()
    alone.round()
    torch.testing.assert_close(here.logits("personal", "site 2"), here.logits("global"), rtol=1e-6, atol=1e-6)
    own = as_sums({name: alone.kept("site 2")[f"own.{name}/"] for name in SUMS})
    used = alone.server.state.components
    client = alone.engine.client(alone.server.setting)
    assert not alone.logits("personal", "site 2").equal(alone.logits("global"))
    client.workplace.begin(alone.server.message(), alone.kept("site 2"))
    torch.testing.assert_close(client.personal_head().weights, discriminant(own.first(used)).weights)


def test_the_mixture_counts_the_others_by_their_share(federated):
    here = federated("closed.others=0.3", *FIXED)
    here.round()
    parts = {site: as_sums({name: here.kept(site)[f"own.{name}/"] for name in SUMS}) for site in here.sites}
    own = parts.pop("site 2")
    for other in parts.values():
        own = own.plus(other, 0.3)
    client = here.engine.client(here.server.setting)
    client.workplace.begin(here.server.message(), here.kept("site 2"))
    wanted = discriminant(own.first(here.server.state.components))
    torch.testing.assert_close(client.personal_head().weights, wanted.weights, rtol=1e-8, atol=1e-8)


def test_classes_below_the_least_count_stay_in_the_sites_own_model_alone(federated):
    here = federated("privacy.least=6", "data.phantom.images=100", *FIXED)
    here.round()
    rare = 0
    for site in here.data.training_sites():
        counts = torch.from_numpy(site.class_counts(4)).double()
        kept = here.kept(site.name)
        assert kept["own.class_counts/"].equal(counts)
        assert kept["sent.class_counts/"].equal(torch.where(counts < 6, 0, counts))
        sent = as_sums({name: kept[f"sent.{name}/"] for name in SUMS})
        assert not sent.by_class[counts < 6].any()
        torch.testing.assert_close(sent.gram.trace(), counts[counts >= 6].sum())
        rare += int(((counts > 0) & (counts < 6)).sum())
    assert rare > 0, "no class of the phantom is rare"


def test_a_class_that_a_site_lacks_is_known_from_the_others(federated):
    here = federated("data.phantom.images=300", "data.phantom.missing=0.5", *FIXED)
    lacking = next(s for s in here.data.training_sites() if not s.class_counts(4).all()).name
    here.round()
    assert here.server.state.known.all()
    client = here.engine.client(here.server.setting)
    client.workplace.begin(here.server.message(), here.kept(lacking))
    assert client.personal_head().known.all()


def test_one_release_has_the_noise_that_was_asked_for_and_no_second_one(federated):
    pytest.importorskip("dp_accounting")
    here = federated("closed.epsilon=2", "data.phantom.images=300", "closed.dimensions=32", "closed.per_dimension=0")
    here.round()
    drawn = []
    for site in here.sites:
        kept = here.kept(site)
        drawn += [(kept[f"sent.{name}/"] - kept[f"own.{name}/"]).flatten() for name in SUMS]
    assert torch.cat(drawn).std().item() == pytest.approx(noise_scale(2.0, 1e-5, 2), rel=0.05)
    before = dict(here.server.state.total)
    here.round()
    assert all(here.server.state.total[name].equal(before[name]) for name in SUMS)


def test_random_directions_are_orthonormal_and_depend_on_no_image(federated):
    one = federated("closed.basis='random'", "closed.dimensions=8")
    other = federated("closed.basis='random'", "closed.dimensions=8", "data.phantom.images=300")
    for here in (one, other):
        here.round()
    whitening = one.server.state.whitening
    assert torch.allclose(whitening.T @ whitening, torch.eye(8, dtype=torch.float64))
    assert whitening.equal(other.server.state.whitening) and not one.server.state.total["gram"].equal(
        other.server.state.total["gram"]
    )


def test_with_random_directions_epsilon_pays_for_one_release(federated):
    pytest.importorskip("dp_accounting")
    here = federated("closed.epsilon=2", "closed.basis='random'", "data.phantom.images=300", "closed.dimensions=32")
    here.round()
    deviation, drawn = noise_scale(2.0, 1e-5, 1), []
    for site in here.sites:
        kept = here.kept(site)
        drawn.append(kept["sent.gram/"] - kept["own.gram/"])
    rows, columns = torch.triu_indices(32, 32)
    noise = torch.cat([gram[rows != columns] for gram in drawn])
    assert noise.std().item() == pytest.approx(deviation / 2**0.5, rel=0.1)
    assert torch.cat([gram[rows == columns] for gram in drawn]).std().item() == pytest.approx(deviation, rel=0.3)


def test_secure_sums_share_the_noise_out_among_the_answers_that_a_round_needs(federated):
    pytest.importorskip("dp_accounting")
    more = ("data.phantom.images=300", "closed.dimensions=32", "closed.per_dimension=0", "train.min_sites=3")
    here = federated("closed.epsilon=2", SECURE, *more)
    here.round()
    own = {name: sum(here.kept(site)[f"own.{name}/"] for site in here.sites) for name in SUMS}
    noise = torch.cat([(here.server.state.total[name] - own[name]).flatten() for name in SUMS])
    assert noise.std().item() == pytest.approx(noise_scale(2.0, 1e-5, 2), rel=0.07)


def test_nets_side_by_side_classify_their_features_together(federated, monkeypatch):
    built = []

    def small(config, num_classes, channels):
        built.append(config.name)
        return build_net(config.model_copy(update={"weights": "none"}), num_classes, channels)

    monkeypatch.setattr("equipoise.methods.closed.build_net", small)
    one, two = federated(*FIXED), federated(*FIXED, "closed.beside=['small-cnn']")
    assert set(built) == {"small-cnn"}
    assert len(two.server.state.mean) == 2 * len(one.server.state.mean)
    two.round()
    assert torch.isfinite(two.logits()).all()


def test_local_learning_sends_nothing_and_knows_its_own_classes_alone(tmp_path):
    folder = run_tiny(tmp_path, "closed-local", "data.phantom.missing=0.5", "train.rounds=1")
    (start,) = events(folder, "start")
    assert "train" not in start["disclosure"] and "moments" not in start["disclosure"]
    assert not server_state(folder)
    counts = {key.split("/")[0]: value for key, value in site_states(folder).items() if "own.class_counts" in key}
    assert any((value == 0).any() for value in counts.values())


@pytest.mark.parametrize("site", [None, "site 2"])
def test_its_models_leave_a_run_as_files(tmp_path, site):
    run_tiny(tmp_path / "run", "closed")
    card = export_model(tmp_path / "run", tmp_path / "model.pt2", site)
    assert card["model"] == ("personal" if site else "global")


def warnings_of(folder: Path, *settings: str) -> str:
    return " ".join(events(run_tiny(folder, "closed", "train.rounds=1", *settings), "start")[0]["warnings"])


def test_a_run_names_what_limits_it(tmp_path):
    few = warnings_of(tmp_path / "few", "closed.per_dimension=0", "closed.dimensions=32")
    assert "would send sums of up to 32 components over fewer than 256 images" in few
    assert "would send" not in warnings_of(tmp_path / "secure", SECURE, "closed.per_dimension=0")
    random = warnings_of(
        tmp_path / "random", "net.name=efficientnet-b0", "data.phantom.images=40", "data.phantom.size=32"
    )
    assert "whose weights are random; set net.weights" in random


def test_noise_whose_seed_the_server_knows_is_refused_between_hospitals():
    options = get_method("closed").options
    assert not options().only_simulated() and "the server knows" in options(epsilon=1.0).only_simulated()
