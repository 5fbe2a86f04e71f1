"""Sites make personal models by fine-tuning only when somebody asks for them, and the results are the same bits."""

from __future__ import annotations

import dataclasses

import pytest

from equipoise.contract.composed_client import adapts
from equipoise.data.federation import Federation, Site
from equipoise.engine.evaluation import Evaluator
from equipoise.engine.loop import Run
from equipoise.engine.selection import Selection
from equipoise.methods import get_method
from harness import all_state, assert_same_bits, events, run_tiny, tiny_config, tiny_federation

SITES = ("site 1", "site 2", "site 3")
FEW = ("data.phantom.images=120", "train.batch_size=16", "train.rounds=3", "net.dropout=0.2")
GLOBAL = (*FEW, "evaluation.view='global'")
COMMON = "data.phantom.common=true"
#: the methods whose personal models are made before they are measured, with settings that make it quick
FINE_TUNED = {
    "fedbabu": ("fedbabu.finetune_epochs=1",),
    "fedetf": ("fedetf.turns=1", "fedetf.turn_epochs=1"),
    "perfedavg": (),
}
fine_tuned = pytest.mark.parametrize("method", FINE_TUNED)


def adaptations(folder, method, *settings, without_tests=False):
    """The (round, site) of every adaptation in a run, in order."""
    known, made = get_method(method), []

    class Counting(known.client):  # type: ignore[misc, name-defined]
        def adapt(self):
            made.append((self.workplace.round, self.workplace.site))
            yield from super().adapt()

    config = tiny_config(method, *FINE_TUNED[method], *settings)
    federation = tiny_federation(config)
    counting = dataclasses.replace(known, client=Counting)
    Run(config, counting, untested(federation) if without_tests else federation, folder).execute()
    return made


def untested(federation: Federation) -> Federation:
    """The federation without its test images."""

    def stripped(site: Site) -> Site:
        return Site(site.name, {part: split for part, split in site.splits.items() if part != "test"})

    common = stripped(federation.common) if federation.common else None
    return dataclasses.replace(federation, sites=tuple(map(stripped, federation.sites)), common=common)


def scored(folder, view, kind="evaluation"):
    """The events of a view."""
    return [e for e in events(folder, kind) if e["view"] == view]


# ---- how often sites fine-tune ---------------------------------------------------------------------------------


@fine_tuned
@pytest.mark.parametrize("more", [(), (COMMON,), ("evaluation.test='always'",)], ids=["sites", "common", "always"])
def test_where_the_global_model_chooses_sites_fine_tune_once_for_the_final_test(tmp_path, method, more):
    made = adaptations(tmp_path, method, *GLOBAL, *more)
    chosen = events(tmp_path, "selection")[0]["round"]
    assert made == [(chosen, site) for site in SITES]
    assert {e["round"] for e in scored(tmp_path, "global")} == {0, 1, 2, 3} and not scored(tmp_path, "personal")
    assert {e["site"] for e in scored(tmp_path, "personal", "final")} >= set(SITES)


def test_where_personal_models_choose_they_are_made_in_every_round(tmp_path):
    made = adaptations(tmp_path, "fedetf", *FEW)
    chosen = events(tmp_path, "selection")[0]["round"]
    # The models that nobody has trained yet count as those of round 1.
    assert [number for number, _ in made] == [n for n in (1, 1, 2, 3, chosen) for _ in SITES]


def test_a_mean_over_the_last_rounds_has_the_fine_tuned_models_of_each(tmp_path):
    made = adaptations(tmp_path, "fedetf", *GLOBAL, "evaluation.rule='mean_last'", "evaluation.last=2")
    last = "the last ones once more, for the predictions of the models that stay"
    assert made == [(number, site) for number in (2, 3, 3) for site in SITES], last
    measured = {(e["site"], e["round"]): e["metrics"]["accuracy"] for e in scored(tmp_path, "personal")}
    assert {number for _, number in measured} == {2, 3} and scored(tmp_path, "personal", "final")


