"""The closed form on a trained body: of the model that the round leaves, common or each site's own."""

from __future__ import annotations

import pytest
import torch

from compositions import configured, played
from equipoise.closed_form import discriminant, principal, sums_of, whitened
from equipoise.contract.method import Batch, Setting
from equipoise.core.errors import UserError
from equipoise.data.augment import build_augmentation
from equipoise.methods import get_method
from harness import assert_same_bits, events, run_tiny, server_state, site_states, tiny_config, tiny_federation

HEAD = "components=['closed-head']"
FIXED = (HEAD, "closed-head.dimensions=6", "closed-head.per_dimension=0", "data.phantom.images=120")


def features_of(net, site, config):
    """Pooled features (n, D) and labels (n,) of a site's training images."""
    part = site.splits["train"]
    plain = build_augmentation(config.augment, 16, 3).plain
    with torch.no_grad():
        images = plain(part.images(torch.arange(len(part))), None)
        return net.eval().features(images), torch.from_numpy(part.labels)


def scores_by_hand(features, labels):
    """The recipe on one set of images: whitening, unit length, discriminant analysis."""
    wide = features.double()
    mean, whitening = principal(wide.T @ wide, wide.sum(0), len(wide), 6)
    ready = whitened(features, mean, whitening)
    return discriminant(sums_of(ready, labels, 4)).scores(ready)


def client_after(folder, config, site=None):
    """The run's client with the server's last message, and a site's state."""
    method = get_method(config.method)
    client = method.client_class(config)(Setting.of(config, method, tiny_federation(config)))
    state = server_state(folder)
    model = {name.removeprefix("model/"): t for name, t in state.items() if name.startswith("model/")}
    kept = {
        name.removeprefix(f"{site}/kept/"): t for name, t in site_states(folder).items() if name.startswith(f"{site}/")
    }
    client.workplace.begin({**state, "model": model}, kept or None)
    client.workplace.set_mode(False)
    return client


def predicted(client, site, config, view):
    part = site.splits["train"]
    images = build_augmentation(config.augment, 16, 3).plain(part.images(torch.arange(len(part))), None)
    with torch.no_grad():
        return client.predict(view, Batch(image=images)).double()


def test_a_common_head_is_that_of_all_images_under_the_averaged_model(tmp_path):
    config = tiny_config("fedavg", *FIXED)
    client = client_after(run_tiny(tmp_path, "fedavg", *FIXED), config)
    sites = tiny_federation(config).training_sites()
    found = [features_of(client.net, site, config) for site in sites]
    wanted = scores_by_hand(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    told = torch.cat([predicted(client, site, config, "global") for site in sites])
    torch.testing.assert_close(told, wanted, rtol=1e-4, atol=1e-4)


def test_a_head_of_own_sums_is_that_of_the_sites_images_under_its_own_body(tmp_path):
    settings = (*FIXED, "evaluation.trained=false")
    config = tiny_config("fedbn", *settings)
    folder = run_tiny(tmp_path, "fedbn", *settings)
    for site in tiny_federation(config).training_sites():
        client = client_after(folder, config, site.name)
        wanted = scores_by_hand(*features_of(client.net, site, config))
        torch.testing.assert_close(predicted(client, site, config, "personal"), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("method", "sends"), [("fedavg", True), ("fedbn", False), ("local", False), ("prr", False)])
def test_sums_leave_a_site_where_the_body_is_common(method, sends):
    sheet = get_method(method).client_class(tiny_config(method, HEAD)).discloses
    assert bool(sheet.get("closed-head.sums")) == sends
    assert bool(sheet.get("closed-head.moments")) == sends


def test_common_sums_of_personal_bodies_are_refused():
    config = tiny_config("fedavg", HEAD, "closed-head.sums=common")
    assert get_method("fedavg").components_of(config)[0].common
    with pytest.raises(UserError, match="closed-head needs a model on the server"):
        tiny_config("local", HEAD, "closed-head.sums=common")


def test_at_the_end_alone_the_nets_own_head_predicts_before():
    late, plain = (
        played(configured("fedavg", names, "train.rounds=3", *more))
        for names, more in ((["closed-head"], ["closed-head.when=end"]), ([], []))
    )
    assert not late.differences(plain), "two of three rounds are played"
    assert played(configured("fedavg", ["closed-head"], "closed-head.when=end")).differences(plain)


def test_training_goes_on_as_without_it(tmp_path):
    plain = server_state(run_tiny(tmp_path / "plain", "fedavg", "data.phantom.images=120"))
    headed = server_state(run_tiny(tmp_path / "headed", "fedavg", *FIXED))
    assert_same_bits(plain, {name: headed[name] for name in plain})


def test_secure_sums_give_the_same_head_for_the_same_model(tmp_path):
    settings = (*FIXED, "train.rounds=1", "train.optimiser.lr=1e-12")
    plain = server_state(run_tiny(tmp_path / "plain", "fedavg", *settings))
    secure = server_state(run_tiny(tmp_path / "secure", "fedavg", *settings, "privacy.secure_sums=true"))
    for name in ("closed-head.whitening", "closed-head.weights", "closed-head.offsets"):
        torch.testing.assert_close(secure[name], plain[name], rtol=1e-3, atol=1e-4)
    assert events(tmp_path / "secure", "final")
