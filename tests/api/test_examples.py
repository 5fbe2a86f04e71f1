"""The examples in docstrings of public names run as they stand."""

import doctest
import sys

import pytest

import equipoise as eq

DOCUMENTED = [name for name in eq.__all__ if getattr(getattr(eq, name), "__doc__", None) and name != "__version__"]
WITH_EXAMPLES = {"Federation", "load_federation", "train"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_examples_of_public_names_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    found = getattr(eq, name)
    module = sys.modules[found.__module__]
    examples = doctest.DocTestFinder(recurse=True).find(found, name, globs=vars(module))
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.failures == 0
    assert runner.tries or name not in WITH_EXAMPLES
