"""The classifier in closed form: each site sends sums over its features once, and these give a linear classifier.

The body of the net is not trained. A round has two exchanges: raw sums give the whitening, and sums of whitened
features of unit length give the classifier. The common model equals that of the pooled images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from equipoise.closed_form import Head, noise_scale, off_diagonal, on_grid, principal, whitened
from equipoise.components._closed_form import (
    ENTRIES,
    MOMENT_ENTRIES,
    SUM_ENTRIES,
    ClosedFormOptions,
    as_sums,
    gridded,
    moments_by,
    no_sums,
    sums_by,
    total_of,
    unpacked,
    wide,
)
from equipoise.contract.client import Client
from equipoise.contract.method import Batch, Method, Server
from equipoise.contract.protocol import Action, Ask, Conversation, Payload, PerSite, Scan, Tensors, Value
from equipoise.core.errors import UserError, first_few, install
from equipoise.core.table import LATER
from equipoise.nets import Net, build_net
from equipoise.nets.architectures import architecture, net_names

#: one round, and no layer of an adapter that only training would make useful
DEFAULTS = {"train": {"rounds": 1}, "net": {"adapter": "linear"}}


class Options(ClosedFormOptions):
    """The closed form on a body that is not trained."""

    beside: tuple[str, ...] = Field(
        (), description="further nets with ImageNet weights, whose pooled features stand beside those of net.name"
    )
    others: float = Field(
        0.3, ge=0, le=1, description="weight of the other sites' sums in a site's own model; 0: own sums, 1: the common"
    )
    epsilon: float = Field(0.0, ge=0, description="differential privacy of each image in all that is sent; 0: none")
    delta: float = Field(1e-5, gt=0, lt=1, description="its probability of failure")
    basis: Literal["principal", "random"] = Field(
        "principal",
        description="directions of the features: `principal` ones take an exchange; `random` ones are public, so that "
        "closed.epsilon pays for one exchange instead of two",
        json_schema_extra=LATER,
    )

    #: whether sums leave the sites
    exchanges: ClassVar[bool] = True

    def holds(self) -> AbstractSet[str]:
        return {"merge", "carrier", "head", "predict", "draws", "loss", "train.loss"}

    def needs(self) -> AbstractSet[str]:
        return {"pooled features"}

    def lacks(self) -> AbstractSet[str]:
        return {
            "model",
            "whole model",
            "class head",
            "head predicts",
            "one model",
            "plain forward",
            "plain features",
            "plain loss",
            "net trains",
            "one loss",
            "one training ask",
            "local epochs",
            "supervised",
        }

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        idle = dict.fromkeys(("train.epochs", "train.steps", "train.aggregation"), "closed does not train")
        if self.basis == "random":
            idle["per_dimension"] = "basis is random"
        return super().without_effect(setting) | idle | ({} if self.epsilon else {"delta": "epsilon is 0"})

    def cautions(self, setting: Any, sites: Sequence[dict[str, Any]]) -> Iterator[str]:
        """Classes that no site has, sites of few images, and a body that has learnt nothing."""
        config = setting.config
        counts = {site["name"]: site["train"] for site in sites if any(site["train"])}
        for name, images in zip(setting.task.classes, map(sum, zip(*counts.values(), strict=True)), strict=True):
            if not images:
                yield f"no site has training images of {name}: {config.method} never predicts it"
        sizes = {site: sum(images) for site, images in counts.items()}
        most = self.most_components(sum(sizes.values()), len(sizes), self.dimensions)
        small = [site for site, size in sizes.items() if size < 8 * most]
        if small and not config.privacy.secure_sums and self.exchanges:
            yield (
                f"{first_few(small)} would send sums of up to {most} components over fewer than {8 * most} images. "
                "Such sums may show single images. privacy.secure_sums = true hides them, or lower closed.dimensions"
            )
        if config.net.encoder is not None and config.net.adapter != "linear":
            yield f"{config.method} does not train the adapter {config.net.adapter}; set net.adapter = 'linear'"
        if config.net.weights == "none" and config.net.name in net_names() and architecture(config.net.name).imagenet:
            yield f"{config.method} does not train {config.net.name}, whose weights are random; set net.weights"

    def only_simulated(self) -> str:
        return "closed.epsilon draws its noise from the run's seed, which the server knows" if self.epsilon else ""

    def noise(self) -> float:
        """Standard deviation of the noise on each sum; all exchanges are released."""
        if not self.epsilon:
            return 0.0
        try:
            return noise_scale(self.epsilon, self.delta, releases=1 if self.basis == "random" else 2)
        except ImportError:
            raise UserError(f"closed.epsilon needs an accountant of privacy; {install('privacy')}") from None


class FrozenBodies:
    """The nets whose pooled features are classified: net.name, and those beside it."""

    setting: Any
    options: Any

    def new_bodies(self) -> list[Any]:
        """The nets in their first state, the same everywhere."""
        setting = self.setting
        further = [
            setting.config.net.model_copy(update={"name": name, "weights": "imagenet"}) for name in self.options.beside
        ]
        made = [setting.new_net()]
        for config in further:
            made.append(
                setting.seeded(
                    f"net {config.name}", lambda c=config: build_net(c, setting.num_classes, setting.channels)
                )
            )
        return made


class ClosedServer(FrozenBodies, Server):
    """Adds up what sites send, and solves for the classifier."""

    def setup(self) -> None:
        size, classes = sum(net.feature_size for net in self.new_bodies()), self.setting.num_classes
        most, device = min(self.options.dimensions, size), self.setting.device
        self.noise = self.options.noise()
        state = self.state
        state.components, state.mean = 0, torch.zeros(size, dtype=torch.float64, device=device)
        state.whitening = torch.zeros(size, most, dtype=torch.float64, device=device)
        state.total = {name: value.to(device) for name, value in no_sums(most, classes).items()}
        state.weights = torch.zeros(most, classes, dtype=torch.float64, device=device)
        state.offsets = torch.zeros(classes, dtype=torch.float64, device=device)
        state.known = torch.zeros(classes, dtype=torch.bool, device=device)

    def round(self, number: int, sites: Sequence[str]) -> Conversation:
        """The first round fits the whitening; each adds what its sites have not sent before."""
        if not self.state.components and self.options.basis == "random":
            self._choose_directions()
        elif not self.state.components:
            self._whiten((yield Ask("moments", sites)))
        yield from self._gathered(sites)

    def leave(self, leaving: Sequence[str], sites: Sequence[str] = ()) -> Conversation:
        """Some sites leave: the sums that they sent are subtracted, without a rest. The whitening stays.

        Args:
            sites: further sites that answer as in a round, as secure sums need
        """
        asked = [*dict.fromkeys((*sites, *leaving))]
        yield from self._gathered(asked, leaves=PerSite({site: site in leaving for site in asked}))

    def _gathered(self, sites: Sequence[str], **more: Value | PerSite) -> Conversation:
        replies = yield Ask("train", sites, **self._frame(), **more)
        self.state.total = {name: total + total_of(replies, name) for name, total in self.state.total.items()}
        self._solve()

    def _choose_directions(self) -> None:
        """Orthonormal directions that depend on no image."""
        state, shape = self.state, self.state.whitening.shape
        state.whitening = self.setting.seeded(
            "closed basis", lambda: torch.linalg.qr(torch.randn(shape, dtype=torch.float64))[0]
        )
        state.components = shape[1]

    def _whiten(self, replies: Any) -> None:
        state, number = self.state, float(total_of(replies, "number"))
        most = self.options.most_components(number, len(replies), len(state.mean))
        mean, whitening = principal(unpacked(total_of(replies, "gram")), total_of(replies, "sums"), number, most)
        state.components = max(whitening.shape[1], 1)
        state.mean, state.whitening = mean, wide(whitening, state.whitening.shape[1])

    def _solve(self) -> None:
        state = self.state
        head = self.options.head(as_sums(state.total).first(state.components), least_count(self.noise))
        rest = state.weights.shape[0] - state.components
        state.weights, state.offsets, state.known = F.pad(head.weights, (0, 0, 0, rest)), head.offsets, head.known

    def _frame(self) -> dict[str, Value]:
        state = self.state
        return {"mean": state.mean, "whitening": state.whitening, "components": state.components}

    def message(self) -> dict[str, Value | PerSite]:
        """The common classifier, and the total from which a site makes its own."""
        state = self.state
        head = {"weights": state.weights, "offsets": state.offsets, "known": state.known}
        return {**self._frame(), **head, "total": state.total}


class ClosedClient(FrozenBodies, Client):
    """Takes sums over its features. It keeps its own sums, and those that it has sent."""

    discloses: ClassVar[dict[str, dict[str, str]]] = {"moments": {**MOMENT_ENTRIES}, "train": {**SUM_ENTRIES}}
    views: ClassVar[tuple[str, ...]] = ("global", "personal")

    def build(self) -> None:
        bodies = self.new_bodies()
        self.net = torch.nn.ModuleList(bodies)
        self.reference(self.net)
        for name, tensor in self.net.state_dict(keep_vars=True).items():
            self.scratch(f"net.{name}", tensor)
        size, classes = sum(net.feature_size for net in bodies), self.num_classes
        self.most, self.noise = min(self.options.dimensions, size), self.options.noise()
        self.mean = self._framed("mean", torch.zeros(size, dtype=torch.float64))
        self.whitening = self._framed("whitening", torch.zeros(size, self.most, dtype=torch.float64))
        self.components = self._framed("components", torch.zeros((), dtype=torch.int64))
        self.own = {name: self.keeps(f"own.{name}", t) for name, t in no_sums(self.most, classes).items()}
        self.build_exchange()
        self.personal: Head | None = None

    def build_exchange(self) -> None:
        """What a site has sent, and what it receives."""
        classes = self.num_classes
        self.sent = {name: self.keeps(f"sent.{name}", t) for name, t in no_sums(self.most, classes).items()}
        self.total = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(t, False) for name, t in no_sums(self.most, classes).items()}
        ).to(self.setting.device)
        self.receives("total", self.total)
        self.weights = self.receives("weights", torch.zeros(self.most, classes, dtype=torch.float64))
        self.offsets = self.receives("offsets", torch.zeros(classes, dtype=torch.float64))
        self.known = self.receives("known", torch.zeros(classes, dtype=torch.bool))

    def _framed(self, name: str, first: Tensor) -> Tensor:
        """A tensor of the whitening, which the server sends."""
        found: Tensor = self.receives(name, first)
        return found

    # ---- actions -----------------------------------------------------------------------------------------------

    def moments(self, message: Payload) -> Action:
        """Sums over raw features, from which the server makes the whitening."""
        found = yield Scan("train", moments_by(self.raw_features, self.taken()))
        return {**self.with_noise("moments", found)}

    def train(self, message: Payload) -> Action:
        """The sums that the server does not have yet; a site that leaves takes back what it sent."""
        if message.get("leaves"):
            told = {name: torch.zeros_like(sent) for name, sent in self.sent.items()}
        else:
            told = yield from self.sums()
        change: Payload = {name: told[name] - sent for name, sent in self.sent.items()}
        for name, sent in self.sent.items():
            sent.copy_(told[name])
        self.personal = self.options.head(self._own())
        return change

    def sums(self) -> Any:
        """Own sums, which the site keeps, and those that it tells: classes below `privacy.least` are not in these."""
        found = yield Scan("train", sums_by(self.features, self.taken(), self.num_classes))
        found = gridded(found)
        for name, own in self.own.items():
            own.copy_(found[f"own {name}"])
        if self.noise and bool(self.sent["gram"].any()):
            return {name: sent.clone() for name, sent in self.sent.items()}  # a second release would need more noise
        return self.with_noise("sums", {name: found[f"told {name}"] for name in ENTRIES})

    def taken(self) -> Tensor:
        """The classes (C,) whose images may be in a sum that leaves the site."""
        return self.class_counts >= max(self.setting.config.privacy.limit, 1)

    def with_noise(self, purpose: str, found: Tensors) -> Tensors:
        """Sums on the grid; under differential privacy with noise, which secure sums share out among the sites."""
        if not self.noise:
            return gridded(found)
        privacy = self.setting.config
        share = privacy.least_answers if privacy.privacy.secure_sums else 1
        random, scale = self.random(purpose), self.noise / share**0.5
        noisy = {}
        for name, value in found.items():
            drawn = torch.randn(value.shape, generator=random, dtype=torch.float64, device=value.device)
            if name == "gram" and self.options.basis == "random":
                drawn = drawn * off_diagonal(len(value)).to(drawn)
            noisy[name] = on_grid(value + scale * drawn)
        return noisy

    # ---- features and models -------------------------------------------------------------------------------------

    def bodies(self) -> list[Net]:
        """The nets whose features stand side by side."""
        return [net for net in self.net if isinstance(net, Net)]

    def raw_features(self, batch: Batch) -> Tensor:
        """Pooled features (B, D) of all nets; of unit length under differential privacy."""
        with self.workplace.precision():
            found = torch.cat([net.features(batch.image) for net in self.bodies()], 1)
        return F.normalize(found.float(), dim=1) if self.noise else found.float()

    def features(self, batch: Batch) -> Tensor:
        """Whitened features (B, K) of unit length, with zeros for components that are not used."""
        return whitened(self.raw_features(batch), self.mean, self.whitening)

    def predict(self, view: str, batch: Batch) -> Tensor:
        features = self.features(batch)
        if view == "global":
            return Head(self.weights, self.offsets, self.known).scores(features).float()
        if self.personal is None:
            self.personal = self.personal_head()
        return self.personal.scores(features[:, : self.used]).float()

    def personal_head(self) -> Head:
        """The classifier of own sums and a share of the others': total less what this site has sent."""
        used = self.used
        own, sent, total = (as_sums(part).first(used) for part in (self.own, self.sent, dict(self.total.items())))
        return self.options.head(own.plus(total.plus(sent, -1.0), self.options.others), least_count(self.noise))

    def _own(self) -> Any:
        return as_sums(self.own).first(self.used)

    @property
    def used(self) -> int:
        """The number of components, at least 1."""
        return max(int(self.components), 1)


def least_count(noise: float) -> float:
    """Images that a class must have not to be absent: under noise, two standard deviations of its count."""
    return max(2 * noise, 1e-9)


METHOD = Method(
    server=ClosedServer,
    client=ClosedClient,
    paper="no paper: linear discriminant analysis from sums over sites",
    year=0,
    changes="classifier in closed form on a body that is not trained, personalisation (mixed sums)",
    options=Options,
    defaults=DEFAULTS,
)
