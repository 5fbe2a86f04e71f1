"""Which net to train, as it stands in a run's configuration."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from equipoise.core.suggestions import meant
from equipoise.core.table import LATER, Table
from equipoise.nets.architectures import net_names

Rate = Annotated[float, Field(ge=0, lt=1)]


class NetConfig(Table):
    """A net, where its first weights come from, and how much of it is dropped in training."""

    name: str = Field(
        "small-cnn",
        description=", ".join(f"`{name}`" for name in net_names())
        + "; `package.module:function` or `file.py:function` (`make(num_classes, channels)` gives a module), "
        "`monai:NAME`, `hf:NAME_OR_FOLDER`.",
    )
    weights: str = "none"
    """`none` (random), `imagenet` (downloaded or packaged), `pretrained` (of `hf:`, its default), or the path of a
    safetensors or torch file."""
    init: Annotated[Literal["usual", "torch"], Field(json_schema_extra=LATER)] = "usual"
    """How random weights of a built-in net are drawn: as its package does, or `torch`: as torch's layers do by
    themselves (FedBM's released ResNet-18; MONAI draws convolutions with squared norms 3 to 6 times as large)."""
    dropout: Rate | None = None
    """Share of features dropped before the head; by default what the net's authors use."""
    drop_connect: Rate | None = None
    """Greatest chance of skipping a residual block (stochastic depth, EfficientNets only)."""
    norm_momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    """How fast running statistics of batch norms follow; by default as the net's authors have it."""
    group_norm: Annotated[bool, Field(json_schema_extra=LATER)] = False
    """Whether group norms replace batch norms: they treat images one by one, as differential privacy needs it."""
    head: str | None = Field(default=None, json_schema_extra=LATER)
    """Layer of a net from outside that makes the logits; by default the linear layer whose outputs they are."""
    norm: tuple[str, ...] | None = Field(default=None, json_schema_extra=LATER)
    """Layers of a net from outside that count as norm layers besides torch's; by default those that are called so."""
    arguments: dict[str, Any] | None = Field(default=None, json_schema_extra=LATER)
    """What the function or class that makes a net from outside takes besides classes and channels."""

    @property
    def outside(self) -> bool:
        """Whether the net comes from outside this package."""
        return ":" in self.name

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        known = net_names()
        if ":" not in name and name not in known:
            close = meant(name, known)
            hint = f"; did you mean '{close}'?" if close else ""
            raise ValueError(f"there is no net '{name}'{hint} nets: {', '.join(known)}, or from outside: see net.name")
        return name

    @model_validator(mode="before")
    @classmethod
    def _trained(cls, raw: Any) -> Any:
        """Models of a hub come with their weights."""
        if isinstance(raw, dict) and str(raw.get("name", "")).startswith("hf:"):
            return {"weights": "pretrained", **raw}
        return raw

    @model_validator(mode="after")
    def _of_outside(self) -> "NetConfig":
        for key in ("head", "norm", "arguments"):
            if getattr(self, key) is not None and not self.outside:
                raise ValueError(f"net.{key} is for nets from outside, and {self.name} is built in; leave it out")
        if self.init != "usual" and (self.outside or self.weights != "none"):
            raise ValueError(
                f"net.init = '{self.init}' is for random weights of built-in nets, and net.weights is "
                f"'{self.weights}'; leave it out"
            )
        if self.weights == "pretrained" and not self.name.startswith("hf:"):
            raise ValueError(f"net.weights = 'pretrained' is for hf: nets; {self.name} takes none, imagenet or a file")
        return self
