"""The examples in docstrings of public names run as they stand."""

import doctest
import sys

import pytest

import equipoise as eq

PUBLIC = [name for name in eq.__all__ if name != "__version__"]
MAKERS = ("from_arrays", "from_frame", "from_datasets")


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_of_public_names_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    found = getattr(eq, name)
    examples = doctest.DocTestFinder().find(found, name, globs=vars(sys.modules[found.__module__]).copy())
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    told = {example.name for example in examples if example.examples}
    assert runner.failures == 0 and name in told
    assert name != "Federation" or told >= {f"Federation.{maker}" for maker in MAKERS}
