"""The command line answers at once: what only runs need is not loaded before a run is asked for."""

import subprocess
import sys

HEAVY = {"torch", "scipy", "sklearn", "matplotlib", "numpy", "pydantic", "monai", "flwr", "mlflow", "tensorboard"}


def test_the_command_line_loads_nothing_heavy():
    code = f"import sys, equipoise.cli.app; print(*sorted({HEAVY} & sys.modules.keys()))"
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
