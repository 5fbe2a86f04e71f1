"""Cuts an encoder after a named layer: the layers up to it are frozen, those after it train."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from equipoise.core.errors import UserError
from equipoise.core.suggestions import meant
from equipoise.nets.splicing import halves


def cut(module: nn.Module, layer: str, name: str, image: tuple[int, int]) -> tuple[nn.Module, nn.Module, int]:
    """The two halves of an encoder, which together give what the whole gives, and the number of its features.

    Args:
        layer: the last frozen layer; prefixes and underscores of names may be left out: `blocks.12`
        name: what to call the encoder in messages
        image: channels and pixels of an image to try the halves on
    """
    path = _found(module, layer, name)
    pixels = torch.rand(2, image[0], image[1], image[1], generator=torch.Generator().manual_seed(0))
    try:
        graph = fx.symbolic_trace(module)
    except Exception:  # forward passes can fail in any way
        first, second = halves(module, path, name, pixels)
    else:
        first, second = _of_graph(graph, path, name)
    with torch.no_grad():
        whole, both = module(pixels), second(first(pixels))
    if not (isinstance(whole, Tensor) and torch.allclose(whole, both, atol=1e-5)):
        raise UserError(f"the encoder {name} cannot be cut after {path}: its halves do not give what the whole gives")
    return first.eval().requires_grad_(False), second.requires_grad_(True), whole.flatten(1).shape[1]


def _of_graph(graph: fx.GraphModule, path: str, name: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    at = next((node for node in reversed(graph.graph.nodes) if _inside(node, path)), None)
    if at is None:
        raise UserError(f"the encoder {name} does not use its layer {path}; name another with net.freeze_up_to")
    return _up_to(graph, at), _after(graph, at, name)


def _found(module: nn.Module, layer: str, name: str) -> str:
    """The full name of a layer."""
    plain = {_plain(path): path for path, _ in reversed([*module.named_modules()]) if path}
    for path, full in plain.items():
        if path == _plain(layer) or path.endswith("." + _plain(layer)):
            return full
    short = [path.removeprefix("body.").removeprefix("module.") for path in plain]
    close = meant(layer, short)
    blocks = [path for path in short if path.rpartition(".")[2].isdigit()] or short
    depth = min(path.count(".") for path in blocks)
    top = [path for path in reversed(blocks) if path.count(".") == depth][:12]
    hint = f"did you mean {close}?" if close else f"its layers are, among others, {', '.join(top)}"
    raise UserError(f"net.freeze_up_to = {layer!r} is no layer of {name}; {hint}")


def _plain(path: str) -> str:
    return ".".join(part.lstrip("_") for part in path.split("."))


def _inside(node: fx.Node, path: str) -> bool:
    """Whether a node of a graph belongs to a layer."""
    stack = [entry[0] for entry in (node.meta.get("nn_module_stack") or {}).values()]
    target = str(node.target) if node.op == "call_module" else ""
    return path in stack or target == path or target.startswith(f"{path}.")


def _up_to(graph: fx.GraphModule, at: fx.Node) -> fx.GraphModule:
    """The layers up to a node."""
    kept, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.graph.nodes:
        copies[node] = kept.node_copy(node, copies.__getitem__)
        if node is at:
            break
    kept.output(copies[at])
    return _lean(graph, kept)


def _after(graph: fx.GraphModule, at: fx.Node, name: str) -> fx.GraphModule:
    """The layers after a node; nothing but that node's output may cross the cut."""
    kept, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    copies[at] = kept.placeholder("maps")
    passed = False
    for node in graph.graph.nodes:
        if passed:
            crossing = [other for other in node.all_input_nodes if other not in copies]
            for other in (other for other in crossing if _counts_images(other)):
                copies[other] = kept.call_method("size", (copies[at], 0))
            crossing = [other for other in crossing if other not in copies]
            if crossing:
                raise UserError(
                    f"the encoder {name} cannot be cut there: {crossing[0]} is used on both sides; cut it after "
                    "a whole block"
                )
            copies[node] = kept.node_copy(node, copies.__getitem__)
        passed = passed or node is at
    return _lean(graph, kept)


def _counts_images(node: fx.Node) -> bool:
    """Whether a node is the number of images of a batch, which is the same on both sides of a cut."""
    return node.op == "call_method" and node.target == "size" and node.args[1:] == (0,)


def _lean(graph: fx.GraphModule, kept: fx.Graph) -> fx.GraphModule:
    made = fx.GraphModule(graph, kept)
    made.graph.eliminate_dead_code()
    made.recompile()
    made.delete_all_unused_submodules()
    return made
