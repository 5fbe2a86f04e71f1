"""Figures in the documentation are those of the files that benchmarks and studies wrote."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from equipoise.report.record import read_run

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "results" / "benchmarks"
MEAN_OF_SITES = ("mean", "personal")
ENGINES = {
    "plain-loop": "plain loop |",
    "equipoise": "Equipoise |",
    "pfl": "pfl |",
    "flower-simulation": "Flower's simulation,",
}
SYSTEMS = {
    "prr": "PRR, five epochs",
    "fednpr": "FedNPR |",
    "fediic": "FedIIC |",
    "fedbm": "FedBM, PBC",
    "fedbm-ham10000": "FedBM, HAM10000",
}
#: what the columns of docs/results.md show
COLUMNS = {
    "macro F1": "macro_f1",
    "macro F1, validation": "validation",
    "AUC": "balanced_auc",
    "balanced accuracy": "balanced_accuracy",
    "accuracy": "accuracy",
    "worst class": "worst_class_recall",
}
TUNING = {
    "tau=7.5": "tau 7.5, lambda_dis 0.1, 16 generated images",
    "tau=12.5": "tau 12.5, the same",
    "tau=17.5 dis=0.1 batch=16": "tau 17.5, the same",
    "tau=25": "tau 25, the same",
    "dis=0.1 batch=8": "tau 17.5, lambda_dis 0.1, 8 images",
    "dis=0.1 batch=32": "tau 17.5, lambda_dis 0.1, 32 images",
    "dis=1 batch=8": "tau 17.5, lambda_dis 1, 8 images",
    "dis=1 batch=16": "tau 17.5, lambda_dis 1, 16 images",
    "dis=1 batch=32": "tau 17.5, lambda_dis 1, 32 images",
}
#: by study: what docs/results.md calls the rows of summary.json
STUDIES = {
    "prr-dermoscopy": {
        "local": "local learning",
        "central": "all images at one place",
        "fedbn+pfa": "FedBN + PFA",
        "fedbn+det": "FedBN + DET",
        "fedbn+cpa": "FedBN + CPA",
        "prr-cpa": "PRR without CPA",
        "fedavg": "FedAvg",
        "fedprox": "FedProx",
        "silobn": "SiloBN",
        "ida": "IDA",
        "fedbn": "FedBN",
        "fedproto": "FedProto",
        "fml": "FML",
        "prr": "PRR, the paper's reading",
        "prr-released": "PRR, nearly as released",
        "prr-exact": "PRR, as released",
        "prr, detail of 64 px": "control: PRR, images of 64 pixels enlarged to 128",
        "prr, tf32": "control: PRR in TF32 instead of bfloat16",
    },
    "prr-dermoscopy-grouped": {"local": "local learning", "fedavg": "FedAvg", "fedbn": "FedBN", "prr": "PRR"},
    "fedbm-ham10000-0.05": {
        "fedavg": "FedAvg",
        "fedetf": "FedETF",
        "fedbm": "FedBM",
        "fedbm-cgde": "FedBM without its generator",
        "random": "a frozen classifier of random directions",
    },
    "fedbm-pbc-0.05": {
        "fedavg": "FedAvg",
        "fedetf": "FedETF",
        "fedbm": "FedBM",
        "fedbm-cgde": "FedBM without its generator",
        "random": "a frozen classifier of random directions",
        "fedbm, all sites": "control: FedBM, all sites in each round",
        "fedavg, all sites": "control: FedAvg, all sites in each round",
        "fedbm, detail of 32 px": "control: FedBM, images of 32 pixels enlarged to 64",
        "fedavg, detail of 32 px": "control: FedAvg, images of 32 pixels enlarged to 64",
    },
    "fedbm-tuning-ham10000": TUNING,
    "fedbm-tuning-pbc": TUNING,
    "fednpr-isic": {
        "local": "local learning",
        "fedavg": "FedAvg",
        "fedbabu": "FedBABU",
        "fednpr": "FedNPR",
        "fednpr-per": "FedNPR-Per",
        "fednpr-random": "FedNPR, random sub-clusters",
        "fednpr-per-random": "FedNPR-Per, random sub-clusters",
        "fedavg, AdamW": "control: FedAvg, AdamW",
        "fednpr, AdamW": "control: FedNPR, AdamW",
        "fednpr-per, AdamW": "control: FedNPR-Per, AdamW",
    },
    "fediic-ham10000": {
        "fedavg": "FedAvg",
        "creff": "CReFF",
        "fediic": "FedIIC",
        "dala": "margins alone (DALA)",
        "dala+intra": "DALA + intra-client contrast",
        "dala+inter": "DALA + inter-client contrast",
        "fediic, no weight decay": "FedIIC, no weight decay",
        "fediic, AdamW": "FedIIC, AdamW",
        "fedavg, AdamW": "FedAvg, AdamW",
    },
}


def measured(name: str) -> dict:
    return json.loads((BENCHMARKS / name).read_text())


def section(page: str, name: str) -> list[str]:
    """The lines of the section of a page whose heading names `name`."""
    return (ROOT / "docs" / page).read_text().partition(f"`{name}`\n")[2].partition("\n## ")[0].splitlines()


def split(row: str) -> list[str]:
    return [cell.strip(" *") for cell in row.strip("|").split("|")]


def cells(page: str, first: str) -> list[str]:
    """The cells of the table row that begins like this."""
    (row,) = [line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith(f"| {first}")]
    return split(row)


@pytest.mark.parametrize("system", measured("systems.json")["systems"], ids=lambda system: system["name"])
def test_rounds_of_the_systems_are_the_measured_ones(system):
    seconds, *shares = cells("performance.md", SYSTEMS[system["name"]])[1:]
    assert seconds.split()[0] == f"{system['round_s']:.1f}"
    assert shares == [f"{system[part]:.1%}".replace("%", " %") for part in ("server_share", "input_share")]


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


@pytest.mark.parametrize(("study", "row"), [(study, row) for study in STUDIES for row in STUDIES[study]])
def test_rows_on_real_images(study, row):
    lines = section("results.md", f"results/{study}")
    (place,) = [place for place, line in enumerate(lines) if line.startswith(f"| {STUDIES[study][row]} |")]
    header = next(line for line in reversed(lines[:place]) if line.startswith("| |"))
    summary = json.loads((ROOT / "results" / study / "summary.json").read_text())
    (known,) = [found for found in summary["rows"] if found["method"] == row]
    figures, beside = known, ["macro_f1"]
    for column, cell in zip(split(header)[1:], split(lines[place])[1:], strict=True):
        if column == "seeds":
            assert cell == f"{known['macro_f1']['n']}"
        elif column == "sd":
            assert cell == (f"{figures[beside[0]]['std']:.2f}" if known["macro_f1"]["n"] > 1 else "")
        elif column == "paper":
            paper = [figures["paper"][metric] for metric in beside if metric in figures["paper"]]
            assert [float(number) for number in cell.split(" / ") if number] == paper
        else:
            if column.startswith("unseen cohort"):
                (figures,), beside = known["cohorts"].values(), ["macro_f1", "balanced_auc"]
            else:
                beside = [COLUMNS[column]]
            shown = cell.partition(" (")[0].replace("*", "")
            assert shown == " / ".join(f"{figures[metric]['mean']:.2f}" for metric in beside)


def test_what_is_said_of_drawn_sites_follows_from_the_events_of_the_runs():
    study = ROOT / "results" / "fedbm-pbc-0.05"
    holders = runpy.run_path(str(ROOT / "benchmarks" / "holders.py"))["holders"]
    known = json.loads((study / "controls.json").read_text())
    for run in known["runs"]:
        assert holders(read_run(study / "runs" / run["name"]), known["first_round"]) == run


@pytest.mark.parametrize("study", ["fedbm-ham10000-0.05", "fedbm-pbc-0.05"])
def test_rounds_of_the_released_rule_follow_from_the_events_of_the_runs(study):
    folder = ROOT / "results" / study
    rounds = runpy.run_path(str(ROOT / "benchmarks" / "released_rule.py"))["rounds"]
    known = json.loads((folder / "released_rule.json").read_text())["runs"]
    assert len(known) == len(list((folder / "runs").iterdir()))
    assert all(rounds(read_run(folder / "runs" / run["name"])) == run for run in known)


def test_what_is_said_of_the_released_rule_and_of_coarse_images_is_measured():
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    runs = json.loads((ROOT / "results" / "fedbm-ham10000-0.05" / "released_rule.json").read_text())["runs"]
    f1 = {run["name"]: (run["released"]["macro_f1"], run["ours"]["macro_f1"]) for run in runs}
    for title, name in (("FedBM", "fedbm"), ("FedAvg", "fedavg")):
        (first, ours), (second, others) = f1[f"{name}-seed1"], f1[f"{name}-seed2"]
        assert re.search(rf"{title} {first} and {second} \((ours )?{ours} and {others}\)", page)
    detail = json.loads((ROOT / "results" / "prr-dermoscopy" / "detail.json").read_text())
    left = dict(zip(detail["bands"], detail["brightness left at half the pixels"]))
    assert f"{100 * left['24 to 32 cycles']:.0f} % at 24 to 32" in page


def test_the_results_in_the_readme_are_those_of_their_page():
    readme, page = ((ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "docs/results.md"))
    table = readme[readme.index("| study | what was run |") : readme.index("## Speed")]
    shown = re.findall(r"\d+\.\d+", table)
    assert len(shown) > 10 and not [number for number in shown if number not in page]


def test_the_summary_of_results_has_the_figures_of_the_studies():
    page = " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
    text = page.partition("## In short")[2].partition(" ## ")[0]
    for study, row, metric, told in (
        ("prr-dermoscopy", "prr", "macro_f1", "Macro F1 is {} as the paper describes it"),
        ("prr-dermoscopy", "prr-exact", "macro_f1", "and {} as released"),
        ("prr-dermoscopy", "fedavg", "macro_f1", "FedAvg {} (51.6)"),
        ("prr-dermoscopy", "fedbn", "macro_f1", "FedBN {} (61.0)"),
        ("prr-dermoscopy", "fml", "macro_f1", "FML {} (67.6)"),
        ("prr-dermoscopy", "prr-cpa", "macro_f1", "loss for rare classes, {} (71.2)"),
        ("prr-dermoscopy-grouped", "prr", "macro_f1", "PRR {}, alone"),
        ("prr-dermoscopy-grouped", "local", "macro_f1", "alone {}, nearly"),
        ("fedbm-ham10000-0.05", "fedbm", "macro_f1", "macro F1 {} (45.4)"),
        ("fedbm-ham10000-0.05", "fedavg", "macro_f1", "FedAvg {} (31.8)"),
        ("fedbm-pbc-0.05", "fedbm", "macro_f1", "{} (80.5 ± 5.5)"),
        ("fedbm-pbc-0.05", "fedavg", "macro_f1", "FedAvg {} (48.0)"),
        ("fednpr-isic", "fednpr-per", "balanced_accuracy", "FedNPR-Per {} (76.2)"),
        ("fednpr-isic", "fedavg", "balanced_accuracy", "FedAvg {} (69.5)"),
        ("fediic-ham10000", "fediic", "balanced_accuracy", "balanced accuracy {}, FedAvg"),
        ("fediic-ham10000", "fedavg", "balanced_accuracy", "FedAvg {}. Weight"),
        ("fediic-ham10000", "fediic, AdamW", "balanced_accuracy", "with AdamW it has {}"),
    ):
        summary = json.loads((ROOT / "results" / study / "summary.json").read_text())
        (known,) = [found for found in summary["rows"] if found["method"] == row]
        assert told.format(f"{known[metric]['mean']:.1f}") in text, (study, row)


def test_what_is_said_of_all_runs_of_prr_follows_from_them():
    runs = (ROOT / "results" / "prr-dermoscopy" / "runs").iterdir()
    records = [read_run(run) for run in runs if run.name.startswith("prr") and not run.name.startswith("prr-cpa")]
    finals = pd.concat([record.finals for record in records])
    means = finals["macro_f1"][(finals["scope"] == "mean") & (finals["view"] == "personal")]
    scores = 100 * np.array(means)
    mean, deviation, n = scores.mean(), scores.std(ddof=1), len(scores)
    margin = student.ppf(0.975, n - 1) * deviation * (1 + 1 / n) ** 0.5
    text = " ".join(line.strip() for line in section("results.md", "results/prr-dermoscopy"))
    assert n == 13 and f"with CPA, readings and controls together, is above {scores.max():.2f}" in text
    assert f"mean is {mean:.2f} and their standard deviation {deviation:.2f}" in text
    assert f"expected between {mean - margin:.1f} and {mean + margin:.1f}" in text


def test_what_is_said_of_the_choice_of_the_best_row_is_measured():
    known = {(table["rows"], table["seeds"]): table["share"] for table in measured("best_row.json")["tables"]}
    text = " ".join((ROOT / "docs" / "studies.md").read_text(encoding="utf-8").split())
    few, more, many = (f"{100 * known[rows, 3]:.1f} %" for rows in (5, 10, 32))
    assert f"{few} with 5 rows, {more} with 10, {many} with 32" in text
