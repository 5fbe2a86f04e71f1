"""Which round is reported, and of which models: each site's own round, and test scores right after local training."""

from __future__ import annotations

import json

import pytest
import torch

from equipoise.core.errors import UserError
from equipoise.engine.evaluation import Score
from equipoise.engine.loop import Run
from equipoise.engine.payload_files import read_payload, safe_name
from equipoise.engine.selection import Selection
from equipoise.engine.states import read_state
from equipoise.methods import get_method
from equipoise.report import headline, read_run, selection_note
from harness import all_state, assert_same_bits, events, run_tiny, tiny_config, tiny_federation

FEW = ("data.phantom.images=120", "train.batch_size=16")
TRAINED = (*FEW, "evaluation.trained_test=true")
BY_SITE = (*FEW, "train.rounds=5", "evaluation.metric='balanced_auc'", "evaluation.select='site'")
METRIC = "balanced_accuracy"


def finals(folder, view, scope="site"):
    """Final events of a view by site."""
    return {e["site"]: e for e in events(folder, "final") if e["view"] == view and e["scope"] == scope}


def evaluations(folder, view, part):
    """Evaluation events of a view by (site, round)."""
    found = (e for e in events(folder, "evaluation") if e["view"] == view and e["part"] == part)
    return {(e["site"], e["round"]): e for e in found}


class Stop(Exception):
    """Ends a run as a crash would."""


class StopAt:
    def __init__(self, kind):
        self.kind = kind

    def event(self, event, **fields):
        if event == self.kind and (event == "final" or fields["round"] == 3):
            raise Stop


def halted_and_resumed(folder, method, settings, kind):
    """A run that ends at its third round or at its first result, and goes on."""
    config = tiny_config(method, *settings)
    with pytest.raises(Stop):
        Run(config, get_method(method), tiny_federation(config), folder, [StopAt(kind)]).execute()
    return run_tiny(folder, method, *settings, resume=True)


# ---- test scores right after local training -------------------------------------------------------------


def test_trained_scores_are_those_of_the_selected_round_before_averaging(tmp_path):
    folder = run_tiny(tmp_path, "fednpr", *TRAINED, "train.rounds=4", "evaluation.test='always'")
    chosen = events(folder, "selection")[0]["round"]
    measured = evaluations(folder, "trained", "test")
    reported = finals(folder, "trained")
    assert len(reported) == 3 and reported.keys() == finals(folder, "global").keys()
    for site, final in reported.items():
        assert final["round"] == chosen and final["confusion"] == measured[site, chosen]["confusion"]
    mean = finals(folder, "trained", "mean")[None]
    assert mean["metrics"][METRIC] == pytest.approx(sum(f["metrics"][METRIC] for f in reported.values()) / 3)
    pooled = finals(folder, "trained", "pooled")[None]
    total = torch.stack([torch.tensor(final["confusion"]) for final in reported.values()]).sum(0)
    assert pooled["confusion"] == total.tolist()
    assert any(f["confusion"] != finals(folder, "global")[site]["confusion"] for site, f in reported.items())


def test_where_nothing_is_averaged_the_trained_model_is_the_reported_one(tmp_path):
    folder = run_tiny(tmp_path, "local", *TRAINED, "evaluation.rule='last'")
    for site, final in finals(folder, "personal").items():
        assert finals(folder, "trained")[site]["metrics"] == final["metrics"]


def test_testing_after_training_changes_neither_training_nor_selection(tmp_path):
    plain = run_tiny(tmp_path / "plain", "fednpr", *FEW, "train.rounds=3")
    tested = run_tiny(tmp_path / "tested", "fednpr", *TRAINED, "train.rounds=3")
    assert_same_bits(all_state(plain), all_state(tested))
    assert events(plain, "selection") == events(tested, "selection")
    assert events(plain, "evaluation") == events(tested, "evaluation"), "test scores of other rounds are not told"
    assert events(plain, "final") == [e for e in events(tested, "final") if e["view"] != "trained"]


@pytest.mark.parametrize("kind", ["round", "final"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fednpr", (*TRAINED, "train.rounds=3", "train.participation=0.7")),
        ("fednpr", (*TRAINED, "train.rounds=3", "evaluation.rule='mean_last'", "evaluation.last=2")),
        ("fedrep", (*BY_SITE, "evaluation.trained_test=true")),
    ],
    ids=["best", "mean_last", "site"],
)
def test_resume_gives_the_same_results(tmp_path, method, settings, kind):
    straight = run_tiny(tmp_path / "straight", method, *settings)
    halted = halted_and_resumed(tmp_path / "halted", method, settings, kind)
    assert finals(straight, "trained") and events(straight, "final") == events(halted, "final")
    assert events(straight, "selection") == events(halted, "selection")


def test_workers_do_not_change_the_trained_scores(tmp_path):
    one = run_tiny(tmp_path / "one", "fednpr", *TRAINED)
    two = run_tiny(tmp_path / "two", "fednpr", *TRAINED, "compute.workers=2")
    assert finals(one, "trained") and events(one, "final") == events(two, "final")


