"""FedNPR and FedNPR-Per as wholes: their limit, runs, personal classifiers and presets."""

import pytest
import torch

from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.engine.runs import make_config
from harness import all_state, assert_same_bits, events, run_tiny, server_state, site_states


def test_without_weight_fednpr_is_fedavg_with_a_balanced_softmax_bit_for_bit(tmp_path):
    without = run_tiny(tmp_path / "a", "fedavg", "train.loss='balanced_softmax'")
    zero = run_tiny(tmp_path / "b", "fednpr", "npr.weight=0")
    assert_same_bits(all_state(without), all_state(zero))


@pytest.mark.parametrize("method", ["fednpr", "fednpr-per"])
def test_loss_falls_on_the_phantom(tmp_path, method):
    folder = run_tiny(tmp_path / "a", method, "train.rounds=6", "evaluation.trained=false", "evaluation.every=6")
    losses = [sum(site["loss"] for site in event["sites"].values()) for event in events(folder, "round")]
    assert min(losses[-2:]) < 0.9 * losses[0]


def test_personal_classifiers_stay_at_their_sites_and_grow_apart(tmp_path):
    folder = run_tiny(tmp_path / "a", "fednpr-per")
    heads = [t for name, t in site_states(folder).items() if name.endswith("head.weight")]
    assert len(heads) == 3
    assert not torch.equal(heads[0], heads[1])
    assert not any("head" in name for name in server_state(folder))


def test_a_site_that_sits_out_keeps_its_classifier_and_prototypes(tmp_path):
    once = run_tiny(tmp_path / "a", "fednpr-per", "train.participation=0.34", "train.rounds=1")
    twice = run_tiny(tmp_path / "b", "fednpr-per", "train.participation=0.34", "train.rounds=2")
    first, second = (set(event["sites"]) for event in events(twice, "round"))
    assert not first & second
    after = {name: tensor for name, tensor in site_states(twice).items() if name.split("/")[0] in first}
    assert_same_bits(site_states(once), after)


def test_presets_hold_the_papers_numbers_and_an_unbuilt_source_is_named():
    for preset, weight, clusters, size in (("fednpr-isic", 0.1, 4, 224), ("fednpr-ich", 0.05, 2, 128)):
        config = make_config(preset)
        assert (config.npr.weight, config.npr.clusters, config.data.size) == (weight, clusters, size)
        assert (config.train.rounds, config.train.epochs, config.train.batch_size) == (80, 1, 64)
        assert config.train.loss == "balanced_softmax"
        assert config.train.optimiser.keep
        factors = [config.train.schedule.factor(r) for r in (58, 59, 68, 69)]
        assert factors == pytest.approx([1, 0.1, 0.1, 0.01])
        assert make_config(preset, method="fednpr-per").npr == config.npr
        assert make_config(preset, ["npr.weight=0.2"]).npr.weight == 0.2
        for other in ("fedavg", "fedbabu"):
            assert make_config(preset, method=other).npr.weight == 0, "comparisons run without NPR"
    with pytest.raises(UserError, match="rsna-ich"):
        load_federation(make_config("fednpr-ich").data, 1)
