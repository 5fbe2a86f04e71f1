"""Certificates of a consortium: a small CA, and the server's certificate."""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from equipoise.core.errors import UserError
from equipoise.hospitals.security import check_private, write_secret

HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Authority:
    """A certificate authority for one consortium.

    Args:
        days: how long the certificates that it signs are valid, its own among them
        key: its key; a new one is made where there is none
    """

    def __init__(self, name: x509.Name, days: int, key: ec.EllipticCurvePrivateKey | None = None):
        self.name = name
        self.days = days
        self.key = key or ec.generate_private_key(ec.SECP384R1())

    @classmethod
    def new(cls, name: str, days: int) -> Authority:
        """A new authority."""
        return cls(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), days)

    @classmethod
    def read(cls, certificate: Path, key: Path, days: int) -> Authority:
        """The authority of an earlier day."""
        check_private(key)
        try:
            known = x509.load_pem_x509_certificate(certificate.read_bytes())
            own = load_pem_private_key(key.read_bytes(), password=None)
        except (ValueError, TypeError) as problem:
            raise UserError(f"{certificate} and {key} are not the CA's certificate and key: {problem}") from None
        if not isinstance(own, ec.EllipticCurvePrivateKey) or own.public_key() != known.public_key():
            raise UserError(f"{key} is not the key of the certificate {certificate}")
        return cls(known.subject, days, own)

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

    def write_certificate(self, path: Path) -> None:
        """The CA's certificate, for everyone; one of the same key takes the place of an earlier one without a gap."""
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            self._builder(self.name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA384())
        )
        path.write_bytes(certificate.public_bytes(Encoding.PEM))

    def write_key(self, path: Path) -> None:
        """The CA's key, which only its owner can read."""
        write_secret(path, self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

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


def names_of(certificate: Path) -> list[str]:
    """The host names and addresses that a server's certificate is for."""
    try:
        known = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = known.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as problem:
        raise UserError(f"{certificate} is no server's certificate: {problem}") from None
    return [str(name.value) for name in names]


def check_server_certificate(certificate: Path, key: Path) -> None:
    """Refuse a certificate and key that are damaged, do not belong together, or are over."""
    check_private(key)
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as problem:
        raise UserError(f"certificate = {certificate} and key = {key} do not make a TLS server: {problem}") from None
    _check_date("certificate", certificate, "`equipoise renew SERVER.toml certificate` makes a new one")


def check_authority(path: Path) -> None:
    """Refuse a file that holds no certificate, or one that is over."""
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError as problem:
        raise UserError(f"ca = {path} is no certificate in PEM format: {problem}") from None
    _check_date("ca", path, "ask the coordinator for the new one, made by `equipoise renew SERVER.toml ca`")


def _check_date(what: str, path: Path, remedy: str) -> None:
    last = max(certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(path.read_bytes()))
    if last < datetime.datetime.now(datetime.UTC):
        raise UserError(f"{what} = {path} was valid until {last:%Y-%m-%d}; {remedy}")
