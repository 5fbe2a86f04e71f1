"""A method's client without an engine around it: for tests of single steps and of what a site holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from equipoise.components.averaging import FedAvgClient, FedAvgServer, SharedNet
from equipoise.contract.client import Gradients
from equipoise.contract.method import Batch, Client, Method, Server, Setting
from equipoise.contract.protocol import Replies, Reply
from equipoise.methods import get_method
from equipoise.nets import groups
from harness import site_states, tiny_config, tiny_federation

#: settings of a run that is over soon
SHORT = ("data.phantom.images=90", "evaluation.trained=false")
COUNTS = (6.0, 3.0, 1.0, 0.0)


def frozen_head_fedavg(method: str, shared_net: type[SharedNet], frozen: Sequence[str]) -> Method:
    """FedAvg of the net that a method trains, but for some entries that stay as they were first drawn."""

    class FrozenNet(shared_net):  # type: ignore[misc, valid-type]
        def shared_entries(self, net: nn.Module) -> list[str]:
            return [entry for entry in net.state_dict() if entry not in frozen]

    class FrozenServer(FrozenNet, FedAvgServer):
        pass

    class FrozenClient(FrozenNet, FedAvgClient):
        def build(self) -> None:
            super().build()
            self.keeps("frozen", self.net, frozen)
            self.phase("main", self.net, self.shared)

    return dataclasses.replace(
        get_method("fedavg"), server=FrozenServer, client=FrozenClient, options=get_method(method).options
    )


def new_server(method: str, *settings: str) -> Server:
    """The server of a tiny run, before its first round."""
    config = tiny_config(method, *settings)
    known = get_method(method)
    return known.server_class(config)(Setting.of(config, known, tiny_federation(config)))


def new_client(method: str, *settings: str, class_counts: Sequence[float] = COUNTS) -> Client:
    """A client that a site of `class_counts` images has just begun the first round with, in training mode."""
    server = new_server(method, *settings)
    client = get_method(method).client_class(server.setting.config)(server.setting)
    client.workplace.begin(server.message(), None)  # type: ignore[arg-type]
    client.class_counts.copy_(torch.tensor(class_counts))
    for phase in client.workplace.phases.values():
        phase.optimiser.lr.fill_(phase.optimiser.config.lr)
    client.workplace.set_mode(True)
    return client


def with_component(name: str, **options: object) -> tuple[str, ...]:
    """Settings that put a component with these options on a method."""
    return (f'components=["{name}"]', *(f"{name}.{key}={json.dumps(value)}" for key, value in options.items()))


def steps_of(server: Server, *changes: int) -> list[dict[str, Tensor]]:
    """How far the server moves each entry in rounds whose sites come back with a model changed by these numbers."""
    steps = []
    for number, change in enumerate(changes, 1):
        old = copied(server.state.model)
        conversation = server.round(number, ("a", "b"))
        next(conversation)
        models = {
            "a": {name: t + change - 1 for name, t in old.items()},
            "b": {n: t + change + 1 for n, t in old.items()},
        }
        with suppress(StopIteration):
            conversation.send(Replies([Reply(site, {"model": model, "examples": 5}) for site, model in models.items()]))
        steps.append({name: new - old[name] for name, new in server.state.model.items()})
    return steps


def assert_steps(server: Server, changes: Sequence[int], expected: Sequence[float]) -> None:
    """The server moves weights by so much in each round; running statistics take the sites' plain mean."""
    statistics = set(groups(server.new_net())["statistics"])
    for moved, change, step in zip(steps_of(server, *changes), changes, expected, strict=True):
        for name, tensor in moved.items():
            wanted = torch.full_like(tensor, change if name in statistics else step)
            torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-5)


def noise_batch(size: int = 8, classes: int = 3, seed: int = 0) -> Batch:
    """A batch of noise with labels 0, 1, 2, 0, 1, ..."""
    generator = torch.Generator().manual_seed(seed)
    return Batch(image=torch.randn(size, 3, 16, 16, generator=generator), label=torch.arange(size) % classes)


def adjusted(client: Client, loss: Tensor) -> Gradients:
    """The gradients of a loss by the net's parameters, as the optimiser would see them."""
    parameters = list(client.net.parameters())
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    return client.adjust(dict(zip(parameters, found, strict=True)))


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors as they are now."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """The names of tensors that differ in some bit."""
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


def kept_of(folder, site: str, name: str) -> dict[str, Tensor]:
    """What a site keeps under one declared name after a run, by entry."""
    prefix = f"{site}/kept/{name}/"
    return {key.removeprefix(prefix): t for key, t in site_states(folder).items() if key.startswith(prefix)}
