"""Methods that are lists of components: the same bits as FedAvg with these components on it, under plain names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from torch import Tensor

from composed import server_of, setting_of
from equipoise.engine.runs import make_config
from equipoise.methods import get_method
from harness import all_state, assert_same_bits, run_tiny, tiny_config

FEW = ("data.phantom.images=90", "evaluation.trained=false")
GENERATOR = ("every=1", "generator_steps=2", "generator_batch=6", "generator_width=2", "synthetic=4")
BALANCED = ("train.loss=balanced_softmax", "npr.weight=0.1")
#: {method: (its settings, the components, the settings of FedAvg with them)}
SYSTEMS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "fedbm": (
        tuple(f"fedbm.{setting}" for setting in GENERATOR),
        ("concepts", "generator"),
        tuple(f"generator.{setting}" for setting in GENERATOR),
    ),
    "fedbn": ((), ("local-norm",), ()),
    "fediic": (
        ("fediic.projection=32",),
        ("margins", "projector", "intra-contrast", "inter-contrast"),
        ("projector.size=32",),
    ),
    "fednpr": ((), ("npr",), BALANCED),
    "fednpr-per": ((), ("personal-head", "npr"), BALANCED),
    "prr": (
        ("prr.warmup=0", "train.epochs=2"),
        ("local-norm", "fourier", "cpa", "deputy"),
        ("cpa.warmup=0", "train.epochs=2", "train.aggregation=uniform"),
    ),
    "silobn": ((), ("local-statistics",), ()),
}


def listed(names: tuple[str, ...]) -> str:
    return f"components={list(names)}"


def plain(state: Mapping[str, Tensor], components: tuple[str, ...], stays: str) -> dict[str, Tensor]:
    """Tensors without the prefixes of components, and what stays at a site under the method's own word for it."""

    def renamed(word: str) -> str:
        component = next((name for name in components if word.startswith(f"{name}.")), "")
        return stays if word == "stays" else word.removeprefix(f"{component}.")

    return {"/".join(map(renamed, name.split("/"))): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("method", SYSTEMS)
def test_it_is_fedavg_with_its_components_bit_for_bit(tmp_path, method):
    settings, components, spelt_out = SYSTEMS[method]
    whole = run_tiny(tmp_path / "whole", method, *FEW, *settings)
    parts = run_tiny(tmp_path / "parts", "fedavg", *FEW, listed(components), *spelt_out)
    stays = get_method(method).names.get("stays", "stays")
    assert_same_bits(all_state(whole), plain(all_state(parts), components, stays))


@pytest.mark.parametrize("method", SYSTEMS)
def test_no_name_of_its_own_components_carries_a_prefix(method):
    """Policies of hospitals and checkpoints of runs go by these names."""
    settings, components, _ = SYSTEMS[method]
    setting = setting_of(method, *settings)
    sheet = get_method(method).client_class(setting.config).discloses
    names = {*sheet, *(entry for entries in sheet.values() for entry in entries), *server_of(setting).state.values}
    assert not [name for name in names if name.startswith(tuple(f"{component}." for component in components))]


def test_a_component_that_a_user_adds_carries_its_name_beside_those_that_do_not():
    setting = setting_of("fedbm", listed(("margins",)), "fedbm.cgde=false")
    sheet = get_method("fedbm").client_class(setting.config).discloses
    assert sheet.keys() == {"train", "margins.survey"}
    ask = next(server_of(setting).round(1, ("a",)))
    assert ask.action == "margins.survey" and ask.payload.keys() == {"model", "classifier"}


@pytest.mark.parametrize("method", ["fedbm", "fediic", "prr"])
def test_the_order_in_which_a_method_names_its_components_changes_no_bit(tmp_path, method):
    known = get_method(method)

    class Reversed(known.options):  # type: ignore[misc, name-defined]
        def components(self):
            return super().components()[::-1]

    other = dataclasses.replace(known, options=Reversed)
    config = tiny_config(method)
    assert other.options_of(config).components() == known.options_of(config).components()[::-1]
    settings = (*FEW, *SYSTEMS[method][0])
    forwards = run_tiny(tmp_path / "forwards", known, *settings, known_as=method)
    backwards = run_tiny(tmp_path / "backwards", other, *settings, known_as=method)
    assert_same_bits(all_state(forwards), all_state(backwards))


def test_the_order_in_which_a_user_lists_components_makes_the_same_run():
    components = SYSTEMS["fediic"][1]
    forwards, backwards = (make_config(None, [listed(some)]) for some in (components, components[::-1]))
    assert forwards.digest() == backwards.digest() and forwards.run_name == backwards.run_name
    known = get_method("fedavg")
    assert known.components_of(forwards) == known.components_of(backwards)
