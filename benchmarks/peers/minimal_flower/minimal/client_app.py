"""The site: two steps of SGD on eight images of noise."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional as F

from equipoise.nets import build_net
from equipoise.nets.net_config import NetConfig

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received weights, and send them back."""
    torch.set_num_threads(1)
    config = message.content.config_records["config"]
    net = build_net(NetConfig(name=str(config["net"])), num_classes=8, channels=3).train()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(2):
        optimiser.zero_grad()
        F.cross_entropy(net(torch.randn(8, 3, 32, 32)), torch.randint(0, 8, (8,))).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": 8})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
