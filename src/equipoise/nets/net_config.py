"""Which net to train, as it stands in a run's configuration."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from equipoise.core.plugins import entry_names, is_plugin
from equipoise.core.suggestions import meant
from equipoise.core.table import LATER, Table
from equipoise.nets.architectures import net_names

#: the net that trains on features of a frozen encoder
ADAPTER = "adapter"
OF_ADAPTERS = (
    "encoder",
    "encoder_weights",
    "freeze_up_to",
    "views",
    "stored",
    "adapter",
    "hidden",
    "hidden_norm",
    "scale",
    "lora_rank",
    "lora_layers",
    "encoder_digest",
)
OF_HIDDEN, OF_LORA = ("hidden", "hidden_norm"), ("lora_rank", "lora_layers")
#: what LoRA has no use for, and would do harm to the encoder's weights
NOT_OF_LORA = ("freeze_up_to", "views", "init", "group_norm", "norm_momentum")
Rate = Annotated[float, Field(ge=0, lt=1)]


class NetConfig(Table):
    """A net, where its first weights come from, and how much of it is dropped in training."""

    name: str = Field(
        "small-cnn",
        description=", ".join(f"`{name}`" for name in net_names())
        + "; `package.module[:function]` or `file.py[:function]` (`make(num_classes, channels)` gives a module), "
        "`monai:NAME`, `hf:NAME_OR_FOLDER`.",
    )
    weights: str = "none"
    """`none` (random), `imagenet` (downloaded or packaged), `pretrained` (of `hf:`, its default), or the path of a
    safetensors or torch file."""
    init: Annotated[Literal["usual", "torch"], Field(json_schema_extra=LATER)] = "usual"
    """Random weights of a built-in net: `usual` as in its package, or `torch` as in torch's layers. FedBM's released
    ResNet-18 has the latter; MONAI's convolutions have squared norms 3 to 6 times as large."""
    dropout: Rate | None = None
    """Share of features dropped before the head; default: the share of the net's authors."""
    drop_connect: Rate | None = None
    """Greatest chance of skipping a residual block (stochastic depth, EfficientNets only)."""
    norm_momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    """Momentum of batch norm's running statistics; default: the value of the net's authors."""
    group_norm: Annotated[bool, Field(json_schema_extra=LATER)] = False
    """Whether group norms replace batch norms: they treat images one by one, as differential privacy needs it."""
    head: str | None = Field(default=None, json_schema_extra=LATER)
    """Layer of a net from outside that gives the logits; default: the linear layer with these outputs."""
    norm: tuple[str, ...] | None = Field(default=None, json_schema_extra=LATER)
    """Norm layers of a net from outside, besides torch's; default: layers with such names."""
    arguments: dict[str, Any] | None = Field(default=None, json_schema_extra=LATER)
    """Further arguments, besides classes and channels, of what makes a net or an encoder from outside."""

    encoder: str | None = Field(
        default=None,
        description="frozen encoder of the net `adapter`: a net of this package, `hf:NAME_OR_FOLDER`, `monai:NAME`, "
        "`run:FOLDER` (a finished run's own model), `package.module:NAME` or `file.py:NAME`",
        json_schema_extra=LATER,
    )
    encoder_weights: str | None = Field(default=None, json_schema_extra=LATER)
    """Weights of the encoder: `none` (random), `imagenet`, or the path of a file; default: its packaged weights."""
    freeze_up_to: str | None = Field(default=None, json_schema_extra=LATER)
    """Layer of the encoder, such as `blocks.12`, after which it is cut: maps are stored, later layers train."""
    views: int = Field(default=0, ge=0, le=1000, json_schema_extra=LATER)
    """Augmented views of each image whose features are stored too; training draws among them."""
    stored: Literal["float16", "float32"] = Field(default="float16", json_schema_extra=LATER)
    """Precision in which features are stored."""
    adapter: Literal["linear", "hidden", "lora"] = Field(default="hidden", json_schema_extra=LATER)
    """Layers that train: a `linear` head on the features, a `hidden` layer below it, or LoRA's matrices within the
    encoder and a head; then each step computes the encoder anew."""
    hidden: int = Field(default=256, ge=1, le=1 << 16, json_schema_extra=LATER)
    """Width of the hidden layer; its outputs are the features that methods see."""
    hidden_norm: Literal["batch", "layer", "none"] = Field(default="batch", json_schema_extra=LATER)
    """Norm layer of the hidden layer, before its ReLU."""
    scale: Literal["unit", "none"] = Field(default="unit", json_schema_extra=LATER)
    """Scale of pooled features: `unit` divides each image's features by their root mean square."""
    lora_rank: int = Field(default=8, ge=1, le=1 << 10, json_schema_extra=LATER)
    """Rank of LoRA's matrices; their product is added twice, as with `lora_alpha` of two ranks."""
    lora_layers: tuple[str, ...] | None = Field(default=None, json_schema_extra=LATER)
    """Linear layers that get LoRA's matrices, by the ends of their names; default: those for queries and values."""
    encoder_digest: str | None = Field(default=None, json_schema_extra=LATER)
    """Digest of the encoder and its weights. Runs record it and refuse any other encoder."""

    @property
    def frozen(self) -> bool:
        """Whether the net trains on features of a frozen encoder instead of images."""
        return self.name == ADAPTER and not self.low_rank

    @property
    def low_rank(self) -> bool:
        """Whether LoRA's matrices train within the encoder, on images."""
        return self.adapter == "lora"

    def lacks(self) -> dict[str, str]:
        """Words that this net does not grant to methods, and why (`equipoise.contract.words`)."""
        if self.name != ADAPTER or self.freeze_up_to is not None:
            return {}
        if self.adapter != "hidden":
            verb = "train" if self.low_rank else "have"
            why, remedy = f"the {self.adapter} adapter does not {verb}", 'set net.adapter = "hidden"'
            return dict.fromkeys(("norm layers", "batch norm"), f"{why}; {remedy}")
        lacking = {"batch": (), "layer": ("batch norm",), "none": ("norm layers", "batch norm")}[self.hidden_norm]
        why = f'the adapter does not have under net.hidden_norm = "{self.hidden_norm}"; set net.hidden_norm = "batch"'
        return dict.fromkeys(lacking, why)

    def without_effect(self, setting: Any = None) -> dict[str, str]:
        if self.name != ADAPTER:
            return {}
        useless = {"linear": OF_HIDDEN + OF_LORA, "hidden": OF_LORA, "lora": (*OF_HIDDEN, "stored")}[self.adapter]
        return dict.fromkeys(useless, f'net.adapter is "{self.adapter}"')

    @property
    def outside(self) -> bool:
        """Whether the net comes from outside this package."""
        return self.name not in net_names() and (":" in self.name or is_plugin("net", self.name))

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        known = net_names()
        if ":" not in name and name not in known and not is_plugin("net", name):
            close = meant(name, [*known, *entry_names("net")])
            hint = f"; did you mean '{close}'?" if close else ";"
            raise ValueError(
                f"there is no net '{name}'{hint} nets: {', '.join(known)}; `equipoise settings net` tells how to name "
                "one of your own"
            )
        return name

    @model_validator(mode="before")
    @classmethod
    def _adapted(cls, raw: Any) -> Any:
        """An encoder without a net means the net `adapter`."""
        if isinstance(raw, dict) and raw.get("encoder") is not None and raw.get("name") is None:
            return {**raw, "name": ADAPTER}
        return raw

    @model_validator(mode="after")
    def _of_adapters(self) -> "NetConfig":
        usual = type(self).model_fields
        if self.name == ADAPTER and self.encoder is None:
            raise ValueError("the net adapter needs an encoder: set net.encoder (--encoder) to efficientnet-lite0, say")
        if self.low_rank:
            for key in NOT_OF_LORA:
                if getattr(self, key) != usual[key].default:
                    raise ValueError(
                        f"net.{key} does not go with net.adapter = 'lora', which trains within a whole encoder on "
                        "images; leave it out, or choose another adapter"
                    )
        if self.name != ADAPTER:
            for key in OF_ADAPTERS:
                if getattr(self, key) != usual[key].default:
                    raise ValueError(
                        f"net.{key} is for the net adapter, and the net is {self.name}; leave it out, or name an "
                        "encoder (--encoder)"
                    )
        return self

    @model_validator(mode="before")
    @classmethod
    def _trained(cls, raw: Any) -> Any:
        """Models of a hub come with their weights."""
        if isinstance(raw, dict) and str(raw.get("name", "")).startswith("hf:"):
            return {"weights": "pretrained", **raw}
        return raw

    @model_validator(mode="after")
    def _of_outside(self) -> "NetConfig":
        given = ("head", "norm") if ":" in (self.encoder or "") else ("head", "norm", "arguments")
        for key in given:
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