@pytest.mark.parametrize("more", [(), (COMMON,)], ids=["sites", "common"])
def test_without_test_images_every_round_shows_the_validation_scores_of_all_models(tmp_path, more):
    made = adaptations(tmp_path, "fedetf", *GLOBAL, *more, without_tests=True)
    chosen = events(tmp_path, "selection")[-1]["round"]
    assert [number for number, _ in made] == [n for n in (1, 1, 2, 3, chosen) for _ in SITES], "the chosen ones twice"
    assert {e["round"] for e in scored(tmp_path, "personal")} == {0, 1, 2, 3}


def test_personal_models_that_sites_keep_are_measured_in_every_round(tmp_path):
    folder = run_tiny(tmp_path, "fml", *GLOBAL)
    assert {e["round"] for e in scored(folder, "personal")} == {0, 1, 2, 3}


# ---- the same results ------------------------------------------------------------------------------------------


@fine_tuned
@pytest.mark.parametrize(
    "more",
    [
        ("data.phantom.cohort=20", "evaluation.trained_test=true", "train.participation=0.7"),
        (COMMON,),
        ("evaluation.select='site'", "evaluation.metric='balanced_auc'"),
        ("evaluation.rule='mean_last'", "evaluation.last=2"),
    ],
    ids=["best", "common", "site", "mean_last"],
)
def test_fine_tuning_at_the_end_alone_changes_no_bit_of_the_results(tmp_path, monkeypatch, method, more):
    settings = (*GLOBAL, *FINE_TUNED[method], *more)
    late = run_tiny(tmp_path / "late", method, *settings)
    monkeypatch.setattr(Evaluator, "_due_views", lambda evaluator, number: evaluator.views)
    always = run_tiny(tmp_path / "always", method, *settings)
    assert len(scored(late, "personal")) < len(scored(always, "personal"))
    assert scored(late, "personal", "final") and events(late, "final") == events(always, "final")
    assert events(late, "selection") == events(always, "selection")
    assert_same_bits(all_state(late), all_state(always))
    for view in ("global", "trained"):
        assert scored(late, view) == scored(always, view)


@fine_tuned
def test_models_fine_tuned_after_the_last_round_are_those_of_the_reported_round(tmp_path, monkeypatch, method):
    settings = (*FEW, *FINE_TUNED[method], "train.schedule.name='exponential'")
    at_once = run_tiny(tmp_path / "at once", method, *settings, "evaluation.test='always'")
    monkeypatch.setattr(Selection, "_better", lambda selection, before, number, *_: {"round": min(number, 2)})
    late = run_tiny(tmp_path / "late", method, *settings, "evaluation.view='global'")
    reported = [e for e in scored(late, "personal", "final") if e["scope"] == "site"]
    measured = [e for e in scored(at_once, "personal") if (e["round"], e["part"]) == (2, "test")]
    assert {e["round"] for e in reported} == {2}
    assert {e["site"]: e["metrics"] for e in reported} == {e["site"]: e["metrics"] for e in measured}


class Stop(Exception):
    """Ends a run as a crash would."""


@pytest.mark.parametrize("where", ["round", "final"])
def test_a_run_that_was_stopped_ends_with_the_same_scores(tmp_path, where):
    settings = (*GLOBAL, *FINE_TUNED["fedetf"])
    straight = run_tiny(tmp_path / "straight", "fedetf", *settings)

    class StopThere:
        def event(self, event, **fields):
            if event == where and (event == "final" or fields["round"] == 2):
                raise Stop

    config = tiny_config("fedetf", *settings)
    halted = tmp_path / "halted"
    with pytest.raises(Stop):
        Run(config, get_method("fedetf"), tiny_federation(config), halted, [StopThere()]).execute()
    run_tiny(halted, "fedetf", *settings, resume=True)
    for kind in ("evaluation", "selection", "final"):
        assert events(straight, kind) == events(halted, kind)


@pytest.mark.parametrize(("method", "tuned"), [("prr", False), ("fedbn", False), ("fedbabu", True)])
def test_components_make_no_method_fine_tune(method, tuned):
    config = tiny_config(method, "components=['prox']")
    assert adapts(get_method(method).client_class(config)) == tuned
