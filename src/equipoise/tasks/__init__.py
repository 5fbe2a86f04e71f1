"""A task defines its targets, how predictions are counted, and the metrics from these counts.

Each task is one file, which holds its class as `TASK`.
"""

from __future__ import annotations

import importlib
from functools import cache

from equipoise.core.definitions import module_names
from equipoise.tasks.task import Counts, Task

__all__ = ["Counts", "Task", "get_task", "task_names"]


def task_names() -> list[str]:
    """All tasks."""
    return sorted(name for name in module_names(*__path__) if name != "task")


@cache
def get_task(name: str) -> type[Task]:
    """A task by the name that `Federation.task` has."""
    task: type[Task] = importlib.import_module(f"{__name__}.{name}").TASK
    return task
