"""Figures in the documentation are those of the files that benchmarks and studies wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "results" / "benchmarks"
ENGINES = {
    "plain-loop": "plain loop |",
    "equipoise": "Equipoise |",
    "pfl": "pfl |",
    "flower-simulation": "Flower's simulation,",
}
STUDY_ROWS = {
    "fedavg": "FedAvg",
    "fedbn": "FedBN",
    "fml": "FML",
    "prr": "PRR, the paper's reading",
    "prr-released": "PRR, as released",
}


def measured(name: str) -> dict:
    return json.loads((BENCHMARKS / name).read_text())


def cells(page: str, first: str) -> list[str]:
    """The cells of the table row of a page that begins like this."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| {first}")]
    return [cell.strip(" *") for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("setting", measured("gpu.json")["settings"], ids=lambda setting: setting["name"])
def test_gpu_settings(setting):
    net, pixels, batch, sites = re.fullmatch(r"(\w+)-(\d+)-b(\d+)-n(\d+)", setting["name"]).groups()
    title = {"resnet18": "ResNet-18", "effb0": "EfficientNet-B0"}[net]
    row = cells("performance.md", f"{title}, {pixels} px, batch {batch}, {sites} sites")
    eager, engine = setting["eager_img_s"], setting["engine_img_s"]
    shown = [setting["precision"], f"{eager:,.0f}", f"{engine:,.0f}", f"x{engine / eager:.1f}"]
    share = f"{engine / setting['reference_img_s']:.0%}".replace("%", " %")
    assert row[1:] == [*shown, share, f"{setting['capture_s']:.1f}"]


@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16])
def test_gpu_slots(slots):
    speeds = {row["slots"]: row["img_s"] for row in measured("gpu.json")["slots"]}
    shown = [f"{slots}", f"{speeds[slots]:,.0f}", f"x{speeds[slots] / speeds[1]:.1f}"]
    assert " ".join(["|", " | ".join(shown), "|"]) in (ROOT / "docs" / "performance.md").read_text()


def test_gpu_epochs():
    gpu = measured("gpu.json")
    assert cells("performance.md", "PRR, two nets")[1] == f"{gpu['prr_epoch_s']:.2f}"
    assert cells("performance.md", "FedAvg | ")[1] == f"{gpu['fedavg_epoch_s']:.2f}"
    assert cells("performance.md", "FedAvg with torch's")[1] == f"{gpu['fedavg_epoch_torch_norm_s']:.2f}"


@pytest.mark.parametrize("engine", measured("cpu.json")["engines"], ids=lambda engine: engine["name"])
def test_cpu_engines(engine):
    row = cells("performance.md", ENGINES[engine["name"]])
    assert row[1:4] == [f"{engine['wall_s']:.1f}", f"{engine['cpu_s']:.1f}", f"{engine['memory_gb']:.2f}"]
    ratios = engine["ratios"]
    assert [float(cell) for cell in row[4:8]] == pytest.approx(
        [ratios[key] for key in ("wall_s", "cpu_s", "memory_gb", "job_wall_s")], abs=0.0051
    )
    assert row[8] == ("yes" if engine["identical"] else "no")


def test_flower_rounds():
    for result in measured("flower.json")["results"]:
        column = 1 if result["engine"] == "local" else 2
        row = cells("performance.md", f"{result['sites']} | 0." if result["sites"] < 8 else "8 | 1.")
        assert float(row[column]) == pytest.approx(result["seconds_per_round"], abs=0.051)


def test_rows_on_real_images():
    summary = json.loads((ROOT / "results" / "prr-dermoscopy" / "summary.json").read_text())
    rows = {row["method"]: row for row in summary["rows"]}
    for name, title in STUDY_ROWS.items():
        shown = cells("results.md", title)
        keys = {1: "macro_f1", 3: "balanced_auc", 5: "balanced_accuracy", 6: "worst_class_recall"}
        for place, key in keys.items():
            assert shown[place] == f"{rows[name][key]['mean']:.2f}", (name, key)
