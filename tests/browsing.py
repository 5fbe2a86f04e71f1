"""Pages in headless Chromium: where an error of a script or a request outside fails the test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
#: addresses that are on this machine
NEAR = ("file:", "data:", "blob:", "http://127.0.0.1:", "about:")


@contextmanager
def opened(browser: Any, address: Path | str, width: int = 1200, scheme: str = "light") -> Iterator[Any]:
    """A page of this width and colour scheme; on leaving, no script has failed and nothing was asked of others."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    page.on("console", lambda said: wrong.append(f"console: {said.text}") if said.type == "error" else None)
    page.on("request", lambda asked: None if asked.url.startswith(NEAR) else wrong.append(f"asked: {asked.url[:80]}"))
    page.goto(address.resolve().as_uri() if isinstance(address, Path) else address)
    yield page
    context.close()
    assert wrong == []


def drawn_figures(page: Any) -> list[str]:
    """The figures that have a drawing after all are drawn, in their order."""
    page.evaluate("Promise.all(equipoise.figures.map(each => each.draw()))")
    return page.evaluate(
        "[...document.querySelectorAll('figure')].filter(each => each.querySelector('.main-svg')).map(each => each.id)"
    )
