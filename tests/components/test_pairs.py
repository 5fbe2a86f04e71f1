"""Every component on every method, and every two components on FedAvg: a pair is refused, or it acts and says all.

A few pairs are drawn for every run of the tests; `make test-all` takes all of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import combinations, product

import pytest

from compositions import PLAIN, Left, configured, given_to, limit_of, played, short
from equipoise.cli.app import main
from equipoise.components import component_names, get_component
from equipoise.core.errors import UserError
from equipoise.methods import get_method, method_names

ALONE = [(method, (name,)) for method, name in product(method_names(), component_names())]
TOGETHER = [("fedavg", pair) for pair in combinations(component_names(), 2)]
DRAWN = random.Random(1).sample([*ALONE, *TOGETHER], 40)
PAIRS = [
    pytest.param(
        method, names, marks=() if (method, names) in DRAWN else pytest.mark.slow, id="+".join((method, *names))
    )
    for method, names in (*ALONE, *TOGETHER)
]


@cache
def left_by(method: str, names: Sequence[str], *settings: str) -> Left:
    """What a composition leaves that several pairs are compared with."""
    return played(configured(method, names, *settings))


@pytest.mark.parametrize(("method", "names"), PAIRS)
def test_a_pair_is_refused_or_acts_and_says_what_its_sheet_names(method, names):
    added = (*given_to(method, *names), *names)
    settings = short(method, *added)
    try:
        config = configured(method, added, *settings)
    except UserError as refusal:
        assert (method, len(names)) != ("fedavg", 1), "every component fits FedAvg"
        assert_names_both_sides(str(refusal), {method, *added})
        return
    left = played(config)
    assert left.said == left.sheet
    together = get_method(method).components_of(config)
    for name in names:
        others = tuple(other for other in added if other != name)
        if name in given_to(method, *others):
            continue  # without it the others are refused
        without = get_method(method).components_of(configured(method, others, *settings))
        assert left.changes(left_by(method, others, *settings)) or together == without, f"{name} changes nothing"
        if get_component(name).limit and name not in [component.name for component in without]:
            assert_limit(method, name, others, added, settings)


def assert_names_both_sides(text: str, sides: set[str]) -> None:
    """A refusal is one sentence that names two of these, and a remedy."""
    assert "\n" not in text and ". " not in text and "; " in text
    assert len(sides & set(re.findall(r"[\w-]+", text))) >= 2, text


def assert_limit(method: str, name: str, others: Sequence[str], added: Sequence[str], settings: Sequence[str]) -> None:
    """With its limit options a component changes no bit."""
    usual = left_by(method, others, *settings, *PLAIN)
    limit = played(configured(method, added, *settings, *PLAIN, *limit_of(name)))
    assert not limit.differences(usual)


def test_the_command_line_refuses_a_pair_with_exit_code_2(tmp_path, capsys, monkeypatch):
    command = ["run", "--method", "fedetf", "--with", "margins", "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["equipoise", *command])
    with pytest.raises(SystemExit) as stop:
        main()
    told = " ".join(capsys.readouterr().err.split())
    assert stop.value.code == 2 and "the component margins and the method fedetf both decide" in told
    assert not (tmp_path / "run").exists()


#: what a method has to declare of a hook that it overrides: a seat that it holds, or a word that it lacks
HOOKS = {
    "forward": {"plain forward"},
    "loss": {"plain loss"},
    "supervised": {"loss"},
    "predict": {"predict", "carrier", "plain forward"},
    "step": {"one loss", "plain forward"},
    "round": {"merge"},
}


@pytest.mark.parametrize("method", method_names())
def test_a_method_that_overrides_a_hook_says_what_it_takes(method):
    known, plain = get_method(method), get_method("fedavg")
    options = known.options()
    declared = options.holds() | options.lacks()
    for hook, words in HOOKS.items():
        sides = (known.client, plain.client) if hook != "round" else (known.server, plain.server)
        own, usual = (getattr(side, hook) for side in sides)
        drives_components = {"merge", "model_for"} <= set(own.__code__.co_names)
        assert own is usual or drives_components or declared & words, f"{hook} takes {words}"
