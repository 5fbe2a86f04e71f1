"""APFL's global net is FedAvg's whatever the mixture; a mixture of its own net alone is local training, bit for bit.

All this without dropout, whose draws the two nets share.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from clients import SHORT, kept_of, new_client, noise_batch
from harness import assert_same_bits, events, run_tiny, server_state

SITES = ("site 1", "site 2", "site 3")


@pytest.mark.parametrize("clip", [(), ("train.optimiser.clip=0.5",)], ids=["whole", "clipped"])
@pytest.mark.parametrize("settings", [(), ("apfl.alpha=0", "apfl.learn='never'")], ids=["learned", "all global"])
def test_the_global_net_is_fedavg(tmp_path, settings, clip):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT, *clip)
    limit = run_tiny(tmp_path / "apfl", "apfl", *SHORT, *settings, *clip)
    assert_same_bits(server_state(plain), server_state(limit))


def test_a_mixture_of_its_own_net_alone_is_local_training(tmp_path):
    alone = run_tiny(tmp_path / "local", "local", *SHORT)
    limit = run_tiny(tmp_path / "apfl", "apfl", *SHORT, "apfl.alpha=1", "apfl.learn='never'")
    for site in SITES:
        assert_same_bits(kept_of(alone, site, "net"), kept_of(limit, site, "personal"))
        assert kept_of(limit, site, "alpha")[""] == 1


def apart(client) -> None:
    """Move the site's own net away from the global one."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in client.personal.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def mixed(client, alpha: float) -> dict[str, torch.Tensor]:
    """alpha v + (1 - alpha) w, written out."""
    pairs = zip(client.personal.named_parameters(), client.net.parameters())
    return {name: (alpha * v + (1 - alpha) * w).detach().requires_grad_() for (name, v), w in pairs}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_a_step_moves_both_nets_and_the_mixture_by_their_gradients(alpha):
    """w by f(w); v by alpha f'(v̄); alpha by <v - w, f'(v̄)>, all at the same point."""
    client = new_client("apfl", f"apfl.alpha={alpha}", "apfl.learn='step'", "train.optimiser.momentum=0")
    client.workplace.set_mode(True, "eval")
    apart(client)
    rate, batch, mixture = 0.02, noise_batch(), mixed(client, alpha)
    v = [p.detach().clone() for p in client.personal.parameters()]
    w = [p.detach().clone() for p in client.net.parameters()]
    own = F.cross_entropy(functional_call(client.personal, mixture, (batch.image,)), batch.label)
    at_mixture = torch.autograd.grad(own, list(mixture.values()))
    at_global = torch.autograd.grad(
        F.cross_entropy(client.net(batch.image), batch.label), list(client.net.parameters())
    )
    client.step([batch], client.workplace.phases["main"])
    slope = sum(((a - b) * g).sum() for a, b, g in zip(v, w, at_mixture))
    expected = min(max(alpha - rate * float(slope), 0.0), 1.0)
    assert client.alpha.item() == pytest.approx(expected, abs=1e-6)
    for found, old, g in zip(client.personal.parameters(), v, at_mixture):
        torch.testing.assert_close(found.detach(), old - rate * alpha * g, atol=1e-6, rtol=1e-4)
    for found, old, g in zip(client.net.parameters(), w, at_global):
        torch.testing.assert_close(found.detach(), old - rate * g, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("learn", "moves"), [("round", [True, False, False]), ("step", [True] * 3), ("never", [False] * 3)]
)
def test_alpha_moves_as_often_as_it_is_told(learn, moves):
    client = new_client("apfl", f"apfl.learn='{learn}'")
    apart(client)
    found = []
    for seed in range(3):
        before = client.alpha.item()
        client.step([noise_batch(seed=seed)], client.workplace.phases["main"])
        found.append(client.alpha.item() != before)
    assert found == moves


def test_alpha_stays_a_share_however_steep_the_slope():
    client = new_client("apfl", "apfl.learn='step'", "train.optimiser.lr=1000")
    apart(client)
    client.step([noise_batch()], client.workplace.phases["main"])
    assert client.alpha.item() in (0.0, 1.0)


def test_the_personal_model_is_the_mixture_under_statistics_of_its_own():
    client = new_client("apfl", "apfl.alpha=0.3")
    apart(client)
    batch = noise_batch()
    client.step([batch], client.workplace.phases["main"])
    client.workplace.set_mode(False)
    expected = functional_call(client.personal, mixed(client, client.alpha.item()), (batch.image,))
    torch.testing.assert_close(client.predict("personal", batch), expected)
    assert torch.equal(client.predict("global", batch), client.net(batch.image))
    assert not torch.equal(client.personal.body[1].running_mean, client.net.body[1].running_mean)


def test_sites_learn_mixtures_of_their_own_and_keep_them(tmp_path):
    folder = run_tiny(tmp_path, "apfl", *SHORT, "apfl.learn='step'")
    shares = {kept_of(folder, site, "alpha")[""].item() for site in SITES}
    assert len(shares) == 3 and all(0 <= share <= 1 for share in shares) and 0.5 not in shares
    assert {e["view"] for e in events(folder, "final")} == {"global", "personal"}
