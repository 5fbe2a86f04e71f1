"""The mean of all models that travel, as a global view beside personal models."""

import torch

from equipoise.methods import get_method
from harness import assert_same_bits, events, run_tiny, server_state, site_states, tiny_config


def test_the_global_model_is_the_mean_of_all_deputies_and_costs_the_personal_ones_nothing(tmp_path):
    plain = run_tiny(tmp_path / "plain", "prr", "train.rounds=1")
    (start,) = events(plain, "start")
    assert start["model_bytes"] > 4 * start["parameters"], "the size of the net, though each site has its own message"
    viewed = run_tiny(tmp_path / "viewed", "prr", "train.rounds=1", "prr.global_view=true")
    assert_same_bits(site_states(plain), site_states(viewed))
    means = {
        name.removeprefix("global_model/"): t for name, t in server_state(viewed).items() if "global_model" in name
    }
    norms = [t for name, t in site_states(viewed).items() if name.endswith("norm/body.1.running_var")]
    torch.testing.assert_close(means["body.1.running_var"], torch.stack(norms).mean(0))
    torch.testing.assert_close(means["head.weight"], server_state(viewed)["model/head.weight"])
    assert {event["view"] for event in events(viewed, "final")} == {"global", "personal"}


def test_batch_norm_leaves_the_sites_only_with_a_global_view():
    method = get_method("prr")
    plain, viewed = (
        method.client_class(tiny_config("prr", f"prr.global_view={wanted}")) for wanted in ("false", "true")
    )
    assert set(plain.discloses["train"]) == {"model", "examples", "prototypes", "prototype_counts"}
    assert set(viewed.discloses["train"]) - set(plain.discloses["train"]) == {"norm"}
    assert (plain.views, viewed.views) == (("personal",), ("global", "personal"))
    assert method.widest_sheet()["train"].keys() == viewed.discloses["train"].keys()
