"""The proximal term on methods besides FedAvg: it pulls whatever gradients they have."""

from __future__ import annotations

import pytest
import torch

from clients import new_client, with_component


@pytest.mark.parametrize("method", ["fedbn", "fedlc", "fediic"])
def test_the_pull_comes_on_top_of_the_gradients_of_the_net(method):
    """FedIIC's projector, which trains beside the net, is not pulled."""
    client = new_client(method, *with_component("prox", mu=0.3))
    next(client.train({}))
    parameters = client.workplace.phases["main"].optimiser.parameters
    start = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.5)
    found = client.adjust({parameter: torch.ones_like(parameter) for parameter in parameters})
    own = {id(parameter) for parameter in client.net.parameters()}
    for parameter, old in zip(parameters, start, strict=True):
        drift = parameter.detach() - old if id(parameter) in own else 0.0
        torch.testing.assert_close(found[parameter], 1 + 0.3 * (drift + torch.zeros_like(old)))
