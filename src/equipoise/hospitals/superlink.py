"""Flower's SuperLink behind two ports: the hospitals' (see `door`), and one of 127.0.0.1 for this machine's server.

The Control and Runtime APIs, which command the SuperLink, are served on the second port alone. Control needs a token,
Runtime that of a task. The database is new at every start and deleted at the end. So hospitals' updates do not pile up
on disk, and a site that was taken out can be put back.

python -m equipoise.hospitals.superlink SUPERLINK.json
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import logging
import os
import resource
import signal
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from flwr.common.constant import ACCESS_TOKEN_KEY, TRANSPORT_TYPE_GRPC_RERE
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

from equipoise.hospitals.connections import Guard, Limits
from equipoise.hospitals.door import FLEET, Door

LOOPBACK = "127.0.0.1"
#: seconds for requests in progress when the SuperLink ends
FAREWELL_SECONDS = 1
DATABASE = "superlink.db"
UNKNOWN = "this Flower starts its SuperLink in another way ({}); Equipoise knows 1.41: pip install 'flwr>=1.41,<1.42'"


@dataclass(frozen=True)
class SuperLinkSettings:
    """What the process needs to know; the file with it holds secrets.

    Attributes:
        host, port: where hospitals connect
        private_port: where this machine's server connects, on 127.0.0.1
        keys: {public key in PEM: site}; None where nodes have no keys
        token: opens the Control API
        secret: for taking tasks, in hexadecimal
    """

    host: str
    port: int
    private_port: int
    token: str
    secret: str
    folder: str
    keys: Mapping[str, str] | None = None
    certificate: str | None = None
    key: str | None = None
    limits: Limits = field(default_factory=Limits)

    def to_json(self) -> str:
        """As the file's text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, path: Path) -> SuperLinkSettings:
        """The inverse of `to_json`."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**raw, "limits": Limits(**raw["limits"])})


class TokenPlugin(NoOpControlAuthnPlugin):
    """Lets those who know the token command the SuperLink."""

    def __init__(self, token: str):
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[bool, Any]:
        """Whether the caller knows the token, and as whom Flower takes him: it knows one account only."""
        given = str(dict(metadata).get(ACCESS_TOKEN_KEY, "")).encode()
        if not hmac.compare_digest(given, self._token):
            return False, None
        return super().validate_tokens_in_metadata(metadata)


def flowers_app(settings: SuperLinkSettings, database: Path) -> Any:
    """Flower's app, as its own command makes it.

    Raises:
        ImportError: when this Flower is another than the one that is known
    """
    try:
        from flwr.superlink.config_loader import SuperLinkLifespanConfig
        from flwr.superlink.main import create_app

        # The package has a function of the module's name.
        lifespan = importlib.import_module("flwr.superlink.cli.flower_superlink").SuperLinkLifespan
        config = SuperLinkLifespanConfig(
            control_address="",
            health_server_address=None,
            host=settings.host,
            port=settings.port,
            insecure=settings.certificate is None,
            certificates=None,
            superexec_auth_secret=bytes.fromhex(settings.secret),
            authn_plugin=TokenPlugin(settings.token),
            event_log_plugin=None,
            fleet_event_log_plugin=None,
            enable_event_log=False,
            artifact_provider=None,
            enable_supernode_auth=settings.keys is not None,
            fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
            fleet_api_address=None,
            simulation=False,
            ssl_ca_certfile=None,
            ssl_certfile=None,
            ssl_keyfile=None,
            database=str(database),
            isolation="process",
            runtime_dependency_install=False,
        )
        app = create_app(config, lifespan)
    except (ImportError, AttributeError, TypeError) as problem:
        raise ImportError(UNKNOWN.format(problem)) from problem
    lacking = FLEET - set(app.openapi()["paths"])
    if lacking:
        raise ImportError(UNKNOWN.format(f"it lacks {', '.join(sorted(lacking))}"))
    return app


async def serve(settings: SuperLinkSettings, app: Any) -> None:
    """Serve both ports until told to end."""
    tls = None
    if settings.certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(settings.certificate, settings.key)
    keys = {key.encode(): site for key, site in settings.keys.items()} if settings.keys is not None else None
    common: dict[str, Any] = {
        "ws": "none",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,
        "timeout_graceful_shutdown": FAREWELL_SECONDS,
    }
    private = uvicorn.Server(uvicorn.Config(app, host=LOOPBACK, port=settings.private_port, lifespan="off", **common))
    guard = Guard(settings.limits, tls)
    door = Door(app, keys, settings.limits.request_seconds)
    where: dict[str, Any] = {"host": settings.host, "port": settings.port, "backlog": 512}
    public = uvicorn.Server(uvicorn.Config(door, http=guard.connection, **where, **common))  # type: ignore[arg-type]
    inner = asyncio.create_task(private.serve())
    while not (private.started or inner.done()):
        await asyncio.sleep(0.02)
    await public.serve()
    private.should_exit = True
    await inner


def delete_database(folder: Path) -> None:
    """Delete the database that an earlier SuperLink may have left in a folder."""
    for path in folder.glob(f"{DATABASE}*"):
        path.unlink()


@contextmanager
def fresh_database(folder: Path) -> Iterator[Path]:
    """A database that is not there yet, and not there any more after the block."""
    delete_database(folder)
    try:
        yield folder / DATABASE
    finally:
        delete_database(folder)


def main() -> None:
    """Run the SuperLink that a file describes."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # it warns of each request that is none
    # uvicorn raises the signal that ended it once more, and the database is still to be deleted.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.umask(0o077)  # the database holds hospitals' updates
    settings = SuperLinkSettings.read(Path(sys.argv[1]))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems name a limit that they do not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        with fresh_database(Path(settings.folder)) as database, suppress(KeyboardInterrupt):
            asyncio.run(serve(settings, flowers_app(settings, database)))
    except ImportError as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    main()
