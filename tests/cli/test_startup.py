"""The command line answers at once: what only runs need is not loaded before a run is asked for."""

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "scipy", "sklearn", "matplotlib", "numpy", "pydantic", "monai", "flwr", "mlflow", "tensorboard"}
SLOW = HEAVY - {"pydantic", "numpy"}  # a config is checked with pydantic, and names metrics of numpy arrays


def test_the_command_line_loads_nothing_heavy():
    code = f"import sys, equipoise.cli.app; print(*sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    "listed",
    [
        "methods",
        "components",
        "nets",
        "losses",
        "metrics",
        "presets",
        "settings",
        "data list",
        "runs",
        "--help",
        "study list",
    ],
)
def test_lists_do_not_wait_for_torch_and_fit_80_columns(listed):
    lines = "import sys, equipoise.cli.app as cli; sys.argv[0] = 'equipoise'\ntry: cli.main()\nfinally: "
    code = lines + f"print(*sorted({SLOW} & sys.modules.keys()), file=sys.stderr)"
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-c", code, *listed.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stderr.split() == []
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("run --method fedp", ["fedproc", "fedproto", "fedprox"]),
        ("run --with npr,marg", ["npr,margins"]),
        ("run --data k", ["kvasir"]),
        ("run --net res", ["resnet18"]),
        ("run prr-derm", ["prr-dermoscopy"]),
        ("study li", ["list"]),
        ("methods show pr", ["prr"]),
        ("components show npr", ["npr"]),
    ],
)
def test_the_tab_key_offers_names_without_waiting_for_torch(words, offered):
    code = (
        "import sys, equipoise.cli.app as cli; sys.argv[0] = 'equipoise'\ntry: cli.main()\n"
        f"finally: print(*sorted({HEAVY} & sys.modules.keys()), file=sys.stderr)"
    )
    typed = f"equipoise {words}"
    asked = {"_EQUIPOISE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words.split()))}
    environment = {**os.environ, **asked}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert {*offered} <= {*done.stdout.split()} and done.stderr.split() == []


def test_a_run_does_not_wait_for_what_reports_need():
    reports = {"pandas", "matplotlib", "jinja2", "scipy", "sklearn"}
    imports = "import sys, equipoise.api.training_runs, equipoise.engine.runs"
    code = f"{imports}; print(*sorted({reports} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_packages_still_offer_their_names():
    from equipoise import data
    from equipoise import studies as study
    from equipoise.nets import concepts

    for package in (concepts, data, study):
        assert all(getattr(package, name).__module__.startswith("equipoise.") for name in _defined(package))
        assert not hasattr(package, "absent")


def _defined(package):
    """The names of a package that stand for classes and functions."""
    return [name for name in package.__all__ if hasattr(getattr(package, name), "__module__")]