def test_the_mean_of_the_last_rounds_averages_the_trained_scores_too(tmp_path):
    settings = ("train.rounds=4", "evaluation.rule='mean_last'", "evaluation.last=2")
    folder = run_tiny(tmp_path, "fedavg", *TRAINED, *settings)
    measured = evaluations(folder, "trained", "test")
    assert {number for _, number in measured} == {3, 4}
    for site, final in finals(folder, "trained").items():
        both = [measured[site, number]["metrics"]["accuracy"] for number in (3, 4)]
        assert final["metrics"]["accuracy"] == pytest.approx(sum(both) / 2)


def test_a_site_that_did_not_train_in_the_reported_round_is_named_not_guessed(tmp_path):
    folder = run_tiny(tmp_path, "fedavg", *TRAINED, "train.participation=0.67", "evaluation.rule='last'")
    took_part = set(events(folder, "round")[-1]["sites"])
    assert len(took_part) == 2 and finals(folder, "trained").keys() == took_part
    (absent,) = finals(folder, "global").keys() - took_part
    assert any(f"not tested right after training: {absent} " in e["text"] for e in events(folder, "warning"))


def test_without_test_images_at_sites_the_run_says_that_none_is_tested_after_training(tmp_path):
    folder = run_tiny(tmp_path, "central", *TRAINED)
    assert any("trained_test = True has no effect" in text for text in events(folder, "start")[0]["warnings"])
    assert finals(folder, "global") and not finals(folder, "trained")


def test_the_report_shows_the_trained_view_beside_the_others(tmp_path):
    folder = run_tiny(tmp_path, "fednpr", *TRAINED)
    rows = headline([read_run(folder)]).set_index(["view", "scope"])
    assert {("global", "mean"), ("trained", "mean"), ("trained", "pooled")} <= {*rows.index}
    expected = finals(folder, "trained", "mean")[None]["metrics"][METRIC]
    assert rows.loc[("trained", "mean"), METRIC] == expected


# ---- each site's own round ---------------------------------------------------------------------------------


def own_rounds(folder, view="personal"):
    """The first round that is best on a site's own validation images, by site."""
    scores: dict[str, dict[int, float]] = {}
    for (site, number), event in evaluations(folder, view, "valid").items():
        if number > 0:
            scores.setdefault(site, {})[number] = event["metrics"]["balanced_auc"]
    return {site: min(n for n, v in of.items() if v == max(of.values())) for site, of in scores.items()}


def test_each_site_reports_its_own_best_validation_round(tmp_path):
    folder = run_tiny(tmp_path, "prr", *BY_SITE, "evaluation.test='always'", "data.phantom.cohort=20")
    rounds = own_rounds(folder)
    assert len(set(rounds.values())) > 1, "the case is worth nothing if sites agree"
    measured = evaluations(folder, "personal", "test")
    for site, final in finals(folder, "personal").items():
        assert final["round"] == rounds[site]
        assert final["metrics"] == measured[site, rounds[site]]["metrics"]
    chosen = events(folder, "selection")[0]
    assert {site: choice["round"] for site, choice in chosen["sites"].items()} == rounds
    assert finals(folder, "personal", "mean")[None]["round"] is None
    (cohort,) = finals(folder, "personal", "cohort").values()
    assert cohort["round"] == rounds["site 1"], "the first site's model stands for the personal ones"


def test_the_models_written_out_are_those_that_were_tested(tmp_path):
    folder = run_tiny(tmp_path, "fedrep", *BY_SITE, "checkpoint.every=4")
    chosen = events(folder, "selection")[0]["round"]
    rounds = own_rounds(folder)
    assert set(rounds.values()) - {chosen}
    common = read_payload(folder / "models" / "global.safetensors")
    for site, number in rounds.items():
        published = common | read_payload(folder / "models" / "personal" / f"{safe_name(site)}.safetensors")
        (version,) = (folder / "sites" / safe_name(site)).glob(f"{number:05d}-*.safetensors")
        assert_same_bits(published["kept"], read_state(version))
        server = read_payload(folder / "checkpoints" / f"round-{number:05d}" / "server.safetensors")
        assert_same_bits(published["model"], server["model"])


def test_other_views_keep_to_the_federations_round(tmp_path):
    common = run_tiny(tmp_path / "common", "fml", *BY_SITE[:-1])
    by_site = run_tiny(tmp_path / "site", "fml", *BY_SITE)
    assert finals(common, "global") == finals(by_site, "global")
    assert_same_bits(*(read_payload(f / "models" / "global.safetensors")["model"] for f in (common, by_site)))
    assert finals(common, "personal") != finals(by_site, "personal")


def test_the_report_says_which_round_each_site_chose(tmp_path):
    run = read_run(run_tiny(tmp_path, "local", *BY_SITE))
    rounds = own_rounds(tmp_path)
    assert "For each site the round that is best by its own validation" in selection_note(run)
    assert all(f"{site} {number}" in selection_note(run) for site, number in rounds.items())
    assert run.selected_round is None
    rows = headline([run])
    assert rows["round"][rows["scope"] == "mean"].isna().all()


