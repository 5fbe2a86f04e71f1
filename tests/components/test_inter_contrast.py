"""The server's prototypes of FedIIC: made of the classifier, and driven apart."""

import pytest
import torch

from composed import server_of, setting_of
from harness import run_tiny, server_state

ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001")


def largest_cosine(prototypes: torch.Tensor) -> float:
    """The largest cosine between two different prototypes (C, D) of unit norm."""
    torch.testing.assert_close(prototypes.norm(dim=1), torch.ones(len(prototypes)))
    cosines = prototypes @ prototypes.T
    return float(cosines.fill_diagonal_(-1.0).max())


def test_prototypes_become_orthogonal_in_a_run(tmp_path):
    apart = server_state(run_tiny(tmp_path / "apart", "fediic", *ADAM))["prototypes"]
    raw = server_state(run_tiny(tmp_path / "raw", "fediic", "fediic.orthogonalise=false", *ADAM))["prototypes"]
    assert abs(largest_cosine(apart)) < 0.02
    assert largest_cosine(raw) > 0.5


def test_prototypes_with_the_diagonal_left_out_form_a_simplex(tmp_path):
    folder = run_tiny(tmp_path, "fediic", "fediic.diagonal='exclude'", *ADAM)
    assert largest_cosine(server_state(folder)["prototypes"]) == pytest.approx(-1 / 3, abs=0.05)


@pytest.mark.parametrize("relu", [False, True])
def test_prototypes_are_the_projected_weights_of_the_classifier(relu):
    options = ("fediic.orthogonalise=false", f"fediic.projector_relu={str(relu).lower()}", "fediic.projection=32")
    server = server_of(setting_of("fediic", *options))
    weights, projector = server.state.model["head.weight"], server.state.projector
    hidden = weights @ projector["hidden.weight"].T + projector["hidden.bias"]
    hidden = hidden.clamp(min=0) if relu else hidden
    expected = hidden @ projector["output.weight"].T + projector["output.bias"]
    found = server.sides["inter-contrast"].prototypes()
    torch.testing.assert_close(found, expected / expected.norm(dim=1, keepdim=True))
