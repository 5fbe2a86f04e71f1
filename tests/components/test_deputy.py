"""PRR's DET: who learns from whom, step by step, and that a deputy travels in place of the personal model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from composed import client_of, noise_of, perform, setting_of
from equipoise.components.deputy import DeputySite, next_stage
from equipoise.core.errors import UserError
from equipoise.nets import groups
from harness import assert_same_bits, run_tiny, site_states, tiny_federation

NO_CPA = ("prr.cpa_global=false", "prr.cpa_local=false")
RECOVER, EXCHANGE, SUBLIMATE = (1, 1.0, 0.0), (2, 1.0, 1.0), (3, 0.0, 1.0)


# ---- steps -----------------------------------------------------------------------------------------


def test_stages_follow_the_golden_table(golden):
    g = golden("prr/det_stage")
    rows = zip(g["stage_in"].tolist(), g["f1_deputy"].tolist(), g["f1_personal"].tolist(), g["stage_out"].tolist())
    for stage, deputy, personal, expected in rows:
        assert next_stage(stage, deputy, personal, float(g["alpha1"]), float(g["alpha2"])) == expected


def test_a_step_that_det_does_not_have_is_refused():
    with pytest.raises(UserError, match="stage=4"):
        next_stage(4, 0.9, 0.9)


def stages_taken(monkeypatch: pytest.MonkeyPatch, *settings: str) -> list[tuple[int, float, float]]:
    """(stage, gate of the deputy's lesson, gate of the personal model's) of each local epoch of one round."""
    taken: list[tuple[int, float, float]] = []
    take = DeputySite.before_epoch

    def note(side: DeputySite) -> None:
        take(side)
        taken.append((int(side.stage), float(side.deputy_learns), float(side.personal_learns)))

    monkeypatch.setattr(DeputySite, "before_epoch", note)
    setting = setting_of("prr", "train.epochs=4", *settings)
    counts, prototypes = torch.ones(4), torch.zeros(4, 128)
    message = {"model": setting.new_net().state_dict(), "epoch": 0}
    perform(setting, "train", message | {"federation_counts": counts, "prototypes": prototypes})
    return taken


@pytest.mark.parametrize("metric", ["valid", "train", "released"])
def test_a_good_deputy_recovers_exchanges_and_sublimates(monkeypatch, metric):
    settings = (f"prr.det_metric={metric}", "prr.recover=0", "prr.sublimate=0")
    assert stages_taken(monkeypatch, *settings) == [RECOVER, EXCHANGE, SUBLIMATE, SUBLIMATE]


@pytest.mark.parametrize(("metric", "part"), [("valid", "valid"), ("train", "train"), ("released", "train")])
def test_steps_move_by_the_predictions_of_all_images_of_a_part(monkeypatch, metric, part):
    judged = []
    monkeypatch.setattr(
        "equipoise.tasks.classification.Classification.agreement",
        lambda task, confusion: judged.append(int(confusion.sum())) or 1.0,
    )
    stages_taken(monkeypatch, f"prr.det_metric={metric}")
    site = tiny_federation(setting_of("prr", "train.epochs=4").config).training_sites()[0]
    assert judged == [len(site.splits[part])] * 2 * 3


def test_without_sublimation_the_exchange_goes_on(monkeypatch):
    taken = stages_taken(monkeypatch, "prr.det=ER", "prr.recover=0", "prr.sublimate=0")
    assert taken == [RECOVER, EXCHANGE, EXCHANGE, EXCHANGE]


def test_a_bad_deputy_goes_on_recovering(monkeypatch):
    scores = iter([0.6, 1.0] * 3)  # the deputy is judged first
    monkeypatch.setattr("equipoise.tasks.classification.Classification.agreement", lambda task, confusion: next(scores))
    assert stages_taken(monkeypatch) == [RECOVER] * 4


def test_a_run_reaches_the_last_stage_by_its_own_scores(tmp_path):
    lenient = ("prr.recover=0.0", "prr.sublimate=0.0")  # on so few images scores are noise: any deputy is good enough
    run = run_tiny(tmp_path, "prr", "train.epochs=3", "train.rounds=1", *lenient)
    assert [int(t) for name, t in site_states(run).items() if name.endswith("stage/")] == [3, 3, 3]


# ---- lessons ---------------------------------------------------------------------------------------


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(1)[range(len(logits)), labels].mean()


def lesson(student: Tensor, teacher: Tensor) -> Tensor:
    taught = teacher.softmax(1).detach()
    return (taught * (taught.log() - student.log_softmax(1))).sum(1).mean()


@pytest.mark.parametrize(("stage", "personal_learns", "deputy_learns"), [(1, 0, 1), (2, 1, 1), (3, 1, 0)])
def test_each_model_gets_the_gradient_of_its_own_loss(stage, personal_learns, deputy_learns):
    client = client_of(setting_of("prr", *NO_CPA))
    side, net, batch = client.sides["deputy"], client.net, noise_of(12)
    client.workplace.begin({"model": net.state_dict()}, None)
    with torch.no_grad():
        for index, parameter in enumerate(side.net.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    side.stage.fill_(stage)
    side.before_epoch()
    client.workplace.set_mode(False)
    parameters = [*net.parameters(), *side.net.parameters()]
    found = torch.autograd.grad(client.loss(batch, client.outputs(batch)), parameters)
    personal, deputy = net(batch.image), side.net(batch.image)
    personal_loss = cross_entropy(personal, batch.label) + personal_learns * lesson(personal, deputy)
    deputy_loss = cross_entropy(deputy, batch.label) + deputy_learns * lesson(deputy, personal)
    expected = [
        *torch.autograd.grad(personal_loss, list(net.parameters())),
        *torch.autograd.grad(deputy_loss, list(side.net.parameters())),
    ]
    assert {id(p) for p in client.workplace.phases["main"].optimiser.parameters} == {id(p) for p in parameters}
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_each_model_is_clipped_by_a_norm_of_its_own():
    client = client_of(setting_of("prr"))
    models, names = client.workplace.phases["main"].optimiser.models, client.workplace.phases["main"].optimiser.names
    assert list(dict.fromkeys(models)) == ["personal", "deputy"]
    assert all(name.startswith(f"{model}.") for name, model in zip(names, models, strict=True))


@pytest.mark.parametrize("method", ["prr", "fedbn"])
def test_only_while_recovering_does_the_personal_model_train_as_if_alone(tmp_path, method):
    """With nothing learnt from the deputy, the personal model is the one that `local` trains, bit for bit."""
    one_epoch = ("train.epochs=1",)  # a round of one epoch never gets past recovering
    alone = NO_CPA if method == "prr" else ("components=['deputy']",)
    personal = "personal" if method == "prr" else "deputy.personal"
    paired = site_states(run_tiny(tmp_path / "paired", method, *one_epoch, *alone))
    local = site_states(run_tiny(tmp_path / "local", "local", *one_epoch))
    kept = {name.replace(f"/{personal}/", "/"): t for name, t in paired.items() if f"/{personal}/" in name}
    own = {name.replace("/net/", "/"): t for name, t in local.items() if "/net/" in name}
    assert kept
    assert_same_bits(kept, own)


# ---- what leaves a site ----------------------------------------------------------------------------


@pytest.mark.parametrize("det", ["off", "ERS"])
def test_only_the_deputy_leaves_and_no_batch_norm(det):
    setting = setting_of("prr", f"prr.det={det}")
    net = setting.new_net()
    message = {"model": net.state_dict(), "epoch": 0, "federation_counts": torch.ones(4)}
    outcome = perform(setting, "train", message | {"prototypes": torch.zeros(4, 128)})
    assert set(outcome.payload["model"]) == {*groups(net)["body"], *groups(net)["head"]}  # type: ignore[arg-type]
    assert outcome.kept is not None
    private = {name.removeprefix("norm/") for name in outcome.kept if name.startswith("norm/")}
    assert private == {*groups(net)["norm"], *groups(net)["statistics"]}
    if det != "off":
        personal = outcome.kept["personal/head.weight"]
        assert not torch.equal(personal, outcome.payload["model"]["head.weight"])  # type: ignore[index, call-overload]
