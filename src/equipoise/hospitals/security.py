"""Keys of a consortium and what is signed with them.

Flower passes messages on by numbers that a member can write himself. So a site obeys only messages that the coordinator
signed, and the server believes only replies that their site signed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from equipoise.core.errors import UserError
from equipoise.hospitals.parcels import Parcel, UnreadableParcel

SIGNED_WITH = ec.ECDSA(hashes.SHA256())
MAKE_KEY = "`equipoise certificates` makes one, or `ssh-keygen -t ecdsa -b 384 -N ''`"


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def keep_private(folder: Path) -> None:
    """Make a folder, or shut one that is there, so that only its owner can look into it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def new_key_pair(private: Path, public: Path) -> None:
    """A P-384 key pair in OpenSSH's format, as `ssh-keygen -t ecdsa -b 384` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.parent.mkdir(parents=True, exist_ok=True)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def check_private(path: Path) -> None:
    """Refuse a private key that other accounts of this machine can read."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise UserError(f"{path} can be read by other accounts of this machine: chmod 600 '{path}'")


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in a file."""
    check_private(path)
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as problem:
        raise UserError(f"{path} is no private key in OpenSSH's format without a password: {problem}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is no elliptic-curve key; {MAKE_KEY}")
    return key


def public_keys(path: Path) -> list[ec.EllipticCurvePublicKey]:
    """The public keys in a file, one on a line: while a key is being renewed, the new one and the old one."""
    lines = [line for line in path.read_bytes().splitlines() if line.strip() and not line.startswith(b"#")]
    try:
        keys = [load_ssh_public_key(line) for line in lines]
    except (ValueError, UnsupportedAlgorithm) as problem:
        raise UserError(f"{path} is no public key in OpenSSH's format: {problem}") from None
    elliptic = [key for key in keys if isinstance(key, ec.EllipticCurvePublicKey)]
    if not keys or len(elliptic) < len(keys):
        raise UserError(f"{path} holds no elliptic-curve key, or another one besides; {MAKE_KEY}")
    return elliptic


def public_line(path: Path) -> bytes:
    """The public half of a private key, as a line of a file of public keys."""
    return private_key(path).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def node_keys(path: Path) -> list[bytes]:
    """The public keys in a file as Flower knows them."""
    return [public_key_to_bytes(key) for key in public_keys(path)]


def signer(path: Path) -> Callable[[Parcel], Parcel]:
    """Signs parcels with the coordinator's private key."""
    key = private_key(path)
    return lambda parcel: Parcel(parcel.text, parcel.tensors, key.sign(parcel.text.encode(), SIGNED_WITH))


def verifier(path: Path) -> Callable[[Parcel], None]:
    """Refuses parcels that the owner of this public key did not sign."""
    keys = public_keys(path)

    def verify(parcel: Parcel) -> None:
        if not any(signed_by(key, parcel.signature, parcel.text.encode()) for key in keys):
            raise UnreadableParcel("the coordinator of this consortium did not sign it")

    return verify


def reply_signer(path: Path) -> Callable[[Parcel, Parcel], Parcel]:
    """Signs (a site's reply) to (a question) with the site's private key."""
    key = private_key(path)

    def sign(reply: Parcel, question: Parcel) -> Parcel:
        return Parcel(reply.text, reply.tensors, key.sign(_said(reply, question), SIGNED_WITH))

    return sign


def check_reply(keys: Sequence[bytes], reply: Parcel, question: Parcel) -> None:
    """Refuse a reply to a question that the owner of none of these public keys signed.

    Args:
        keys: in PEM, as Flower knows them
    """
    owned = (load_pem_public_key(key) for key in keys)
    if not any(signed_by(key, reply.signature, _said(reply, question)) for key in owned):  # type: ignore[arg-type]
        raise UnreadableParcel("it is not signed with the site's key, or the site runs an older Equipoise")


def _said(reply: Parcel, question: Parcel) -> bytes:
    """What a site signs: its reply, and to which sending of which question. The signature of a question is never the
    same twice, so that no reply can be used again."""
    asked = hashlib.sha256(question.text.encode() + b"\0" + question.signature).digest()
    return b"equipoise reply 1\0" + asked + reply.text.encode()


def signed_by(key: ec.EllipticCurvePublicKey, signature: bytes, text: bytes) -> bool:
    """Whether the owner of a public key signed a text."""
    try:
        key.verify(signature, text, SIGNED_WITH)
    except InvalidSignature:
        return False
    return True
