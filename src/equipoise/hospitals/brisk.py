"""Flower made brisk: where it waits for bytes that are on their way, it looks again soon, and not for hours.

Flower 1.41 looks again after 1, 2, 4, 8, 10 s, up to 500 times or two hours, and has no setting for it. Otherwise a
killed server, or a site that announces a reply and sends nothing, would keep the other side waiting all that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

FIRST_WAIT = 0.05
LONGEST_WAIT = 1.0
#: seconds without a single object (Flower cuts tensors into pieces of 5 MB) after which no more are expected
STALLED = 60.0

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))
_pull_objects = inflatable_utils.pull_objects


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """In the block, bytes that the other side announced but does not deliver are waited for until then (monotonic)."""
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def pull_objects(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **_: Any) -> dict[str, bytes]:
    """Flower's `pull_objects`, within the deadline that `until` sets, and while pieces keep coming."""
    newest = time.monotonic()

    def pull(object_id: str) -> bytes:
        nonlocal newest
        try:
            content = pull_object_fn(object_id)
        except ObjectUnavailableError:
            if time.monotonic() - newest > STALLED:
                raise ObjectPullError(object_id, f"nothing came for {STALLED:.0f} s") from None
            raise
        newest = time.monotonic()
        return content

    left = max(_deadline.get() - newest, 0.0) + FIRST_WAIT
    return _pull_objects(
        object_ids,
        pull,
        max_time=left,
        max_tries_per_object=None,
        initial_backoff=FIRST_WAIT,
        backoff_cap=LONGEST_WAIT,
    )


def _hash_once() -> None:
    """Let Flower hash a piece of an array once, and not again for every message that has it: a piece never changes."""
    ArrayChunk.is_dirty = property(lambda self: "_object_id" not in self.__dict__)  # type: ignore[assignment, method-assign]


def quicken(*modules: ModuleType) -> None:
    """Let modules of Flower use these waits, and hash no piece twice."""
    _hash_once()
    for module in modules:
        if not hasattr(module, "pull_objects"):
            raise ImportError(f"{module.__name__} of this Flower pulls no objects; Equipoise knows 1.41")
        module.pull_objects = pull_objects  # type: ignore[attr-defined]
