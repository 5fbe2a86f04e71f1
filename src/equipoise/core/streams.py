"""Random streams: every random number comes from (seed, purpose, round, site, ...), never from a shared state."""

import hashlib

import torch


def stream(seed: int, *names: str | int) -> int:
    """A 63-bit seed that depends on every argument; other arguments give unrelated streams."""
    text = "\x1f".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(device: torch.device | str, seed: int, *names: str | int) -> torch.Generator:
    """A torch generator on `device` at the start of the named stream."""
    return torch.Generator(device=device).manual_seed(stream(seed, *names))
