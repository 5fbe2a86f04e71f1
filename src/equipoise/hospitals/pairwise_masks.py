"""Masks that cancel in a sum, and shares of the keys that they are made of (Bonawitz et al., CCS 2017).

Each pair of sites agrees on a key by X25519, and HKDF and ChaCha20 make a mask of it. One site adds the mask, the other
subtracts it. Each site also adds a mask that no other knows. Integers are taken modulo 2**64, so that a sum has the
same bits as without masks. Shamir's shares let the other sites give up the keys that a sum needs where a site is lost.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

#: shares are points of a polynomial over this field; secrets have 256 bits
PRIME = 2**521 - 1
SECRET_BYTES = 32
SHARE_BYTES = 66
#: keys are used for one message each, so that a nonce adds nothing
NONCE = bytes(12)


def new_key() -> bytes:
    """A private X25519 key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_half(private: bytes) -> bytes:
    """The public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, public: bytes, purpose: str) -> bytes:
    """The key (32 bytes) that the owners of two key pairs have in common, for one purpose."""
    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return derived(shared, purpose)


def derived(secret: bytes, purpose: str) -> bytes:
    """A key made of a secret, for one purpose."""
    return HKDF(hashes.SHA256(), SECRET_BYTES, salt=None, info=f"equipoise sum 1 {purpose}".encode()).derive(secret)


def mask(key: bytes, size: int) -> Tensor:
    """Numbers (size,) of 64 bits that look random to everyone without the key."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * size))
    return torch.from_numpy(np.frombuffer(stream, dtype="<i8").copy())


def own_mask(seed: bytes, number: str, size: int) -> Tensor:
    """The mask that a site adds for itself to its part of a sum."""
    return mask(derived(seed, f"own {number}"), size)


def pair_mask(private: bytes, public: bytes, site: str, other: str, number: str, size: int) -> Tensor:
    """What `site` adds for its pair with `other`; what the other adds is the negative of it."""
    first, second = sorted((site, other))
    found = mask(agreed(private, public, f"pair {number} {len(first)} {first} {second}"), size)
    return found if site == first else -found


# ---- shares -----------------------------------------------------------------------------------------------------


def threshold(sites: int) -> int:
    """How many sites have to give up their shares: more than two thirds.

    Any two such sets have an honest site in common, even where a third of the sites helps a lying server.
    """
    return 2 * sites // 3 + 1


def shares_of(secret: bytes, least: int, sites: int) -> list[bytes]:
    """Shares of a secret for some sites, any `least` of which give it back and fewer tell nothing."""
    factors = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(least - 1))]
    return [_at(factors, place).to_bytes(SHARE_BYTES, "big") for place in range(1, sites + 1)]


def secret_of(shares: Mapping[int, bytes]) -> bytes:
    """The secret of enough shares, by the places (from 0) of their sites.

    Raises:
        ValueError: where they are no shares of one secret
    """
    points = {place + 1: int.from_bytes(share, "big") for place, share in shares.items()}
    total = 0
    for place, value in points.items():
        weight = value
        for other in points:
            if other != place:
                weight = weight * other * pow(other - place, -1, PRIME) % PRIME
        total = (total + weight) % PRIME
    if total.bit_length() > 8 * SECRET_BYTES:
        raise ValueError("the shares do not belong together")
    return total.to_bytes(SECRET_BYTES, "big")


def _at(factors: Sequence[int], place: int) -> int:
    value = 0
    for factor in reversed(factors):
        value = (value * place + factor) % PRIME
    return value


# ---- messages from site to site, which the server passes on -------------------------------------------------------


def sealed(private: bytes, public: bytes, sender: str, receiver: str, number: str, text: bytes) -> bytes:
    """A text that only the receiver reads."""
    return ChaCha20Poly1305(_way(private, public, sender, receiver, number)).encrypt(NONCE, text, None)


def opened(private: bytes, public: bytes, sender: str, receiver: str, number: str, text: bytes) -> bytes:
    """The inverse of `sealed`; cryptography.exceptions.InvalidTag where somebody changed it."""
    return ChaCha20Poly1305(_way(private, public, sender, receiver, number)).decrypt(NONCE, text, None)


def _way(private: bytes, public: bytes, sender: str, receiver: str, number: str) -> bytes:
    return agreed(private, public, f"share {number} {len(sender)} {sender} {receiver}")
