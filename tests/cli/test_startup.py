"""The command line answers at once: what only runs need is not loaded before a run is asked for."""

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "scipy", "sklearn", "matplotlib", "numpy", "pydantic", "monai", "flwr", "mlflow", "tensorboard"}
SLOW = HEAVY - {"pydantic"}


def test_the_command_line_loads_nothing_heavy():
    code = f"import sys, equipoise.cli.app; print(*sorted({HEAVY} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("listed", ["methods", "components", "presets", "settings", "data list", "runs", "--help"])
def test_lists_do_not_wait_for_torch_and_fit_80_columns(listed):
    lines = "import sys, equipoise.cli.app as cli; sys.argv[0] = 'equipoise'\ntry: cli.main()\nfinally: "
    code = lines + f"print(*sorted({SLOW} & sys.modules.keys()), file=sys.stderr)"
    environment = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-c", code, *listed.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stderr.split() == []
    assert max(map(len, done.stdout.splitlines())) <= 80


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
