"""Servers and clients as runs compose them, without an engine around them: to lead through single asks and steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from equipoise.contract.method import Batch, Setting
from equipoise.contract.protocol import Ask, Replies, Reply
from equipoise.engine.local_engine import new_slot
from equipoise.engine.slot import Outcome, Request, exhaust
from equipoise.engine.training import SiteData
from equipoise.methods import get_method
from harness import tiny_config, tiny_federation


def setting_of(method: str, *settings: str, device: str = "cpu") -> Setting:
    """The setting of a tiny run."""
    config = tiny_config(method, *settings)
    return Setting.of(config, get_method(method), tiny_federation(config), device)


def server_of(setting: Setting) -> Any:
    """The server of a run, with its components."""
    return get_method(setting.config.method).server_class(setting.config)(setting)


def client_of(setting: Setting) -> Any:
    """The client of a run, with its components."""
    return get_method(setting.config.method).client_class(setting.config)(setting)


def answered(server: Any, number: int, replies: Mapping[str, Mapping[str, Any]]) -> list[Ask]:
    """Lead a server through a round in which these sites give these answers to every ask."""
    conversation = server.round(number, tuple(replies))
    asks = [next(conversation)]
    while True:
        try:
            asks.append(conversation.send(Replies([Reply(site, payload) for site, payload in replies.items()])))
        except StopIteration:
            return asks


def perform(setting: Setting, action: str, message: Mapping[str, Any], site: int = 0, number: int = 1) -> Outcome:
    """One action at one site of the tiny phantom."""
    slot = new_slot(get_method(setting.config.method), setting)
    place = tiny_federation(setting.config).sites[site]
    data = SiteData(place, setting.task, setting.device)
    return exhaust(slot.perform(Request(action, place.name, number), message, None, data))


def noise_of(size: int, *names: str) -> Batch:
    """A batch of noise with labels 0, 1, 2, 0, 1, ... and images under these names."""
    generator = torch.Generator().manual_seed(size)
    images = {name: torch.randn(size, 3, 16, 16, generator=generator) for name in names or ("image",)}
    return Batch(label=torch.arange(size) % 3, **images)
