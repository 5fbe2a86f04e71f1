"""PRR-Imbalance's CPA loss at a site: class counts of the federation, and prototypes that say which classes lag behind.

Chen et al., 2022, Section III-D; the formula itself is `conjoint_prototype_aligned`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from equipoise.components._merging import class_means
from equipoise.components.averaging import FedAvgClient
from equipoise.contract.method import Batch
from equipoise.contract.protocol import Payload
from equipoise.losses import conjoint_prototype_aligned, membership

COUNTS_DISCLOSURE = {"class_counts": "number of local training images of each class (only with cpa_global)"}
PROTOTYPE_DISCLOSURE = {
    "prototypes": "mean feature of each class under the personal model (only with cpa_local)",
    "prototype_counts": "number of training images behind each prototype (only with cpa_local)",
}


class CPAClient(FedAvgClient):
    """Trains by the CPA loss (Eq. 13) or by one of its halves, and gathers prototypes while it trains."""

    def build_cpa(self) -> None:
        """Declare the counts (C,) and prototypes (C, D) that the loss reads; a prototype of zeros is unknown."""
        shape = (self.num_classes, self.net.feature_size)
        if self.options.cpa_global:
            self.federation_counts = self.receives("federation_counts", torch.ones(self.num_classes))
        if self.options.cpa_local:
            self.global_prototypes = self.receives("prototypes", torch.zeros(shape))
            self.local_prototypes = self.keeps("local_prototypes", torch.zeros(shape))
            # What the loss compares. Two equal prototypes, as these are at first, leave their class its weight of 1.
            self.local_side = self.scratch("local_side", torch.ones(shape))
            self.global_side = self.scratch("global_side", torch.ones(shape))
            self.feature_sums = self.scratch("feature_sums", torch.zeros(shape))
            self.feature_counts = self.scratch("feature_counts", torch.zeros(self.num_classes))

    def counts(self, message: Payload) -> Payload:
        """The action that tells the server how many images of each class there are here."""
        return {"class_counts": self.class_counts}

    def sent_prototypes(self) -> Payload:
        """The last epoch's prototypes, zero for classes that the site lacks, and the images (C,) behind them."""
        return {"prototypes": self.local_prototypes, "prototype_counts": self.feature_counts}

    def align_prototypes(self) -> None:
        """Before an epoch: compare local and global prototypes, after the warm-up and where both are known."""
        self.feature_sums.zero_()
        self.feature_counts.zero_()
        if self.round > self.options.warmup:
            known = (self.local_prototypes.any(1) & self.global_prototypes.any(1))[:, None]
            self.local_side.copy_(torch.where(known, self.local_prototypes, 1.0))
            self.global_side.copy_(torch.where(known, self.global_prototypes, 1.0))

    def renew_prototypes(self) -> None:
        """After an epoch: the mean feature of each class over its batches (Eq. 10)."""
        self.local_prototypes.copy_(class_means(self.feature_sums, self.feature_counts))

    def supervised(self, logits: Tensor, labels: Tensor) -> Tensor:
        """CPA: the global objective (Eq. 9), the local refinement (Eq. 11) or both; without any, `train.loss`."""
        options = self.options
        if not (options.cpa_global or options.cpa_local):
            return super().supervised(logits, labels)
        counts, beta = (self.federation_counts, options.beta) if options.cpa_global else (self.class_counts, 0.0)
        local, shared = (self.local_side, self.global_side) if options.cpa_local else (None, None)
        return conjoint_prototype_aligned(logits, labels, counts, local, shared, beta, options.tau)

    def loss(self, batch: Batch, out: Any) -> Tensor:
        if self.options.cpa_local:
            self.add_features(batch, out)
        return super().loss(batch, out)

    @torch.no_grad()
    def add_features(self, batch: Batch, out: Any) -> None:
        """Add a batch's features (B, D) to the sums of their classes."""
        members = membership(batch.label, self.num_classes, self.feature_sums.dtype)
        self.feature_sums.addmm_(members.T, out.features)
        self.feature_counts.add_(members.sum(0))
