"""Differential privacy between hospitals: noise is made of a secret of the site, and descriptions carry it, too."""

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("opacus")

from equipoise.hospitals.descriptions import describe
from harness import events, run_tiny, server_state
from postbox import Hospitals

PRIVATE = ("privacy.epsilon=8", "net.group_norm=true", "train.batch_size=16", "privacy.counts_noise=4")


def test_between_hospitals_numbers_of_images_carry_noise_that_the_server_cannot_make(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", *PRIVATE)
    told = {site: office.described(hospitals.config)["counts"] for site, office in hospitals.post.offices.items()}
    folder = hospitals.run()
    local = run_tiny(tmp_path / "local", "fedavg", *PRIVATE)
    assert set(server_state(local)) == set(server_state(folder))
    assert any(not torch.equal(server_state(local)[name], value) for name, value in server_state(folder).items())
    (start,) = events(folder, "start")
    for site in start["sites"]:
        exact = describe(site["name"], hospitals.federation)["counts"]
        assert {part: site[part] for part in exact} == told[site["name"]]
        assert all(site[part] != exact[part] for part in exact if any(exact[part]))
        images = start["certificate"]["sites"][site["name"]]["images"]
        assert images == sum(site["train"])
    secrets = [(hospitals.records(site) / "noise.key") for site in told]
    assert len({path.read_text() for path in secrets}) == len(secrets)
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
