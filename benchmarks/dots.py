"""Draws docs/results.svg: our scores of full training beside the papers', with intervals over seeds.

python benchmarks/dots.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from scipy.stats import t as student

ROOT = Path(__file__).resolve().parents[1]
#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "nothing: it draws one figure from the summaries"
#: study, its metric, and the title of its panel
PANELS = (
    ("prr-dermoscopy", "macro_f1", "PRR: macro F1"),
    ("fedbm-ham10000-0.05", "macro_f1", "FedBM, HAM10000: macro F1"),
    ("fedbm-pbc-0.05", "macro_f1", "FedBM, PBC: macro F1"),
    ("fednpr-isic", "balanced_accuracy", "FedNPR: balanced accuracy"),
    ("fediic-ham10000", "balanced_accuracy", "FedIIC, other images: balanced accuracy"),
)


def main() -> None:
    """One panel for each study; a filled dot is ours, an open one the paper's."""
    plt.rcParams.update({"svg.hashsalt": "equipoise", "svg.fonttype": "none", "font.size": 8})
    rows = {}
    for study, metric, _ in PANELS:
        summary = json.loads((ROOT / "results" / study / "summary.json").read_text(encoding="utf-8"))
        rows[study] = [row for row in summary["rows"] if row.get("paper", {}).get(metric) is not None]
    heights = [len(own) + 1.5 for own in rows.values()]
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(6.4, 0.19 * sum(heights)), height_ratios=heights)
    for axis, (study, metric, title) in zip(axes, PANELS, strict=True):
        for place, row in enumerate(reversed(rows[study])):
            own, count = row[metric], len(row["seeds"])
            if own["std"] is not None and count > 1:
                half = float(student.ppf(0.975, count - 1)) * own["std"] / count**0.5
                axis.plot([max(own["mean"] - half, 0), min(own["mean"] + half, 100)], [place, place], color="0.7", lw=2)
            axis.plot(own["mean"], place, "o", color="tab:blue", ms=5)
            axis.plot(row["paper"][metric], place, "o", mfc="white", mec="black", ms=5)
        axis.set_yticks(range(len(rows[study])), [row["method"] for row in reversed(rows[study])])
        axis.set_title(title, loc="left", fontsize=8, fontweight="bold")
        axis.set_xlim(0, 100)
        axis.set_ylim(-0.6, len(rows[study]) - 0.4)
        axis.grid(axis="x", color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        "per cent; filled: ours, open: the paper's; bar: 95 % interval over our seeds, where there are two or more"
    )
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "results.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
