"""The search of the recipe `equipoise`: every candidate on validation images of two federations, and the winner.

    python benchmarks/recipe.py      # results/recipe.json; some minutes on one core

`docs/protocol.md` states candidates and rule. No test image is read. The recipe was fixed once, by this rule. This
search shows whether the rule gives it again, and it changes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import frozen
from equipoise.closed_form import Head, Sums, principal, sums_of, whitened, within
from equipoise.contract.config import Config
from equipoise.data import load_federation
from equipoise.data.federation import Federation, Split
from equipoise.engine.runs import make_config, with_encoder
from equipoise.methods import get_method
from equipoise.metrics import from_confusion
from equipoise.nets import build_net
from equipoise.studies.grid import as_settings

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "prepared images and features of two federations"
OUT = frozen.ROOT / "results" / "recipe.json"
SEEDS = (1, 2, 3)
#: the federations of the search: study, and its data set's settings
SEARCHED: dict[str, tuple[dict[str, Any], ...]] = {
    "dermoscopy": ({},),
    "pbc": tuple({"data.alpha": alpha} for alpha in frozen.ALPHAS),
}
COMPONENTS, SHRINKAGES, PRIORS = (128, 256, 512), (0.1, 0.3, 0.5), (0.0, 0.125, 0.25, 0.5)
#: how a site's model is made: its share of the others' sums, or two shares whose models' probabilities are averaged
MODELS: tuple[tuple[float, ...], ...] = ((0.1,), (0.2,), (0.3,), (0.5,), (1.0,), (0.0, 1.0), (0.1, 1.0))
METRICS = ("balanced_accuracy", "macro_f1", "worst_class_recall")
Candidate = tuple[int, float, float, tuple[float, ...]]


def candidates() -> list[Candidate]:
    """Components, shrinkage, prior exponent and models of each candidate."""
    return [*itertools.product(COMPONENTS, SHRINKAGES, PRIORS, MODELS)]


def options_of(candidate: Candidate) -> dict[str, Any]:
    """A candidate in the words of the method's options."""
    components, shrinkage, prior, models = candidate
    return {"dimensions": components, "shrinkage": shrinkage, "prior": prior, "others": [*models]}


class Sites:
    """Training features of all sites, and the validation images that each site's model meets."""

    def __init__(self, config: Config, federation: Federation):
        self.number = len(federation.classes)
        net = build_net(config.net, self.number, federation.channels).eval()

        def read(split: Split) -> tuple[Tensor, Tensor]:
            with torch.inference_mode():
                found = net.features(split.images(np.arange(len(split)))[:, 0].float())
            return found.double(), torch.from_numpy(split.labels)

        self.train = [read(site.splits["train"]) for site in federation.sites if "train" in site.splits]
        places = [federation.common or site for site in federation.sites if "train" in site.splits]
        own = {id(place): place for place in places}  # one place where all sites share their validation images
        known = {name: read(place.splits["valid"]) for name, place in own.items()}
        self.valid = [known[id(place)] for place in places]
        features = torch.cat([rows for rows, _ in self.train])
        most = max(*COMPONENTS, get_method("closed").options().dimensions)
        self.mean, self.whitening = principal(features.T @ features, features.sum(0), len(features), most)

    def scores(self, components: int, wanted: Sequence[Candidate]) -> Iterator[list[float]]:
        """Each candidate's scores, as means over sites; all candidates have so many components."""
        frame = self.mean, self.whitening[:, :components]
        train = [(whitened(rows, *frame), labels) for rows, labels in self.train]
        valid = [(whitened(rows, *frame), labels) for rows, labels in self.valid]
        own = [sums_of(rows, labels, self.number) for rows, labels in train]
        total = Sums(*(sum(parts) for parts in zip(*own, strict=True)))  # type: ignore[arg-type]
        shares = {share for *_, models in wanted for share in models}
        spreads = [{share: within(one.plus(total.plus(one, -1.0), share)) for share in shares} for one in own]
        for _, shrinkage, prior, models in wanted:
            every = []
            for at_site, (rows, labels) in zip(spreads, valid, strict=True):
                heads = [at_site[share].head(shrinkage, prior) for share in models]
                matrix = _confusion(heads, rows, labels, self.number)
                every.append([from_confusion(matrix)[metric] for metric in METRICS])
            yield np.mean(every, axis=0).tolist()


def _confusion(heads: Sequence[Head], rows: Tensor, labels: Tensor, number: int) -> np.ndarray:
    """The confusion matrix of the mean of probabilities."""
    chosen = torch.stack([head.scores(rows).softmax(1) for head in heads]).mean(0).argmax(1)
    return torch.bincount(labels * number + chosen, minlength=number**2).reshape(number, number).numpy()


def sites_of(study: str, data: Mapping[str, Any], seed: int) -> Sites:
    """A federation of the search as a run of this seed meets it."""
    settings = {**frozen.settings_of(study), **data, "net.adapter": "linear"}
    config = make_config(None, [*as_settings(frozen.nested(settings))], study, method="closed", seed=seed)
    return Sites(*with_encoder(config, load_federation(config.data, seed)))


def search() -> dict[str, Any]:
    """All candidates' validation scores by study, and the rule's winner."""
    every, usual = candidates(), get_method("closed").options()
    found: dict[str, dict[str, list[list[float]]]] = {}
    for study, sets in SEARCHED.items():
        found[study] = {"candidates": [], "usual": []}
        for data, seed in itertools.product(sets, SEEDS):
            sites = sites_of(study, data, seed)
            told = [row for size in COMPONENTS for row in sites.scores(size, [c for c in every if c[0] == size])]
            images = sum(len(labels) for _, labels in sites.train)
            most = usual.most_components(images, len(sites.train), sites.whitening.shape[1])
            default: Candidate = (most, usual.shrinkage, usual.prior, (usual.others,))
            found[study]["candidates"].append(told)  # type: ignore[arg-type]
            found[study]["usual"].append(next(sites.scores(most, [default])))
            print(study, data, seed, flush=True)
    means = {study: 100 * np.mean(own["candidates"], axis=0) for study, own in found.items()}
    usually = {study: 100 * np.mean(own["usual"], axis=0) for study, own in found.items()}
    return told_of(every, means, usually)


def told_of(
    every: Sequence[Candidate], means: Mapping[str, np.ndarray], usually: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """The file of results: every candidate by the rule's score, the best first."""
    overall = np.mean([*means.values()], axis=0)
    least = np.mean([*usually.values()], axis=0)[METRICS.index("macro_f1")]
    merit = overall[:, [METRICS.index("balanced_accuracy"), METRICS.index("worst_class_recall")]].mean(1)
    allowed = overall[:, METRICS.index("macro_f1")] >= least
    rows = [
        {
            **options_of(every[place]),
            "merit": round(float(merit[place]), 3),
            "allowed": bool(allowed[place]),
            **{study: [round(float(value), 2) for value in own[place]] for study, own in means.items()},
        }
        for place in np.argsort(-merit, kind="stable")
    ]
    usual = {study: [round(float(value), 2) for value in own] for study, own in usually.items()}
    winner = next(row for row in rows if row["allowed"])
    return {"metrics": [*METRICS], "seeds": [*SEEDS], "usual": usual, "winner": winner, "candidates": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = search()
    lines = ",\n  ".join(json.dumps(row) for row in found.pop("candidates"))
    text = json.dumps(found, indent=1)[:-2] + f',\n "candidates": [\n  {lines}\n ]\n}}\n'
    asked.out.write_text(text, encoding="utf-8")
    print(found["winner"])


if __name__ == "__main__":
    main()
