"""The studies on frozen features: writes their files, and chooses each row's setting on validation images.

    python benchmarks/frozen.py grids                     # src/equipoise/studies/grids/frozen-*.toml, from the registry
    python benchmarks/frozen.py tuning --out DIR          # study files that try three settings of each row
    python benchmarks/frozen.py choose --out DIR          # the best of each, from DIR's finished studies

`docs/protocol.md` says what is compared, and how.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from equipoise.core.definitions import modules_in

#: what it needs, so that `make test` has no quick form of it to try
NEEDS = "a study of frozen features"

ROOT = Path(__file__).resolve().parents[1]
GRIDS = ROOT / "src" / "equipoise" / "studies" / "grids"
CHOSEN = ROOT / "results" / "frozen-tuning.json"
#: the same in a folder of runs, of methods that were tuned there
TUNED = "tuned.json"
METRICS = ["balanced_accuracy", "macro_f1", "worst_class_recall", "accuracy", "ece"]
RATES, PRIORS = (0.005, 0.02, 0.08), (0.0, 0.25, 0.5)
SKIN = {"data.size": 224}
BLOOD = {"augment.size": 128}
#: data name, settings and, by name, the ways to share images out
FEDERATIONS: dict[str, tuple[str, str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "dermoscopy": ("dermoscopy-prr", "PRR's dermoscopic federation", SKIN, {}),
    "isic": ("fed-isic2019", "Fed-ISIC2019 without BCN", SKIN, {}),
    "ham10000": ("ham10000", "HAM10000", SKIN, {}),
    "pbc": ("pbc", "PBC", BLOOD, {}),
    "authors": ("dermoscopy-prr", "PRR's dermoscopic federation, the authors' splits", SKIN, {}),
}
#: studies on splits of the authors, which take the settings of another study
AUTHORS = {"authors": "dermoscopy"}
TUNING = [study for study in FEDERATIONS if study not in AUTHORS]
DRAWN = {"ham10000": 10, "pbc": 12}
ALPHAS = (0.05, 0.1)
BALANCED = {"train.loss": "balanced_softmax"}
COMMON = "closed, common"
#: rows of the core: method, settings, the view that is reported
CORE: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "local": ("local", {}, None),
    "local+balanced": ("local", BALANCED, None),
    "fedavg": ("fedavg", {}, None),
    "fedavg+balanced": ("fedavg", BALANCED, None),
    "fedbn": ("fedbn", {}, None),
    "fednpr-per": ("fednpr-per", {}, None),
    "fediic": ("fediic", {}, None),
    "fedbm": ("fedbm", {}, None),
    "prr": ("prr", {}, None),
    "scaffold": ("scaffold", {}, None),
    "ditto": ("ditto", {}, None),
    "closed": ("closed", {}, "personal"),
    COMMON: ("closed", {"evaluation.view": "global"}, "global"),
    "closed, local": ("closed-local", {}, "personal"),
}
#: the recipe has one setting for all federations: it is not tuned on any
OURS = "equipoise"
CLOSED = ("closed", "closed-local", OURS)
#: each system with a component switched off: the row whose setting is used, method, settings
PARTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "prr without PFA": ("prr", "prr", {"prr.pfa": "off"}),
    "prr without DET": ("prr", "prr", {"prr.det": "off"}),
    "prr without CPA": ("prr", "prr", {"prr.cpa_global": False, "prr.cpa_local": False}),
    "fednpr-per without NPR": ("fednpr-per", "fednpr-per", {"npr.weight": 0.0}),
    "fednpr-per, random clusters": ("fednpr-per", "fednpr-per", {"npr.cluster": "random"}),
    "fediic without margins": ("fediic", "fediic", {"fediic.dala": False}),
    "fediic without intra-contrast": ("fediic", "fediic", {"fediic.k1": 0.0}),
    "fediic without inter-contrast": ("fediic", "fediic", {"fediic.k2": 0.0}),
    "fedbm without generator": ("fedbm", "fedbm", {"fedbm.cgde": False}),
    "fedbm, learned classifier": ("fedbm", "fedbm", {"fedbm.classifier": "learned"}),
}
LOSSES = ("fedeamc", "focal", "fedlc")
#: the tables in which a study's rows stand
TABLES = ("Core", "Components", "Losses at each site alone", "All methods")


def beyond() -> dict[str, tuple[str, dict[str, Any], str | None]]:
    """Rows of the registry's methods that are not in the core."""
    taken = {OURS, *(method for method, _, _ in CORE.values())}
    return {method: (method, {}, None) for method in modules_in("methods") if method not in taken}


