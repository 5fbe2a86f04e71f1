"""Keys and certificates of a consortium: a small CA, the server's certificate, node keys, the coordinator's signature.

Anyone who reaches a SuperLink may start a run there, another member too. So sites obey only messages that the
coordinator signed, whoever brought them.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from equipoise.core.errors import UserError
from equipoise.hospitals.parcels import Parcel, UnreadableParcel

SIGNED_WITH = ec.ECDSA(hashes.SHA256())
HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
MAKE_KEY = "`equipoise certificates` makes one, or `ssh-keygen -t ecdsa -b 384 -N ''`"


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def new_key_pair(private: Path, public: Path) -> None:
    """A P-384 key pair in OpenSSH's format, as `ssh-keygen -t ecdsa -b 384` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.parent.mkdir(parents=True, exist_ok=True)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


class Authority:
    """A certificate authority for one consortium."""

    def __init__(self, name: str, days: int):
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.days = days
        self.key = ec.generate_private_key(ec.SECP384R1())
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.certificate = (
            self._builder(self.name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA384())
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=self.days))
        )

    def write(self, certificate: Path, key: Path) -> None:
        """The CA's certificate, for everyone, and its key, for nobody."""
        certificate.parent.mkdir(parents=True, exist_ok=True)
        certificate.write_bytes(self.certificate.public_bytes(Encoding.PEM))
        write_secret(key, self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def issue(self, names: Sequence[str], certificate: Path, key: Path) -> None:
        """A server certificate for host names and addresses."""
        server = ec.generate_private_key(ec.SECP384R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        issued = (
            self._builder(subject, server.public_key())
            .add_extension(x509.SubjectAlternativeName([general_name(name) for name in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .sign(self.key, hashes.SHA384())
        )
        certificate.parent.mkdir(parents=True, exist_ok=True)
        certificate.write_bytes(issued.public_bytes(Encoding.PEM))
        write_secret(key, server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def general_name(name: str) -> x509.GeneralName:
    """A host as a certificate names it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not HOST_NAME.fullmatch(name):
        raise UserError(f"'{name}' is no host name or address; write it without https:// and without a port")
    return x509.DNSName(name)


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The private key in a file."""
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as problem:
        raise UserError(f"{path} is no private key in OpenSSH's format without a password: {problem}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is no elliptic-curve key; {MAKE_KEY}")
    return key


def public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key in a file."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm) as problem:
        raise UserError(f"{path} is no public key in OpenSSH's format: {problem}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path} is no elliptic-curve key; {MAKE_KEY}")
    return key


def check_server_certificate(certificate: Path, key: Path) -> None:
    """Refuse a certificate and key that are damaged or do not belong together."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as problem:
        raise UserError(f"certificate = {certificate} and key = {key} do not make a TLS server: {problem}") from None


def check_authority(path: Path) -> None:
    """Refuse a file that holds no certificate."""
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError as problem:
        raise UserError(f"ca = {path} is no certificate in PEM format: {problem}") from None


def signer(path: Path) -> Callable[[Parcel], Parcel]:
    """Signs parcels with the coordinator's private key."""
    key = private_key(path)
    return lambda parcel: Parcel(parcel.text, parcel.tensors, key.sign(parcel.text.encode(), SIGNED_WITH))


def verifier(path: Path) -> Callable[[Parcel], None]:
    """Refuses parcels that the owner of this public key did not sign."""
    key = public_key(path)

    def verify(parcel: Parcel) -> None:
        try:
            key.verify(parcel.signature, parcel.text.encode(), SIGNED_WITH)
        except InvalidSignature:
            raise UnreadableParcel("the coordinator of this consortium did not sign it") from None

    return verify
