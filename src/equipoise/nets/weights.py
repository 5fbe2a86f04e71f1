"""First weights of a net from ImageNet or from a file, under any published names."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from equipoise.core.errors import UserError
from equipoise.nets.architectures import architecture, net_names
from equipoise.nets.net import Net


def load_weights(net: Net, name: str, weights: str) -> None:
    """Copies `weights` (`imagenet` or the path of a file) into the net called `name`.

    A file holds either the state dict of a `Net`, or that of the published model, whose classifier is left
    out. A head for another number of classes stays random. If the first convolution expects colour and the net takes
    one channel, its weights are summed. A grey image then gives the same outputs as in colour.
    """
    state = imagenet_weights(name) if weights == "imagenet" else read_state(Path(weights))
    own_layout = any(key.startswith("body.") for key in state)
    target = net.state_dict()
    first_convolution = next(key for key, value in target.items() if value.ndim == 4)
    for key, value in target.items():
        source = key if own_layout else published_name(name, key)
        found = state.get(source)
        if key.startswith("head.") and (found is None or found.shape != value.shape):
            continue
        if not source or (found is None and key.endswith("num_batches_tracked")):
            continue  # new layers, or absent from files written by old versions of torch
        if found is not None and key == first_convolution and value.shape[1] == 1:
            found = found.sum(dim=1, keepdim=True)
        if found is None or found.shape != value.shape:
            problem = "is missing" if found is None else f"has shape {tuple(found.shape)}"
            raise UserError(
                f"weights {weights!r} do not fit the net {name}: {source} {problem}, expected {tuple(value.shape)}"
            )
        value.copy_(found)


def published_name(name: str, key: str) -> str:
    """The name of a tensor of `Net.body` in the model as published; of a net from outside, in its own module."""
    key = key.removeprefix("body.").removeprefix("module.")
    return architecture(name).published_name(key) if name in net_names() else key


def imagenet_weights(name: str) -> dict[str, Tensor]:
    """The published ImageNet weights of a net, from a package or downloaded once."""
    published = architecture(name).imagenet if name in net_names() else ""
    if not published:
        raise UserError(f"the net {name} has no ImageNet weights: set net.weights to none or to a file")
    if not isinstance(published, str):
        return read_state(published())
    try:
        return torch.hub.load_state_dict_from_url(published, map_location="cpu", check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"cannot download the ImageNet weights of {name} ({error}): fetch {published} elsewhere and "
            "give the path of the file as net.weights"
        ) from error


def read_state(path: Path) -> dict[str, Tensor]:
    """The state dict in a safetensors file, or in a torch file that holds nothing but tensors."""
    if not path.is_file():
        raise UserError(f"no weights at {path}: net.weights is none, imagenet or the path of a file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"cannot read weights from {path}: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} is not a state dict: it must map names to tensors")
    return state
