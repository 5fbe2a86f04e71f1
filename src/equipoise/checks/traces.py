"""What a run left behind: its events, and every tensor of server and sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from equipoise.contract.protocol import flatten
from equipoise.engine.payload_files import read_payload, safe_name


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a run, all or of one kind."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if kind is None or line["event"] == kind]


def last_checkpoint(folder: Path) -> Path:
    """The newest checkpoint's folder."""
    return sorted((folder / "checkpoints").glob("round-?????"))[-1]


def server_state(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the server's state after the last round, by flat name."""
    return flatten(read_payload(last_checkpoint(folder) / "server.safetensors"))[0]


def site_states(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that sites keep after the last round, by site and flat name."""
    manifest = json.loads((last_checkpoint(folder) / "manifest.json").read_text(encoding="utf-8"))
    states = {}
    for site, version in manifest["sites"].items():
        path = folder / "sites" / safe_name(site) / f"{version}.safetensors"
        states.update({f"{site}/{name}": tensor for name, tensor in flatten(read_payload(path))[0].items()})
    return states


def all_state(folder: Path) -> dict[str, torch.Tensor]:
    """Server and site tensors after the last round."""
    return {f"server/{name}": tensor for name, tensor in server_state(folder).items()} | site_states(folder)


def assert_same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Two states agree bit for bit."""
    assert first.keys() == second.keys(), f"one state lacks {sorted(first.keys() ^ second.keys())[:5]}"
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"differ: {different[:5]}"


def assert_finite(folder: Path) -> None:
    """No tensor of server and sites holds NaN or infinity."""
    found = all_state(folder)
    broken = [name for name, tensor in found.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    assert not broken, f"weights are not finite: {broken[:3]}"
