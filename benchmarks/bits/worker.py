"""One process that runs many command lines of one commit, so that its start is paid once.

It reads a job a line from its input, as JSON, and answers each with a line. `sys.path` decides which commit it runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from typing import Any

#: how a process pool begins here unless a job says otherwise: forked workers skip the seconds of an import
CONTEXT = multiprocessing.get_context
FAULT = 70


def draw_nothing() -> None:
    """Leave the figures of earlier reports empty: every run writes one, and drawing takes longer than the run."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return

    Figure.draw = lambda figure, renderer: None  # type: ignore[assignment]


def forked(method: str | None = None) -> Any:
    """A context that forks the workers of process pools, even if the caller asks to spawn them."""
    return CONTEXT("fork")


def perform(arguments: list[str]) -> tuple[int, str]:
    """Run one command line of Equipoise; gives its exit status and all that it printed."""
    said = io.StringIO()
    sys.argv = ["equipoise", *arguments]
    status: Any = 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module("equipoise", run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = FAULT
    return status if isinstance(status, int) else 1, said.getvalue()


def exported(path: str, pixels: str) -> tuple[int, str]:
    """What an exported model says of images; PyTorch and ONNX read the file without Equipoise."""
    import numpy as np

    images = np.load(pixels)
    if path.endswith(".onnx"):
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        (found,) = session.run(["probabilities"], {session.get_inputs()[0].name: images})
    else:
        import torch

        found = torch.export.load(path).module()(torch.from_numpy(images)).detach().numpy()
    return 0, found.tobytes().hex()


def main() -> None:
    """Answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries must not pass for answers
    draw_nothing()
    for line in sys.stdin:
        job = json.loads(line)
        multiprocessing.get_context = CONTEXT if job.get("spawn") else forked  # type: ignore[assignment]
        try:
            status, text = exported(*job["exported"]) if "exported" in job else perform(job["argv"])
        except Exception:
            status, text = FAULT, traceback.format_exc()
        print(json.dumps({"status": status, "text": text}), file=answers, flush=True)


if __name__ == "__main__":
    main()
