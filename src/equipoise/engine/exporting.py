"""A run's selected model as one file that works without Equipoise: PyTorch program (.pt2) or ONNX graph (.onnx)."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from equipoise.core.errors import UserError, install
from equipoise.core.storage import replacing
from equipoise.core.version import __version__
from equipoise.data.preparation import PREPARATION
from equipoise.engine.prediction import Predictor, load_predictor, probabilities_of, run_damage_named

Program = Callable[[Tensor], Tensor]

CARD = "equipoise.json"
"""Name of the model's card among a .pt2 file's extra files, and in the metadata of an ONNX graph."""

TOLERANCE = 1e-4
"""By how much a probability of the written file may differ from the run's own model."""


def export_model(run: Path, file: Path, site: str | None = None) -> dict[str, Any]:
    """Write the selected global model of a run, or a site's personal one, to `file`; returns its card.

    The model takes pixels, uint8 (n, channels, size, size), and gives probabilities (n, classes); normalisation is
    part of it. The card says how an image becomes pixels, what the classes are, and how the model scored. The file
    is read back, and must predict as the run's model does, before it gets its name.
    """
    if file.suffix not in WRITERS:
        raise UserError(f"{file}: the name of a model ends in {' or '.join(WRITERS)}")
    if file.exists():
        raise UserError(f"{file} exists already; name another file")
    if not file.parent.is_dir():
        raise UserError(f"{file}: there is no folder {file.parent}; make it first")
    predictor = load_predictor(run, site)
    with run_damage_named(run):
        card = _card(run, site, predictor)
    expected = _examples(predictor)
    with replacing(file) as draft:
        written = WRITERS[file.suffix](_traced(predictor), card, draft)
        _compare(expected, written, file)
    return card


def _card(run: Path, site: str | None, predictor: Predictor) -> dict[str, Any]:
    """What somebody who is given only the file has to know."""
    data = predictor.config.data
    tested = [result for result in _finals(run) if result["view"] == predictor.view and result.get("site") == site]
    return {
        "classes": predictor.classes,
        "pixels": {
            "type": "uint8",
            "shape": ["n", predictor.channels, predictor.size, predictor.size],
            "colours": "RGB" if predictor.channels == 3 else "grey",
            **{name: getattr(data, name) for name in PREPARATION},
            "resampling": "Lanczos",
        },
        "task": predictor.task.name,
        "gives": predictor.task.gives,
        "model": predictor.view,
        "site": site,
        "method": predictor.config.method,
        "net": predictor.config.net.name,
        "run": predictor.config.run_name,
        "data": data.name.partition(":")[0],  # without the path of a manifest, which is private
        "scores": [
            {"part": result["part"], "scope": result["scope"], "round": result["round"], **result["metrics"]}
            for result in tested
        ],
        "equipoise": __version__,
    }


def _finals(run: Path) -> Iterator[dict[str, Any]]:
    """The test results of a run; the folder that a hospital keeps has none."""
    for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "final":
            yield event


def _traced(predictor: Predictor) -> ExportedProgram:
    """The predictor as a program for any number of images."""
    with _quiet():
        return torch.export.export(predictor, (_noise(predictor, 2),), dynamic_shapes=({0: Dim("n", min=1)},))


def _write_program(program: ExportedProgram, card: dict[str, Any], path: Path) -> Program:
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={CARD: json.dumps(card)})
    path.write_bytes(content.getvalue())
    return torch.export.load(io.BytesIO(path.read_bytes())).module()


def _write_onnx(program: ExportedProgram, card: dict[str, Any], path: Path) -> Program:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  torch writes ONNX by it
    except ImportError as problem:
        raise UserError(f"to write ONNX, {install('onnx')}: {problem}") from None
    with _quiet():
        written = torch.onnx.export(program, dynamo=True, verbose=False, output_names=["probabilities"])
    assert written is not None
    model = written.model_proto
    onnx.helper.set_model_props(model, {CARD: json.dumps(card)})
    path.write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(path.read_bytes())
    (pixels,) = session.get_inputs()
    return lambda images: torch.from_numpy(session.run(None, {pixels.name: images.numpy()})[0])


WRITERS = {".pt2": _write_program, ".onnx": _write_onnx}


def _examples(predictor: Predictor) -> list[tuple[Tensor, Tensor]]:
    """Images, one and several at once, with the run's model's probabilities.

    Call this before tracing the predictor: tracing leaves tensors without numbers in its caches.
    """
    batches = [_noise(predictor, count) for count in (1, 5)]
    return [(pixels, probabilities_of(predictor, pixels)) for pixels in batches]


def _compare(expected: Sequence[tuple[Tensor, Tensor]], written: Program, file: Path) -> None:
    """Refuse a file that predicts otherwise than the run's model."""
    for pixels, probabilities in expected:
        with torch.no_grad():
            apart = (written(pixels) - probabilities).abs().max().item()
        if not apart <= TOLERANCE:
            raise UserError(f"{file} was not written: read back, the model's probabilities differ by {apart:.2g}")


def _noise(predictor: Predictor, count: int) -> Tensor:
    random = torch.Generator().manual_seed(count)
    shape = (count, predictor.channels, predictor.size, predictor.size)
    return torch.randint(256, shape, dtype=torch.uint8, generator=random)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks on its own parts, which are no concern of the user's."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
