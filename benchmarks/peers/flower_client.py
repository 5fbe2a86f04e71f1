"""The site side of the job on Flower, in a file of its own because Ray's actors import it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from job import Job

app = ClientApp()


@lru_cache
def job_of(folder: str) -> Job:
    """The job, read once in each actor."""
    torch.set_num_threads(1)
    return Job(Path(folder))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received weights at the site that this node stands for."""
    config = message.content.config_records["config"]
    job, site = job_of(str(config["folder"])), int(context.node_config["partition-id"])
    net = job.new_net()
    net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    job.train(net, site, cast(int, config["server-round"]))
    metrics = MetricRecord({"num-examples": len(job.labels[site])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
