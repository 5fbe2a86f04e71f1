"""The server: Flower's FedAvg, which notes when each round ended and how many bytes travelled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from equipoise.nets import build_net
from equipoise.nets.net_config import NetConfig

app = ServerApp()
LONGEST = 600.0  # seconds of a round


class Noted(FedAvg):
    """FedAvg with a clock."""

    def __init__(self, told: Path, **options: Any):
        super().__init__(**options)
        self.told = told
        self.rounds: list[dict[str, float]] = []

    def configure_train(self, server_round: int, arrays: ArrayRecord, *given: Any) -> Iterable[Message]:
        """As it is, with the bytes of a message noted."""
        self.down = arrays.count_bytes()
        return super().configure_train(server_round, arrays, *given)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """As it is, with the time noted."""
        replies = list(replies)
        if any(reply.has_error() for reply in replies):
            raise RuntimeError("a site did not answer")
        merged = super().aggregate_train(server_round, replies)
        up = sum(reply.content.array_records["arrays"].count_bytes() for reply in replies) / len(replies)
        self.rounds.append({"ended": time.time(), "down": self.down, "up": up})
        self.told.write_text(json.dumps(self.rounds))
        return merged


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All sites in every round."""
    told, sites = context.run_config, int(context.run_config["sites"])
    net = build_net(NetConfig(name=str(told["net"])), num_classes=8, channels=3)
    options = {"fraction_evaluate": 0.0, "min_train_nodes": sites, "min_available_nodes": sites}
    Noted(Path(str(told["times"])), **options).start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        num_rounds=int(told["rounds"]),
        timeout=LONGEST,
        train_config=ConfigRecord({"net": str(told["net"])}),
    )
