"""What the papers state about the methods that they compare with is what their presets run them with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from equipoise.cli.app import app
from equipoise.contract.config_files import preset_names
from equipoise.engine.runs import make_config
from equipoise.methods import get_method
from equipoise.studies.study_file import load_study

FEDIIC = {
    "fedprox": {"mu": 0.01},
    "moon": {"mu": 10.0},
    "fedrs": {"alpha": 0.0},
    "fedfocal": {"gamma": 2.0},
    "climb": {"eta_d": 0.1, "epsilon": 0.1},
}
FEDBM = {"fedprox": {"mu": 0.001}, "feddyn": {"alpha": 0.01}, "fednh": {"rho": 0.9}, "fedrod": {"gamma": 1.0}}
STATED = {
    name: FEDIIC if name.startswith("fediic-") else FEDBM for name in preset_names() if name[:5] in ("fedii", "fedbm")
}
STATED["fediic-real"] = FEDIIC | {"climb": {"eta_d": 0.01, "epsilon": 0.1}}


@pytest.mark.parametrize("preset", STATED)
def test_a_preset_runs_each_comparison_with_the_settings_that_its_paper_states(preset):
    for name, stated in STATED[preset].items():
        config, method = make_config(preset, method=name), get_method(name)
        options = method.options.model_validate(config.methods[name]).model_dump()
        assert config.method == name and {key: options[key] for key in stated} == stated


def test_both_papers_have_presets():
    assert len(STATED) == 12


def test_the_study_after_fediic_states_them_too():
    """Its data are not the preset's, so that its rows show what they run with."""
    rows = {row.name: row.settings for row in load_study("fediic-ham10000").rows}
    assert {name: rows[name][name] for name in FEDIIC} == FEDIIC


def test_fedbm_begins_at_the_papers_rate_and_decays_by_the_round():
    train = make_config("fedbm-oct-0.05").train
    rates = [train.optimiser.lr * train.schedule.factor(number) for number in range(3)]
    assert rates == pytest.approx([0.01, 0.01 * 0.99, 0.01 * 0.99**2])


# ---- what the documentation names ------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page):
    """The lines of a page's code blocks that call `equipoise`, as words."""
    blocks = re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    called = [shlex.split(part, comments=True) for line in lines for part in line.split(";")]
    return [words for words in called if "equipoise" in words]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_documented_commands_have_the_options_and_presets_that_they_name(page):
    for words in commands(page):
        command, rest = typer.main.get_command(app), words[words.index("equipoise") + 1 :]
        while hasattr(command, "commands") and rest and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        assert command.name != "equipoise", f"{page.name}: no command in {' '.join(words)}"
        known = {option for parameter in command.params for option in parameter.opts}
        given = {word.strip("[]") for word in rest if word.strip("[]").startswith("--")}
        assert given <= known | {"--help"}, " ".join(words)
        source = {"run": 0, "pilot": 0, "server": 1}.get(command.name)
        named = rest[source : source + 1] if source is not None else []
        assert all(name in preset_names() for name in named if re.fullmatch(r"[a-z][a-z0-9.-]+", name)), " ".join(words)