def test_a_global_model_has_one_round_for_all_sites(tmp_path):
    common, by_site = (run_tiny(tmp_path / str(len(more)), "fedavg", *more) for more in (BY_SITE[:-1], BY_SITE))
    assert finals(common, "global") == finals(by_site, "global") and "sites" not in events(by_site, "selection")[0]
    assert any("evaluation.select = 'site' has no effect" in text for text in events(by_site, "start")[0]["warnings"])


def test_a_round_for_each_site_needs_the_best_rule():
    with pytest.raises(UserError, match="needs rule = 'best'"):
        tiny_config("local", "evaluation.select='site'", "evaluation.rule='last'")


# ---- the choice itself ---------------------------------------------------------------------------------------


def score(site, part, accuracy, view="global"):
    """A made-up score."""
    return Score(site, view, part, {}, {"metrics": {METRIC: accuracy}, "recall": [], "confusion": [[0]], "n": 1})


@pytest.mark.parametrize("select", ["federation", "site"])
def test_no_test_score_ever_sways_the_choice(select):
    valid = {1: (0.5, 0.9), 2: (0.8, 0.7), 3: (0.6, 0.95)}
    choices = []
    for tests in ((0.1, 0.2, 0.3), (0.9, 0.1, 0.0)):
        selection = Selection(tiny_config("local", "train.rounds=3", f"evaluation.select='{select}'"), "personal")
        for number, values in valid.items():
            scores = [score(site, "valid", value, "personal") for site, value in zip("AB", values)]
            more = [score(s, "test", tests[number - 1], v) for s in "AB" for v in ("personal", "trained")]
            selection.note(number, [*scores, *more, score("A", "valid", 1.0 - number / 9, "trained")])
        choices.append(selection.record())
        kept = {s.site: s.metric(METRIC) for s in selection.kept[0]}
        where = {"federation": (3, 3), "site": (2, 3)}[select]
        assert kept == {"A": tests[where[0] - 1], "B": tests[where[1] - 1]}
    assert choices[0] == choices[1] and choices[0]["round"] == 3


def test_a_site_without_validation_images_follows_the_federation():
    selection = Selection(tiny_config("local", "train.rounds=3", "evaluation.select='site'"), "personal")
    for number, values in {1: (0.5, 0.9), 2: (0.8, 0.2), 3: (0.1, 0.1)}.items():
        selection.note(number, [score(site, "valid", value, "personal") for site, value in zip("AB", values)])
    assert [selection.round_of("personal", site) for site in "ABC"] == [2, 1, 1]
    assert selection.reported("ABC") == [(2, ["A"]), (1, ["B", "C"])]


def noted(rounds, *settings):
    """The choice among made-up rounds {number: {site: value}} of a federation of A, B and C, saved after each."""
    config = tiny_config("fedavg", "train.rounds=5", *settings)
    selection = Selection(config, "global")
    for number, values in rounds.items():
        missing = [site for site in "ABC" if site not in values]
        selection.note(number, [score(site, "valid", value) for site, value in values.items()], missing)
        resumed = Selection(config, "global")
        resumed.restore(json.loads(json.dumps(selection.record())), selection.kept)
        selection = resumed
    return selection.record()


COMPLETE = {"A": 0.9, "B": 0.9, "C": 0.1}
FLATTERED = {"A": 0.95, "B": 0.95}


@pytest.mark.parametrize("rounds", [{1: FLATTERED, 2: COMPLETE}, {1: COMPLETE, 2: FLATTERED}])
def test_a_round_whose_weak_site_is_missing_does_not_win(rounds):
    chosen = noted(rounds | {3: {"A": 1.0}, 4: {}})
    assert rounds[chosen["round"]] == COMPLETE and "missing" not in chosen


def test_where_no_round_is_complete_the_most_complete_ones_compete():
    chosen = noted({1: {"A": 1.0}, 2: {"A": 0.2, "B": 0.4}, 3: {"B": 0.5, "C": 0.3}, 4: {"C": 0.9}, 5: {}})
    assert chosen == {"round": 3, "value": pytest.approx(0.4), "missing": ["A"]}


def test_the_last_round_is_the_last_whoever_is_missing():
    assert noted({1: COMPLETE, 2: FLATTERED}, "evaluation.rule='last'")["round"] == 2


def test_the_last_round_is_reported_whatever_the_first_one_would_be(tmp_path):
    """first_round may lie beyond the last round, as in a preset for longer runs, for it says nothing here."""
    usual = run_tiny(tmp_path / "usual", "fedavg", "evaluation.rule='last'")
    later = run_tiny(tmp_path / "later", "fedavg", "evaluation.rule='last'", "evaluation.first_round=41")
    for kind in ("selection", "final"):
        assert events(usual, kind) == events(later, kind)
    assert events(later, "selection")[0]["round"] == 2


def test_rounds_can_be_chosen_by_the_score_of_fedbms_authors(tmp_path):
    folder = run_tiny(tmp_path, "fedavg", "evaluation.metric='fedbm_score'", "train.rounds=3")
    (chosen,) = events(folder, "selection")
    assert chosen["metric"] == "fedbm_score" and 0 < chosen["value"] < 5
