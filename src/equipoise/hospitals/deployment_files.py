"""The TOML files of a deployment: one for the server, one for each site. Paths start at the file's folder."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PositiveFloat

from equipoise.core.errors import UserError, parse_toml
from equipoise.core.table import Table
from equipoise.core.validation import validated
from equipoise.data.data_config import DataConfig
from equipoise.hospitals.exchange import FlowerOptions

#: between hospitals no count, sum or mean of fewer images leaves a site, unless the coordinator and the site agree
LEAST = 5
#: what TLS, node authentication and signed messages need
KEYS = ("ca", "certificate", "key", "coordinator")


def _address(text: str) -> str:
    """A usable address; an error names a mistake's place in the file."""
    try:
        split_address(text)
    except UserError as problem:
        raise ValueError(str(problem)) from None
    return text


Address = Annotated[str, AfterValidator(_address)]


class DeploymentFile(Table):
    """A file whose paths are relative to its folder."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file; the message names what is wrong."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise UserError(f"{path}: no such file") from None
        except OSError as problem:
            raise UserError(f"cannot read {path}: {problem.strerror}") from None
        return validated(cls, parse_toml(content, str(path)), str(path))._rooted(path.parent.resolve())

    def _rooted(self, folder: Path) -> Self:
        """The same settings with absolute paths."""
        changed: dict[str, Any] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Path):
                changed[name] = folder / value.expanduser()
            elif isinstance(value, dict) and all(isinstance(v, Path) for v in value.values()):
                changed[name] = {key: folder / v.expanduser() for key, v in value.items()}
        return self.model_copy(update=changed)


class ServerFile(DeploymentFile):
    """What `equipoise server` needs to know besides the run's config."""

    address: Address = Field("127.0.0.1:8443", description="where the SuperLink listens, HOST:PORT")
    sites: dict[str, Path] = Field(min_length=1, description="{site: public key of its node}, in the order of merging")
    ca: Path | None = Field(None, description="certificate of the consortium's CA")
    certificate: Path | None = Field(None, description="the server's certificate")
    key: Path | None = Field(None, description="the key of the server's certificate")
    coordinator: Path | None = Field(None, description="private key that signs messages to sites")
    state: Path = Field(Path("flower"), description="folder of the SuperLink's database and log")
    wait: PositiveFloat = Field(600.0, description="seconds to wait for the sites before the first round")
    flower: FlowerOptions = FlowerOptions()

    @property
    def secure(self) -> bool:
        """Whether everything that TLS and signatures need is named."""
        return None not in (self.ca, self.certificate, self.key, self.coordinator)


class SiteFile(DeploymentFile):
    """What `equipoise site` needs to know: who it is, its data, whom it trusts, what may leave."""

    name: str = Field(min_length=1, description="the site's name in the server's file")
    superlink: Address = Field(description="the server's address, HOST:PORT")
    data: DataConfig
    seed: int = Field(1, ge=0, lt=2**32, description="random seed of the partition, if the data is partitioned")
    policy: dict[str, list[str]] = Field(description="{action: entries that may leave}; see `equipoise methods show`")
    plugins: tuple[str, ...] = Field(
        (), description="plug-ins that a run may use here: file.py or package.module, as the run names them"
    )
    peers: Path | None = Field(
        None, description="folder with the other sites' public keys, SITE.pub; secure sums refuse all other sites"
    )
    secure_sums: bool = Field(False, description="refuse every run without privacy.secure_sums")
    least: int = Field(
        LEAST,
        ge=0,
        description="no count, sum or mean of fewer images leaves; the site refuses runs with a lower limit",
    )
    epsilon: PositiveFloat | None = Field(
        None,
        description="largest sum of privacy.epsilon over all runs on this site's images; the site refuses further "
        "runs, and runs without epsilon",
    )
    ca: Path | None = Field(None, description="certificate of the consortium's CA")
    key: Path | None = Field(None, description="this node's private key")
    coordinator: Path | None = Field(None, description="the coordinator's public key")
    state: Path = Field(Path("state"), description="folder of personal state, models and logs")
    device: str = Field("auto", description="auto, cpu or cuda")
    poll: PositiveFloat = Field(1.0, description="seconds between two looks for messages at the server")

    @property
    def secure(self) -> bool:
        """Whether everything that TLS and signatures need is named."""
        return None not in (self.ca, self.key, self.coordinator)


def check_security(settings: ServerFile | SiteFile, address: str, insecure: bool) -> None:
    """TLS, node keys and signatures, or else `--insecure` by name and on this machine only."""
    if insecure:
        if not on_loopback(address):
            raise UserError(f"--insecure is only for this machine, and {address} is not 127.0.0.1")
        return
    if not settings.secure:
        lacking = ", ".join(name for name in KEYS if getattr(settings, name, "none needed") is None)
        raise UserError(f"no {lacking}: `equipoise certificates` makes what is needed; --insecure does without")
    for name in KEYS:
        path = getattr(settings, name, None)
        if path is not None and not path.is_file():
            raise UserError(f"{name} = {path}: no such file")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UserError(f"'{address}' is no address; write HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def on_loopback(address: str) -> bool:
    """Whether an address is on this machine."""
    host = split_address(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
