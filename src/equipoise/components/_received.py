"""Shared by components that hold a site's net to the predictions of the net that it received."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from torch import Tensor

from equipoise.contract.client import PerBatch
from equipoise.contract.component import Batch, SiteSide
from equipoise.contract.protocol import Payload, Work


class ReceivedTeacherSite(SiteSide):
    """Keeps a frozen copy of the received net for the round."""

    def build(self) -> None:
        self.received = self.client.new_net()
        self.scratch("received", self.client.reference(self.received))

    def begin(self, message: Payload) -> Generator[Work, Any, None]:
        self.client.copy(self.client.net, self.received)
        yield from ()

    def prepare(self, chunk: Batch) -> Mapping[str, Tensor | PerBatch]:
        """Logits (n, C) of the frozen net, for many batches at once."""
        logits = self.client.classified(self.client.logits(self.received, chunk))
        return {f"{self.options.name}_teacher": logits}

    def taught(self, batch: Batch) -> Tensor:
        """The frozen net's logits (B, C) for a batch."""
        logits: Tensor = getattr(batch, f"{self.options.name}_teacher")
        return logits