def settings_of(study: str) -> dict[str, Any]:
    """What all runs of a study share."""
    name, _, own, _ = FEDERATIONS[study]
    found: dict[str, Any] = {
        "data.name": name,
        **own,
        **({"data.split": "authors"} if study in AUTHORS else {"data.kept_apart": "any", "data.split": "grouped"}),
        "net.name": "adapter",
        "net.encoder": "efficientnet-lite0",
        "train.rounds": 10,
        "train.epochs": 3,
        "train.batch_size": 64,
        "evaluation.trained": False,
        "compute.workers": 1,
    }
    if study in DRAWN:
        found |= {
            "data.partition": "dirichlet_per_class",
            "data.sites": DRAWN[study],
            "data.redraw": True,
            "data.min_images": 8,
        }
    return found


def patients_of(study: str) -> tuple[str, ...]:
    """Whose images test: a site's own patients, or those of all sites."""
    return ("any",) if study in DRAWN else ("own",) if study in AUTHORS else ("own", "any")


def chosen_for(study: str, every: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The chosen settings of a study's rows."""
    return {name: own["settings"] for name, own in every.get(AUTHORS.get(study, study), {}).items()}


def candidates(method: str) -> list[dict[str, Any]]:
    """The three settings that a method tries."""
    if method in CLOSED:
        return [{f"{method}.prior": prior} for prior in PRIORS]
    return [{"train.optimiser.lr": rate} for rate in RATES]


def fixed(method: str) -> dict[str, Any]:
    """What a method needs whatever is tried: the closed form takes one round on the encoder's own features."""
    return {"net.adapter": "linear", "train.rounds": 1} if method in CLOSED else {}


def rows_of(study: str, chosen: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All rows of a study, with the settings that validation images chose."""
    rows = []

    def add(name: str, method: str, own: Mapping[str, Any], like: str, table: str, view: str | None = None) -> None:
        row: dict[str, Any] = {"name": name, "method": method, "tables": [table]}
        row["settings"] = {**fixed(method), **own, **chosen.get(like, {})}
        rows.append({**row, "view": view} if view else row)

    core, components, losses, every = TABLES
    for name, (method, own, view) in CORE.items():
        add(name, method, own, name, core, view)
    add(OURS, OURS, {}, OURS, core, "personal")
    for name, (like, method, own) in PARTS.items():
        add(name, method, own, like, components)
    for loss in LOSSES:
        add(f"local+{loss}", "local", {"train.loss": loss}, "local", losses)
    for name, (method, own, view) in beyond().items():
        add(name, method, own, name if name in chosen else "fedavg", every, view)
    return rows


def seedless(study: str) -> set[str]:
    """Rows that are the same under every seed: closed forms draw nothing but partitions."""
    closed = {OURS, *(name for name, (method, _, _) in CORE.items() if method in CLOSED)}
    return set() if study in DRAWN else closed


def in_one_run(settings: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the run of `closed` has the common model too, given the settings of rows."""
    return settings[COMMON] == nested({**settings["closed"], "evaluation.view": "global"})


def head_of(study: str, name: str) -> dict[str, Any]:
    """A study file without its rows."""
    head: dict[str, Any] = {
        "name": name,
        "title": f"All methods on frozen features: {FEDERATIONS[study][1]}",
        "scope": "common" if study in DRAWN else "sites",
        "metrics": METRICS,
        "seeds": [1, 2, 3, 4, 5],
        "settings": settings_of(study),
    }
    if study in DRAWN:
        head["data"] = [{"name": f"Dirichlet {alpha}", "settings": {"data.alpha": alpha}} for alpha in ALPHAS]
    return head


def nested(table: Any) -> Any:
    """Settings with dots as nested tables."""
    if isinstance(table, list):
        return [nested(entry) for entry in table]
    if not isinstance(table, dict):
        return table
    found: dict[str, Any] = {}
    for key, value in table.items():
        *path, last = key.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = {**place[last], **nested(value)} if isinstance(place.get(last), dict) else nested(value)
    return found


def written(folder: Path, study: Mapping[str, Any], remark: str) -> Path:
    """Write a study file."""
    path = folder / f"{study['name']}.toml"
    folder.mkdir(parents=True, exist_ok=True)
    named = {key: study[key] for key in study if key not in ("data", "row", "settings")}
    rest = {key: nested(study[key]) for key in ("settings", "data", "row") if key in study}
    path.write_text(f"# {remark}\n{tomli_w.dumps({**named, **rest})}", encoding="utf-8")
    return path


def tuning(study: str) -> dict[str, Any]:
    """The study that tries three settings of each method, on validation images alone."""
    head = head_of(study, f"tuning-{study}") | {"part": "valid", "seeds": [0]}
    if study in DRAWN:
        head["data"] = head["data"][:1]
    rows = []
    for name, (method, own, view) in (CORE | beyond()).items():
        for number, tried in enumerate(candidates(method)):
            row = {"name": f"{name}, {number}", "method": method, "settings": {**fixed(method), **own, **tried}}
            rows.append({**row, "view": view} if view else row)
    return {**head, "row": rows}


def choose(folder: Path) -> dict[str, Any]:
    """The setting of each row with the highest score on validation images, by study."""
    found: dict[str, Any] = {}
    for study in TUNING:
        runs = folder / f"tuning-{study}" / "runs" / (f"Dirichlet {ALPHAS[0]}" if study in DRAWN else "")
        found[study] = {}
        for name, (method, _, _) in (CORE | beyond()).items():
            tried = [selected_score(runs / f"{name}, {number}-seed0") for number in range(3)]
            known = {number: score for number, score in enumerate(tried) if score is not None}
            if len(known) == len(tried):
                best = max(known, key=lambda number: known[number])
                found[study][name] = {"settings": candidates(method)[best], "validation": tried}
    return found


def tuned(runs: Path) -> dict[str, dict[str, Any]]:
    """The published choices by study and row, and after them those of a folder of runs."""
    published, own = (
        json.loads(path.read_text(encoding="utf-8")) if path.exists() else {} for path in (CHOSEN, runs / TUNED)
    )
    return {study: {**own.get(study, {}), **published.get(study, {})} for study in TUNING}


def selected_score(run: Path) -> float | None:
    """The validation score of the round that a run selected; None where it is not finished."""
    if not (run / "events.jsonl").exists():
        return None
    events = map(json.loads, (run / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return next((round(event["value"], 5) for event in events if event["event"] == "selection"), None)


def write_grids(folder: Path = GRIDS, path: Path = CHOSEN) -> None:
    """Write the study files with the settings in a file."""
    every = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for study in FEDERATIONS:
        chosen = chosen_for(study, every)
        remark = "Written by benchmarks/frozen.py; docs/protocol.md says what is compared, and how."
        print(written(folder, {**head_of(study, f"frozen-{study}"), "row": rows_of(study, chosen)}, remark))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["grids", "tuning", "choose"])
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--chosen", type=Path, default=CHOSEN)
    asked = parser.parse_args()
    if asked.what == "tuning":
        for study in TUNING:
            print(written(asked.out, tuning(study), "Three settings of each row, on validation images alone."))
    elif asked.what == "choose":
        asked.chosen.write_text(json.dumps(choose(asked.out), indent=1) + "\n", encoding="utf-8")
        print(asked.chosen)
    else:
        write_grids(GRIDS if asked.out == ROOT / "results" else asked.out, asked.chosen)


if __name__ == "__main__":
    main()
