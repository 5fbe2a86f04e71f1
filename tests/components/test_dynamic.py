"""Dynamic regularisation on methods besides FedAvg: sites keep their drift, and the server knows its mean."""

from __future__ import annotations

import pytest
import torch

from clients import kept_of, with_component
from harness import run_tiny, server_state, site_sizes


@pytest.mark.parametrize("method", ["fedfocal", "fednpr", "moon"])
def test_the_servers_correction_is_the_mean_of_what_sites_keep(tmp_path, method):
    folder = run_tiny(tmp_path, method, *with_component("dynamic", alpha=0.2), "train.participation=0.7")
    sizes, state = site_sizes(), server_state(folder)
    kept = {site: kept_of(folder, site, "dynamic.offset") for site in sizes}
    for name in next(offset for offset in kept.values() if offset):
        mean = sum(sizes[site] * offset[name] for site, offset in kept.items() if offset) / sum(sizes.values())
        correction = state[f"dynamic.correction/{name}"]
        assert correction.any()
        torch.testing.assert_close(correction, mean, rtol=1e-5, atol=1e-5)
