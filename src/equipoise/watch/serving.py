"""The page's server: reads only, answers this machine only, and only who has the token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from threading import Lock
from typing import Any

from equipoise.core.errors import UserError, install

try:
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
    from sse_starlette.sse import EventSourceResponse
    from starlette.middleware.trustedhost import TrustedHostMiddleware
except ImportError:
    raise UserError(f"Watching needs a web server, which is not installed here. Run: {install('watch')}") from None

from equipoise.core.version import __version__
from equipoise.report.page import page
from equipoise.watch.contents import Followed

COOKIE = "equipoise-watch"
LOOPBACK = "127.0.0.1"
#: between two looks at the files
LOOK_SECONDS = 1.0
#: only what the page itself carries, and events from here
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Latest:
    """The page's latest contents, made once for all who look, and only when what is followed has changed."""

    def __init__(self, followed: Followed):
        self.followed = followed
        self._lock, self._signature, self._text = Lock(), object(), ""

    def text(self) -> str:
        """The contents as JSON."""
        with self._lock:
            signature = self.followed.signature()
            if signature != self._signature or not self._text:
                self._signature, self._text = signature, json.dumps(self.followed.page())
            return self._text


def make_app(followed: Followed, token: str, look_seconds: float = LOOK_SECONDS) -> FastAPI:
    """The application: the page, and a stream of its contents."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    latest, cookie = Latest(followed), f"{COOKIE}-{secrets.token_hex(4)}"

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Any]) -> Response:
        given = request.query_params.get("token")
        if given is not None and secrets.compare_digest(given.encode(), token.encode()):
            answer: Response = RedirectResponse(request.url.path, 303)  # the token stays out of the history
            answer.set_cookie(cookie, token, httponly=True, samesite="strict")
        elif not secrets.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
            answer = PlainTextResponse("This page needs the token that `equipoise watch` has printed.\n", 403)
        else:
            answer = await call_next(request)
        answer.headers["Content-Security-Policy"] = POLICY
        answer.headers["X-Content-Type-Options"] = "nosniff"
        answer.headers["Referrer-Policy"] = "no-referrer"
        answer.headers["Cache-Control"] = "no-store"
        return answer

    # added last, so it comes first: another site's script cannot reach this page through another host name
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"])

    @app.get("/")
    def show() -> HTMLResponse:
        return HTMLResponse(page("watch.html", Path(__file__).parent, version=__version__))

    @app.get("/events")
    async def events(request: Request) -> EventSourceResponse:
        async def contents() -> AsyncIterator[dict[str, str]]:
            told = ""
            while not await request.is_disconnected():
                text = await asyncio.to_thread(latest.text)
                if text != told:
                    told = text
                    yield {"event": "state", "data": text}
                await asyncio.sleep(look_seconds)

        return EventSourceResponse(contents())

    return app


def serve(followed: Followed, port: int, say: Callable[[str], None], token: str | None = None) -> None:
    """Serve the page until stopped; `port` 0 takes a free one."""
    import socket

    token = token or secrets.token_urlsafe(24)
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((LOOPBACK, port))
        except OSError as problem:
            raise UserError(f"Port {port} cannot be used: {problem.strerror}. Choose another with --port.") from None
        app = make_app(followed, token)
        settings = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
        with contextlib.suppress(KeyboardInterrupt):  # the page's usual end, which uvicorn raises once more
            say(f"http://{LOOPBACK}:{bound.getsockname()[1]}/?token={token}")
            uvicorn.Server(settings).run(sockets=[bound])


def wait_for(path: Path, patience: float = 0.0) -> None:
    """Wait until something lies at a path; a run that is about to begin has no folder yet."""
    deadline = time.monotonic() + patience
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    if not path.exists():
        raise UserError(f"{path} is not there. Name a run, a study or a site's state folder.")
