"""Losses on local learning: they change what a site learns, and let out what they need and nothing else."""

from __future__ import annotations

import pytest

from compositions import configured, played
from equipoise.core.errors import UserError
from equipoise.engine.disclosure import ALWAYS, needed
from equipoise.methods import get_method

PROTOTYPES = {"cpa.prototypes", "cpa.prototype_counts"}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("balanced-softmax", (), {}),
        ("margins", ("margins.difficulty='none'",), {}),
        ("cpa", ("cpa.counts='site'", "cpa.prototypes=false"), {}),
        ("cpa", ("cpa.prototypes=false",), {"cpa.counts": {"class_counts"}}),
        ("cpa", ("cpa.counts='none'", "cpa.warmup=0"), {"train": PROTOTYPES}),
        ("cpa", ("cpa.warmup=0",), {"cpa.counts": {"class_counts"}, "train": PROTOTYPES}),
    ],
)
def test_a_loss_acts_at_sites_that_learn_alone_and_says_only_what_it_needs(name, settings, said):
    config = configured("local", (name,), *settings)
    left = played(config)
    assert left.said == left.sheet == said
    assert left.changes(played(configured("local", (), *settings)))
    alone = needed(get_method("local").client_class(config).discloses)
    assert alone.keys() == said.keys() | ALWAYS.keys()


def test_difficulty_of_the_federation_needs_a_model_that_local_learning_lacks():
    with pytest.raises(UserError, match="margins needs a model on the server, which the method local does not have"):
        configured("local", ("margins",))
