"""`equipoise export`: files that predict like the run's own model, without Equipoise."""

import json
from pathlib import Path

import pytest
import torch

from equipoise.core.errors import UserError
from equipoise.engine import exporting
from equipoise.engine.exporting import CARD, export_model
from equipoise.engine.payload_files import read_payload, write_payload
from equipoise.engine.prediction import load_predictor
from harness import events, run_tiny


def pixels_for(run: Path, site: str | None, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random images, and what the run's model says of them."""
    predictor = load_predictor(run, site)
    shape = (count, predictor.channels, predictor.size, predictor.size)
    pixels = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return pixels, predictor(pixels)


@pytest.mark.parametrize(
    "method, site, absent",
    [
        ("fedavg", None, lambda client: []),
        ("prr", "site 1", lambda client: [client.carrier]),
        ("fedbm", None, lambda client: [client.sides["generator"].generator, client.sides["generator"].codes]),
        ("apfl", "site 2", lambda client: []),
    ],
)
def test_a_program_predicts_like_the_run_and_holds_nothing_else(tmp_path, method, site, absent):
    run = run_tiny(tmp_path / "run", method, "train.rounds=1")
    export_model(run, tmp_path / "model.pt2", site)
    pixels, expected = pixels_for(run, site, 3)
    program = torch.export.load(tmp_path / "model.pt2")
    assert torch.allclose(program.module()(pixels), expected, atol=1e-5)
    predictor = load_predictor(run, site)
    unused = {p for module in absent(predictor._client) for p in module.parameters()}
    whole = {p for module in predictor._client.workplace.modules() for p in module.parameters()}
    assert unused <= whole and sum(p.numel() for p in program.parameters()) == sum(p.numel() for p in whole - unused)


def test_an_onnx_graph_predicts_like_the_run_for_any_number_of_images(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra 'onnx' is not installed")
    run = run_tiny(tmp_path / "run", "fedavg", "train.rounds=1")
    card = export_model(run, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map[CARD]) == json.loads(json.dumps(card))
    for count in (1, 4):
        pixels, expected = pixels_for(run, None, count)
        (found,) = session.run(["probabilities"], {session.get_inputs()[0].name: pixels.numpy()})
        assert torch.allclose(torch.from_numpy(found), expected, atol=1e-5)


def test_the_card_has_classes_pixels_and_the_models_own_scores(tmp_path):
    run = run_tiny(tmp_path / "run", "fedrep", "train.rounds=1")
    export_model(run, tmp_path / "model.pt2", "site 2")
    extra = {CARD: ""}
    torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    card = json.loads(extra[CARD])
    start = events(run, "start")[0]
    assert card["classes"] == start["classes"] and card["site"] == "site 2" and card["model"] == "personal"
    assert card["run"] == start["run"] and card["data"] == "phantom"
    assert card["pixels"]["shape"] == ["n", start["channels"], start["image_size"], start["image_size"]]
    (tested,) = [e for e in events(run, "final") if e["site"] == "site 2" and e["view"] == "personal"]
    assert card["scores"] == [{"part": "test", "scope": "site", "round": tested["round"], **tested["metrics"]}]


@pytest.mark.parametrize("line", [b"[1]", b"\xff", b'{"a": 1}', b'{"event": "final"}', b"{"])
def test_a_run_with_damaged_events_is_refused_in_words(tmp_path, line):
    run = run_tiny(tmp_path / "run", "fedavg", "train.rounds=1")
    with (run / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match="is damaged"):
        export_model(run, tmp_path / "model.pt2")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_model_that_diverged_is_refused(tmp_path):
    run = run_tiny(tmp_path / "run", "fedavg", "train.rounds=1")
    path = run / "models" / "global.safetensors"
    payload = read_payload(path)
    write_payload(path, {"model": {name: t * torch.nan for name, t in payload["model"].items()}})
    with pytest.raises(UserError, match="not finite"):
        export_model(run, tmp_path / "model.pt2")


def test_what_cannot_be_exported_is_refused_and_leaves_no_file(tmp_path, monkeypatch):
    run = run_tiny(tmp_path / "run", "prr", "train.rounds=1")
    (tmp_path / "taken.pt2").write_text("mine")
    (tmp_path / "model.pt2.tmp").write_text("mine too")
    for file, site, message in [
        ("model.h5", "site 1", r"model\.h5.*ends in \.pt2 or \.onnx"),
        ("taken.pt2", "site 1", "exists already"),
        ("model.pt2", None, "--site"),
        ("model.pt2", "site 9", "no personal model of site 'site 9'"),
    ]:
        with pytest.raises(UserError, match=message):
            export_model(run, tmp_path / file, site)
    with pytest.raises(UserError, match="no finished run"):
        export_model(tmp_path, tmp_path / "model.pt2")
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    with pytest.raises(UserError, match=r"was not written.*differ by"):
        export_model(run, tmp_path / "model.pt2", "site 1")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken.pt2", "model.pt2.tmp"}
    assert (tmp_path / "taken.pt2").read_text() == "mine"
