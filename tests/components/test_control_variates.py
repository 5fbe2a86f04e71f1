"""Control variates on methods besides FedAvg: the server's is the mean of the sites' own, and steps are corrected."""

from __future__ import annotations

import pytest
import torch

from clients import kept_of, new_client, with_component
from harness import run_tiny, server_state, site_sizes

CONTROLLED = with_component("control-variates")


@pytest.mark.parametrize("method", ["fedlc", "fednpr", "fedprox"])
def test_the_common_variate_is_the_mean_of_the_sites_own(tmp_path, method):
    folder = run_tiny(tmp_path, method, *CONTROLLED, "train.participation=0.7")
    sizes, state = site_sizes(), server_state(folder)
    own = {site: kept_of(folder, site, "control-variates.own_variate") for site in sizes}
    for name in next(variate for variate in own.values() if variate):
        mean = sum(sizes[site] * variate[name] for site, variate in own.items() if variate) / sum(sizes.values())
        torch.testing.assert_close(state[f"control-variates.variate/{name}"], mean, rtol=1e-5, atol=1e-5)


def test_under_local_norm_a_step_is_corrected_as_in_scaffold():
    client = new_client("fedbn", *CONTROLLED)
    side = client.sides["control-variates"]
    for scale, variates in ((2.0, side.correction), (0.5, side.own)):
        for buffer in variates.buffers():
            buffer.fill_(scale)
    next(client.train({}))
    found = client.adjust({parameter: torch.ones_like(parameter) for parameter in client.net.parameters()})
    assert all(torch.equal(g, torch.full_like(g, 1 - 0.5 + 2.0)) for g in found.values())
