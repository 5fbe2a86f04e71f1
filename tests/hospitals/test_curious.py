"""What an honest but curious hospital is sent: nothing that another hospital sent or keeps."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr")

from equipoise.hospitals.parcels import Parcel
from postbox import Hospitals, Postbox


class Overhears(Postbox):
    """Notes the tensors that travel, both ways: what each site is sent, and what each has sent before that."""

    def carry(self, site, parcel):
        self.told = getattr(self, "told", {})
        self.read = [*getattr(self, "read", ()), *((site, name, tensor) for name, tensor in parcel.tensors.items())]
        reply = super().carry(site, parcel)
        if isinstance(reply, Parcel):
            self.told.setdefault(site, []).extend(reply.tensors.values())
        return reply


def telling(tensor: torch.Tensor) -> bool:
    """Whether a tensor is made of images: counters and first values are equal everywhere."""
    return tensor.is_floating_point() and tensor.numel() > 1 and tensor.flatten().unique().numel() > 1


@pytest.mark.parametrize("method", ["fedavg", "prr", "fediic", "fednpr-per", "scaffold"])
def test_a_hospital_is_sent_no_tensor_that_another_one_sent(tmp_path, method):
    hospitals = Hospitals(tmp_path, method, post=Overhears)
    hospitals.run()
    sent = {site: {t.numpy().tobytes() for t in told if telling(t)} for site, told in hospitals.post.told.items()}
    assert all(sent.values())
    for site, name, tensor in hospitals.post.read:
        others = set.union(*(known for other, known in sent.items() if other != site)) - sent[site]
        assert tensor.numpy().tobytes() not in others, f"{site} was sent '{name}' of another site"
