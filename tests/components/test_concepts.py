"""FedBM's frozen classifier: what it is made of, and that sites and evaluation read the net's output by it."""

import pytest
import torch
from torch.nn import functional as F

from composed import client_of, noise_of, server_of, setting_of
from equipoise.contract.method import Batch
from equipoise.core.errors import UserError
from equipoise.losses import balanced_softmax, concept_alignment
from equipoise.nets.concepts import find_bank
from equipoise.prototypes import concept_statistics
from harness import run_tiny, server_state, tiny_config, tiny_federation

ALONE = ("fedbm.cgde=false",)


def classifier_of(*settings):
    """The frozen classifier that a server makes."""
    return server_of(setting_of("fedbm", *ALONE, *settings)).state.classifier


def test_the_classifier_is_the_statistics_of_the_bank_and_stays_so(tmp_path):
    state = server_state(run_tiny(tmp_path / "run", "fedbm", "fedbm.cgde=false"))
    config = tiny_config("fedbm")
    mean, variance = concept_statistics(find_bank(config.data, tiny_federation(config).classes).embeddings)
    assert torch.equal(state["classifier/mean"], mean)
    assert torch.equal(state["classifier/variance"], variance)
    assert state["model/head.weight"].shape == (384, 128)


def test_averaged_and_random_classifiers_have_no_variance():
    averaged, random = classifier_of("fedbm.classifier='averaged'"), classifier_of("fedbm.classifier='random'")
    full = classifier_of()
    assert torch.equal(averaged["mean"], full["mean"])
    assert averaged["variance"].abs().max() == random["variance"].abs().max() == 0 < full["variance"].max()
    torch.testing.assert_close(random["mean"].norm(dim=1), torch.ones(4))
    assert torch.equal(random["mean"], classifier_of("fedbm.classifier='random'")["mean"])


def test_a_share_of_the_prompts_is_drawn_from_the_seed():
    half = classifier_of("fedbm.prompt_share=0.5")["mean"]
    assert torch.equal(half, classifier_of("fedbm.prompt_share=0.5")["mean"])
    assert not torch.equal(half, classifier_of("fedbm.prompt_share=0.5", "seed=2")["mean"])
    assert not torch.equal(half, classifier_of()["mean"])


def test_one_frozen_classifier_serves_every_site_and_the_evaluation():
    client = client_of(setting_of("fedbm", *ALONE))
    trained = {id(parameter) for parameter in client.workplace.phases["main"].optimiser.parameters}
    assert trained == {id(parameter) for parameter in client.net.parameters()}
    server = server_of(client.setting)
    client.workplace.begin(server.message(), None)
    client.workplace.set_mode(False)
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        h = F.normalize(client.net(images), dim=1)
        predicted = client.predict("global", Batch(image=images))
    mean, variance = server.state.classifier["mean"], server.state.classifier["variance"]
    torch.testing.assert_close(predicted, 12.5 * (h @ mean.T + 12.5 / 2 * h.square() @ variance.T))


def test_data_without_a_bank_is_refused_with_the_command(tmp_path):
    with pytest.raises(UserError, match="equipoise concepts build phantom --encoder roberta-base"):
        run_tiny(tmp_path / "run", "fedbm", "fedbm.encoder='roberta-base'")


def test_the_loss_is_the_papers_surrogate_and_any_other_loss_gets_its_term():
    """Under a balanced softmax the classifier's logits are balanced, and the spread of the texts counts as before."""
    batch = noise_of(6)
    for loss in ("", "balanced-softmax"):
        client = client_of(setting_of("fedbm", *ALONE, f"components={[loss] if loss else []}"))
        client.workplace.begin(server_of(client.setting).message(), None)
        client.class_counts.copy_(torch.tensor([6.0, 3.0, 1.0, 0.0]))
        client.workplace.set_mode(False)
        out, frozen = client.outputs(batch), client.sides["concepts"].classifier
        surrogate = concept_alignment(out.output, batch.label, frozen.mean, frozen.variance, 12.5)
        if loss:
            logits = frozen(out.output)
            surrogate = surrogate - F.cross_entropy(logits, batch.label)
            surrogate = surrogate + balanced_softmax(logits, batch.label, client.class_counts)
        torch.testing.assert_close(client.loss(batch, out), surrogate, rtol=1e-5, atol=0)
