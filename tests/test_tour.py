"""The worked examples of ARCHITECTURE.md run as they are written."""

import re
from pathlib import Path

import pytest

from equipoise import components, methods
from equipoise.core.errors import UserError
from harness import all_state, assert_same_bits, events, run_tiny

TOUR = Path(__file__).resolve().parents[1] / "ARCHITECTURE.md"


def example(kind: str) -> str:
    """The code of a worked example."""
    return re.findall(rf"```python {kind}\n(.*?)```", TOUR.read_text(encoding="utf-8"), re.DOTALL)[0]


@pytest.fixture
def house(tmp_path, monkeypatch):
    """The packages of components and methods, with the examples as new files in them."""
    for package, kind, name in ((components, "component", "smoothing"), (methods, "method", "fedadam_bn")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / f"{name}.py").write_text(example(kind), encoding="utf-8")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    return tmp_path


def test_the_component_of_the_tour_goes_on_methods_and_at_weight_zero_changes_no_bit(house):
    plain = run_tiny(house / "plain", "fedbn", "train.rounds=2")
    smoothed = run_tiny(house / "smoothed", "fedbn", "train.rounds=2", "components=['smoothing']")
    limit = run_tiny(house / "limit", "fedbn", "train.rounds=2", "components=['smoothing']", "smoothing.share=0")
    assert_same_bits(all_state(plain), all_state(limit))
    with pytest.raises(AssertionError):
        assert_same_bits(all_state(plain), all_state(smoothed))


def test_the_component_of_the_tour_is_refused_where_it_cannot_act(house):
    with pytest.raises(UserError, match=r"smoothing.*fml"):
        run_tiny(house / "refused", "fml", "components=['smoothing']")


def test_the_method_of_the_tour_runs_and_keeps_norm_layers_at_the_sites(house):
    folder = run_tiny(house / "method", "fedadam-bn", "train.rounds=2")
    start = events(folder, "start")[0]
    assert "without norm layers" in start["disclosure"]["train"]["model"]
    assert events(folder, "end")
