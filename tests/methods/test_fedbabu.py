"""FedBABU's head stands still in the rounds and moves in fine-tuning; if the head trains, it is FedAvg bit for bit."""

from __future__ import annotations

import pytest
import torch

from clients import SHORT, changed, copied, new_client, new_server, noise_batch
from equipoise.contract.protocol import Train
from equipoise.nets import entries_of, groups
from harness import all_state, assert_same_bits, events, run_tiny, server_state, site_states


def finals(folder, view: str) -> dict[str, list]:
    """Confusion matrices of the final test, by site."""
    return {e["site"]: e["confusion"] for e in events(folder, "final") if e["view"] == view and e["scope"] == "site"}


def test_a_head_that_trains_makes_it_fedavg(tmp_path):
    plain = run_tiny(tmp_path / "fedavg", "fedavg", *SHORT)
    limit = run_tiny(tmp_path / "fedbabu", "fedbabu", *SHORT, "fedbabu.trained='all'", "fedbabu.finetune_epochs=1")
    assert_same_bits(all_state(plain), all_state(limit))


def test_the_head_keeps_its_first_bits_and_the_body_learns(tmp_path):
    state = server_state(run_tiny(tmp_path, "fedbabu", *SHORT, "fedbabu.finetune_epochs=1"))
    first = {f"model/{name}": tensor for name, tensor in new_server("fedbabu").state.model.items()}
    assert first.keys() - changed(first, state) == {"model/head.weight", "model/head.bias"}


def test_sites_send_no_head():
    client = new_client("fedbabu")
    assert client.update()["model"].keys() == set(client.net.state_dict()) - set(groups(client.net)["head"])


def test_without_fine_tuning_the_personal_model_is_the_global_one(tmp_path):
    folder = run_tiny(tmp_path, "fedbabu", *SHORT, "fedbabu.finetune_epochs=0")
    assert finals(folder, "personal") == finals(folder, "global")


def test_fine_tuning_is_forgotten_after_evaluation(tmp_path):
    tuned = run_tiny(tmp_path / "tuned", "fedbabu", *SHORT, "fedbabu.finetune_epochs=2", "evaluation.rule='last'")
    plain = run_tiny(tmp_path / "plain", "fedbabu", *SHORT, "fedbabu.finetune_epochs=0", "evaluation.rule='last'")
    assert_same_bits(all_state(tuned), all_state(plain))
    assert not site_states(tuned)
    assert finals(tuned, "global") == finals(plain, "global")
    assert finals(tuned, "personal") != finals(plain, "personal") == finals(plain, "global")


@pytest.mark.parametrize(
    ("finetuned", "moving"),
    [("all", ("body", "head", "norm", "statistics")), ("head", ("head",)), ("body", ("body", "norm", "statistics"))],
)
def test_fine_tuning_moves_what_it_is_told_to(finetuned, moving):
    client = new_client("fedbabu", f"fedbabu.finetuned='{finetuned}'", "fedbabu.finetune_lr=0.3")
    assert list(client.adapt()) == [Train(epochs=5, phase="finetune")]
    phase = client.workplace.phases["finetune"]
    assert phase.optimiser.config.lr == 0.3
    before = copied(client.net.state_dict())
    client.workplace.set_mode(True, phase.norm)
    client.step([noise_batch()], phase)
    assert changed(before, client.net.state_dict()) == set(entries_of(client.net, *moving))


@pytest.mark.parametrize(("given", "scheduled"), [((), True), (("fedbabu.finetune_lr=0.3",), False)])
def test_a_fine_tuning_rate_of_its_own_does_not_follow_the_schedule(given, scheduled):
    phases = new_client("fedbabu", *given).workplace.phases
    assert phases["finetune"].scheduled == scheduled and phases["main"].scheduled


def test_on_a_common_test_set_each_site_fine_tunes_on_its_own_images(tmp_path):
    """The same images, the same global model: personal models differ by what they were tuned on."""
    settings = ("data.phantom.common=true", "fedbabu.finetune_epochs=2", "train.rounds=1")
    folder = run_tiny(tmp_path, "fedbabu", *SHORT, *settings)
    personal = finals(folder, "personal")
    assert personal.keys() == {"site 1", "site 2", "site 3"}
    assert len({torch.tensor(confusion).sum().item() for confusion in personal.values()}) == 1
    assert len({str(confusion) for confusion in personal.values()}) > 1
