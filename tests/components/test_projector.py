"""Two views of each image in one forward pass, and their projections: FedIIC's and any other contrast's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from composed import client_of, noise_of, server_of, setting_of
from equipoise.contract.composed_client import ComposedClient
from harness import assert_same_bits, run_tiny, server_state

SMALL = ("fediic.projection=32",)
NO_CONTRAST = ("fediic.k1=0", "fediic.k2=0")


def test_server_and_sites_start_from_the_same_projector():
    setting = setting_of("fediic", *SMALL)
    site = client_of(setting).sides["projector"].module
    assert_same_bits(server_of(setting).state.projector, site.state_dict())


def test_the_projector_trains_with_the_net_and_is_averaged(tmp_path):
    client = client_of(setting_of("fediic", *SMALL))
    trained = {id(parameter) for parameter in client.workplace.phases["main"].optimiser.parameters}
    module = client.sides["projector"].module
    assert trained == {id(parameter) for part in (client.net, module) for parameter in part.parameters()}
    assert not any(client.workplace.phases["main"].optimiser.models), "gradients of both are clipped together"
    state = server_state(run_tiny(tmp_path, "fediic", *SMALL, "train.rounds=1"))
    assert not torch.equal(state["projector/hidden.weight"], module.hidden.weight)


def test_both_views_pass_through_the_net_at_once_and_keep_their_places():
    client, batch = client_of(setting_of("fediic", *SMALL)), noise_of(5, "image", "second")
    client.workplace.set_mode(True)
    client.outputs(batch)
    assert client.net.body[1].num_batches_tracked == 1
    client.workplace.set_mode(False)
    out = client.outputs(batch)
    for place, images in enumerate((batch.image, batch.second)):
        expected = client.sides["projector"].module(client.net.features(images))
        torch.testing.assert_close(out.projections[:, place], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.logits, client.net(batch.image))


def test_a_kept_second_view_changes_batch_norm_alone(tmp_path):
    """With `two_views = always` the second view is forwarded, but no loss reads it."""
    once = run_tiny(tmp_path / "one", "fediic", *NO_CONTRAST)
    twice = run_tiny(tmp_path / "two", "fediic", *NO_CONTRAST, "fediic.two_views='always'")
    one, two = server_state(once), server_state(twice)
    assert one.keys() == two.keys()
    assert not torch.equal(one["model/body.1.running_var"], two["model/body.1.running_var"])
    client = client_of(setting_of("fediic", *NO_CONTRAST, "fediic.two_views='always'", "fediic.dala=false"))
    client.workplace.set_mode(False)
    batch = noise_of(4, "image", "second")
    expected = F.cross_entropy(client.net(batch.image), batch.label)
    torch.testing.assert_close(client.loss(batch, client.outputs(batch)), expected)


@pytest.mark.parametrize(
    ("settings", "views"),
    [
        ((), ["image", "second"]),
        (("fediic.k2=0",), ["image", "second"]),
        (("fediic.k1=0",), ["image", "second"]),
        (NO_CONTRAST, ["image"]),
        ((*NO_CONTRAST, "fediic.two_views='always'"), ["image", "second"]),
    ],
    ids=["both", "intra", "inter", "none", "kept"],
)
def test_a_second_view_is_drawn_only_where_it_is_wanted(tmp_path, monkeypatch, settings, views):
    seen: set[str] = set()
    forward = ComposedClient.forward

    def spy(client, batch):
        if client.net.training:
            seen.update({"image", "second"} & vars(batch).keys())
        return forward(client, batch)

    monkeypatch.setattr(ComposedClient, "forward", spy)
    run_tiny(tmp_path, "fediic", *SMALL, "train.rounds=1", *settings)
    assert sorted(seen) == views
