"""NPR on any method: its loss, sub-clusters, what stays at a site, learning without labels, and hard sites."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from equipoise.components.averaging import FedAvgClient
from equipoise.contract.method import Batch, Setting
from equipoise.contract.protocol import Train
from equipoise.core.errors import UserError
from equipoise.data.augment import build_augmentation
from equipoise.engine.disclosure import disclosure_sheet
from equipoise.engine.local_engine import new_slot
from equipoise.engine.slot import EVALUATE, Outcome, Request, exhaust
from equipoise.engine.training import SiteData
from equipoise.methods import get_method
from equipoise.nets import entries_of
from equipoise.prototypes import sinkhorn, update_subclusters
from harness import (
    all_state,
    assert_same_bits,
    events,
    run_tiny,
    server_state,
    site_states,
    tiny_config,
    tiny_federation,
)


class Workplace:
    """One client of a method at one site of the tiny phantom, and the model that the server starts from."""

    def __init__(self, method: str, *settings: str, site: int = 0):
        self.config = tiny_config(method, *settings)
        federation = tiny_federation(self.config)
        known = get_method(method)
        self.setting = Setting.of(self.config, known, federation)
        self.slot = new_slot(known, self.setting)
        self.message = known.server_class(self.config)(self.setting).message()
        self.site = federation.training_sites()[site]
        self.data = SiteData(self.site, self.setting.task, self.setting.device)

    def use(self, client: type[FedAvgClient]) -> None:
        """Let the site work with another client, on which the same components are put."""
        method = dataclasses.replace(get_method(self.config.method), client=client)
        self.slot.client = method.client_class(self.config)(self.setting)

    @property
    def npr(self):
        """The site's side of NPR."""
        return self.slot.client.sides["npr"]

    def train(self, measure: tuple[str, ...] = ()) -> Outcome:
        """The first round at this site, and the trained model's scores on some parts."""
        request = Request("train", self.site.name, 1, measure=measure, views=("personal",))
        return exhaust(self.slot.perform(request, self.message, None, self.data))

    def features(self, part: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Unit features (n, D) of plain images as the first model sees them, and their labels."""
        net = self.setting.new_net().eval()
        plain = build_augmentation(self.config.augment, self.setting.image_size, self.setting.channels).plain
        images, _ = self.data[part].read(torch.arange(len(self.data[part])))
        with torch.no_grad():
            return F.normalize(net.features(plain(images)), dim=1), self.data[part].host_labels


def class_means(features: torch.Tensor, labels: torch.Tensor, num_classes: int) -> dict[int, torch.Tensor]:
    """The mean direction of each class with two images or more."""
    members = {c: features[labels == c] for c in range(num_classes)}
    return {c: F.normalize(rows.mean(0), dim=0) for c, rows in members.items() if len(rows) > 1}


@pytest.mark.parametrize("method", ["fedavg", "local", "fednpr-per", "fediic"])
def test_weight_alone_puts_it_on_a_method(method):
    known = get_method(method)
    without, added = (tiny_config(method, f"npr.weight={weight}") for weight in (0, 0.1))
    components = list(known.components_of(added))
    assert [c.weight for c in components if c.name == "npr"] == [0.1]
    assert list(known.components_of(without)) == [c for c in components if c.name != "npr"]
    if method in ("fedavg", "local"):
        assert known.client_class(without) is known.client and known.server_class(without) is known.server


def test_loss_is_the_supervised_loss_plus_weight_times_cross_entropy_of_layer_normed_cosines():
    place = Workplace("fednpr", "npr.weight=0.3", "npr.clusters=2")
    place.train()
    client, side = place.slot.client, place.npr
    generator = torch.Generator().manual_seed(3)
    present = side.clustered.nonzero().flatten()
    features = torch.randn(6, side.subclusters.shape[-1], generator=generator)
    logits = torch.randn(6, client.num_classes, generator=generator)
    labels = present[torch.arange(6) % len(present)]
    total = client.loss(Batch(image=features, label=labels), SimpleNamespace(features=features, logits=logits))

    expected = 0.0
    for row, label in zip(features, labels):
        cosines = [max(float(F.cosine_similarity(row, p, dim=0)) for p in side.subclusters[c]) for c in present]
        nearest = torch.tensor(cosines)
        scores = (nearest - nearest.mean()) / (nearest.var(unbiased=False) + 1e-5).sqrt()
        expected += float(-scores.log_softmax(0)[present.tolist().index(int(label))]) / len(features)
    supervised = float(client.supervised(logits, labels))
    assert float(total) == pytest.approx(supervised + 0.3 * expected, rel=1e-5)


def test_one_cluster_is_the_mean_direction_of_a_class_in_the_received_model():
    place = Workplace("fednpr", "npr.clusters=1")
    kept = place.train().kept
    means = class_means(*place.features("train"), place.setting.num_classes)
    assert kept["clustered/"].nonzero().flatten().tolist() == sorted(means)
    for c, mean in means.items():
        torch.testing.assert_close(kept["subclusters/"][c, 0], mean, rtol=1e-4, atol=1e-5)


def test_without_supervision_one_cluster_is_a_nearest_mean_classifier():
    place = Workplace("fednpr-per", "npr.clusters=1", "npr.supervised=false")
    request = Request(EVALUATE, place.site.name, 1, measure=("valid",), views=("personal",))
    outcome = exhaust(place.slot.perform(request, place.message, None, place.data))
    means = class_means(*place.features("train"), place.setting.num_classes)
    features, labels = place.features("valid")
    nearest = torch.tensor(sorted(means))[(features @ torch.stack([means[c] for c in sorted(means)]).T).argmax(1)]
    expected = torch.zeros(place.setting.num_classes, place.setting.num_classes, dtype=torch.long)
    for label, prediction in zip(labels, nearest):
        expected[label, prediction] += 1
    assert torch.equal(outcome.measures["personal.valid"]["confusion"], expected)


def test_subclusters_of_well_spread_features_are_balanced():
    generator = torch.Generator().manual_seed(0)
    features = F.normalize(torch.randn(400, 16, generator=generator), dim=1)
    labels = torch.zeros(400, dtype=torch.long)
    prototypes = 0.02 * torch.randn(1, 4, 16, generator=generator)
    for _ in range(5):
        sizes = torch.bincount(sinkhorn(features @ F.normalize(prototypes[0], dim=1).T).argmax(1), minlength=4)
        assert (sizes - 100).abs().max() <= 15
        prototypes = update_subclusters(features, labels, prototypes)


@pytest.mark.parametrize(("cluster", "finds"), [("sinkhorn", True), ("random", False), ("released", False)])
def test_only_sinkhorn_finds_the_modes_of_a_class(cluster, finds):
    """Three equal modes at right angles: Sinkhorn's prototypes end on them, the controls' near their common mean."""
    generator = torch.Generator().manual_seed(1)
    modes = torch.eye(3, 12)
    features = modes.repeat_interleave(40, 0) + 0.05 * torch.randn(120, 12, generator=generator)
    prototypes = 0.02 * torch.randn(1, 3, 12, generator=generator)
    for _ in range(10):
        prototypes = update_subclusters(features, torch.zeros(120, dtype=torch.long), prototypes, cluster, generator)
    reached = (modes @ prototypes[0].T).amax(1)
    assert bool((reached > 0.95).all()) is finds


def test_prototypes_have_unit_norm_and_stay_at_the_site(tmp_path):
    folder = run_tiny(tmp_path / "a", "fednpr")
    states = site_states(folder)
    prototypes = {name: t for name, t in states.items() if "subclusters" in name}
    assert len(prototypes) == 3
    for tensor in prototypes.values():
        torch.testing.assert_close(tensor.norm(dim=-1), torch.ones(tensor.shape[:2]), rtol=1e-5, atol=1e-5)
    shapes = {tuple(t.shape) for t in prototypes.values()}
    assert not any(tuple(t.shape) in shapes or "cluster" in name for name, t in server_state(folder).items())
    assert events(folder, "start")[0]["disclosure"] == disclosure_sheet(FedAvgClient)


def test_reply_holds_only_what_is_disclosed():
    place = Workplace("fednpr")
    assert set(place.train().payload) == {"model", "examples"}


@pytest.mark.parametrize("site", [0, 1, 2])
def test_classes_with_fewer_than_two_images_do_not_attract(site):
    place = Workplace("fednpr", "data.phantom.missing=0.5", site=site)
    place.train()
    side = place.npr
    counts = torch.from_numpy(place.site.class_counts(place.setting.num_classes))
    assert (counts < 2).any()
    assert torch.equal(side.clustered, counts > 1)

    features, labels = place.features("train")
    before = side.pull(Batch(image=features, label=labels), SimpleNamespace(features=features))
    side.subclusters[counts < 2] = features[0]
    assert torch.equal(side.pull(Batch(image=features, label=labels), SimpleNamespace(features=features)), before)


def test_a_site_with_a_single_image_trains_as_without_npr(tmp_path):
    """No class has two images, so that NPR has nothing to say."""
    with_it = run_tiny(tmp_path / "a", "fednpr", "data.limit=1")
    without = run_tiny(tmp_path / "b", "fednpr", "data.limit=1", "npr.weight=0")
    assert_same_bits(server_state(with_it), server_state(without))


@pytest.mark.parametrize("method", ["local", "central", "fedavg", "fediic"])
def test_npr_on_top_of_a_method_changes_training_and_keeps_prototypes(tmp_path, method):
    plain = all_state(run_tiny(tmp_path / "a", method, "train.rounds=1"))
    added = all_state(run_tiny(tmp_path / "b", method, "train.rounds=1", "npr.weight=0.1"))
    assert any(name.endswith("subclusters/") for name in added)
    assert not any(name.endswith("subclusters/") for name in plain)
    assert all(torch.isfinite(tensor).all() for tensor in added.values() if tensor.is_floating_point())
    weights = [name for name in plain if name.endswith("body.0.weight")]
    assert weights
    assert not any(torch.equal(added[name], plain[name]) for name in weights)


@pytest.mark.parametrize("cluster", ["random", "released"])
def test_control_clusterings_give_other_prototypes_than_sinkhorn(cluster):
    chosen = Workplace("fednpr", f"npr.cluster='{cluster}'").train().kept
    balanced = Workplace("fednpr").train().kept
    present = balanced["clustered/"]
    assert not torch.allclose(chosen["subclusters/"][present], balanced["subclusters/"][present], atol=1e-3)


def test_without_supervision_the_classifier_never_moves(tmp_path):
    folder = run_tiny(tmp_path / "a", "fednpr-per", "npr.supervised=false")
    first = Workplace("fednpr-per").setting.new_net().state_dict()["head.weight"]
    heads = [t for name, t in site_states(folder).items() if name.endswith("head.weight")]
    assert len(heads) == 3
    assert all(torch.equal(head, first) for head in heads)


def test_without_supervision_a_trained_model_predicts_by_its_own_prototypes():
    """Not by those of the model before its training; what is kept for the next round are those of the round."""
    place = Workplace("fednpr-per", "npr.supervised=false")
    side, net = place.npr, place.slot.client.net
    found, predicted = [], []
    find, predict = side.begin, side.predict

    def watched_find(message):
        yield from find(message)
        found.append((net.body[0].weight.clone(), side.subclusters.clone()))

    def watched_predict(view, batch):
        predicted.append((net.body[0].weight.clone(), side.subclusters.clone()))
        return predict(view, batch)

    side.begin, side.predict = watched_find, watched_predict
    kept = place.train(measure=("valid",)).kept
    (received, of_round), (trained, renewed) = found
    assert not torch.equal(received, trained)
    assert torch.equal(kept["subclusters/"], of_round) and not torch.equal(of_round, renewed)
    assert predicted and all(torch.equal(net, trained) and torch.equal(p, renewed) for net, p in predicted)


def test_without_supervision_a_phase_that_trains_the_classifier_alone_does_nothing():
    """As in FedRep, with an optimiser that counts its steps."""

    class HeadFirst(FedAvgClient):
        def build(self):
            super().build()
            self.phase("head", self.net, entries_of(self.net, "head"))

        def train(self, message):
            yield Train(phase="head")
            return self.update()

    place = Workplace("fedavg", "npr.weight=0.1", "npr.supervised=false", "train.optimiser.name='adam'")
    place.use(HeadFirst)
    model = place.train().payload["model"]
    weights = [name for name, tensor in model.items() if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(model[name], place.message["model"][name]) for name in weights)


def test_without_supervision_a_mixture_of_two_nets_stays_as_it_is(tmp_path):
    folder = run_tiny(tmp_path / "a", "apfl", "npr.weight=0.1", "npr.supervised=false", "train.rounds=1")
    state = all_state(folder)
    shares = [tensor for name, tensor in state.items() if name.rstrip("/").endswith("/alpha")]
    assert len(shares) == 3 and all(share == 0.5 for share in shares)


def test_a_forward_pass_without_features_is_refused_with_a_message():
    class Bare(FedAvgClient):
        def forward(self, batch):
            return SimpleNamespace(logits=super().forward(batch).logits)

    place = Workplace("fedavg", "npr.weight=0.1")
    place.use(Bare)
    with pytest.raises(UserError, match=r"fedavg has a forward pass without features"):
        place.train()


def test_training_by_nothing_is_refused():
    with pytest.raises(UserError, match=r"leaves nothing to train"):
        tiny_config("fedavg", "npr.supervised=false")


RELEASED_TO = torch.tensor([True, True, False, False])


@pytest.mark.parametrize("classes", ["present", "all"])
def test_classes_that_a_site_lacks_compete_where_asked_for(classes):
    """With all classes, layer norm and softmax are over all, absent ones as the random directions that were drawn."""
    npr = Workplace("fedavg", "npr.weight=0.1", f"npr.classes='{classes}'").npr
    npr.clustered.copy_(RELEASED_TO)
    draws = torch.Generator().manual_seed(0)
    features = torch.randn(6, npr.subclusters.shape[-1], generator=draws)
    labels = torch.arange(6) % 2
    batch = Batch(image=torch.zeros(6, 3, 16, 16), label=labels)
    cosines = torch.einsum("bd,ckd->bck", F.normalize(features, dim=1), F.normalize(npr.subclusters, dim=-1)).amax(-1)
    scores = F.layer_norm(cosines, (4,)) if classes == "all" else F.layer_norm(cosines[:, :2], (2,))
    found = npr.pull(batch, SimpleNamespace(features=features))
    torch.testing.assert_close(found, F.cross_entropy(scores, labels))


def test_fednpr_can_be_set_as_released_as_a_whole(tmp_path):
    released = ("npr.weight=1", "npr.cluster='released'", "npr.view='augmented'", "npr.classes='all'")
    folder = run_tiny(tmp_path, "fednpr-per", *released)
    assert not [text for text in events(folder, "start")[0]["warnings"] if "npr" in text]
