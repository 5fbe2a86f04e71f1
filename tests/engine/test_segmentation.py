"""Segmentation end to end: counts, runs that go on, workers, export, masks of new images, and what is refused."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from equipoise.api import load_result
from equipoise.core.errors import UserError
from equipoise.data import load_federation
from equipoise.engine.loop import Run
from equipoise.engine.payload_files import read_payload
from equipoise.engine.runs import decided_by_data, make_config
from equipoise.methods import get_method, method_names
from equipoise.tasks.segmentation import Segmentation, volumes_of

MASKS = (
    "train.rounds=2",
    "train.batch_size=8",
    "data.phantom.masks=true",
    "data.phantom.images=60",
    "data.phantom.sites=3",
    "data.phantom.size=16",
    "augment.name='flips'",
)
#: the methods that a study of segmentation compares
EXPECTED = {
    *("local", "central", "fedavg", "fedprox", "scaffold", "feddyn", "fedbn", "silobn", "ida", "fml", "fedrep"),
    *("fedrod", "fedbabu", "apfl", "ditto", "perfedavg", "pfedme", "prr"),
}


def config_of_masks(method="fedavg", *settings):
    config = make_config(None, [*MASKS, *settings], method=method)
    return decided_by_data(config, load_federation(config.data, config.seed))


def run_masks(folder, method="fedavg", *settings, resume=False):
    config = config_of_masks(method, *settings)
    Run(config, get_method(method), load_federation(config.data, config.seed), folder).execute(resume)
    return folder


def finals(folder):
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == "final"]


def weights(folder):
    return read_payload(folder / "models" / "global.safetensors")["model"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_masks(tmp_path_factory.mktemp("masks") / "run")


def test_data_with_masks_decide_net_and_metric(tmp_path):
    config = config_of_masks()
    assert (config.net.name, config.evaluation.metric) == ("small-unet", "dice")
    with pytest.raises(UserError, match="choose one of dice"):
        config_of_masks("fedavg", "evaluation.metric='macro_f1'")
    with pytest.raises(UserError, match="small-unet"):
        run_masks(tmp_path / "run", "fedavg", "net.name='small-cnn'")


def test_counts_add_up_over_batches_and_sites():
    federation = load_federation(config_of_masks().data, 1)
    task = Segmentation(federation.classes)
    random = torch.Generator().manual_seed(0)
    every, predictions = [], {}
    for site in federation.sites:
        split = site.splits["train"]
        masks = split.masks(torch.arange(len(split)))
        logits = torch.randn(len(split), 3, *masks.shape[1:], generator=random)
        whole = task.observe(logits, masks)
        pieces = [task.observe(*pair) for pair in zip(logits.split(5), masks.split(5))]
        joined = {name: torch.cat([piece[name] for piece in pieces]) for name in whole}
        counts, again = task.count(whole, split), task.count(joined, split)
        assert all(torch.equal(counts[name], again[name]) for name in counts)
        assert task.problem(counts, split.class_counts(3).tolist()) is None
        assert {name: (t.shape, t.dtype) for name, t in task.template.items()} == {
            name: (t.shape, t.dtype) for name, t in counts.items()
        }
        every.append(counts)
        predictions[site.name] = whole
    merged = task.merge(every)
    cells = sum(
        np.bincount(3 * seen["target"].flatten().long() + seen["predicted"].flatten().long(), minlength=9)
        for seen in predictions.values()
    )
    assert torch.equal(merged["confusion"].flatten(), torch.from_numpy(cells))
    assert merged["images"] == sum(len(seen["target"]) for seen in predictions.values())
    dice = task.summary(merged)["by_class"]["dice"]
    assert dice[1] == pytest.approx(sum(float(c["dice"][1]) for c in every) / sum(int(c["volumes"][1]) for c in every))


def test_right_masks_have_dice_1_and_a_volume_is_all_slices_of_a_patient():
    split = load_federation(config_of_masks().data, 1).sites[0].splits["train"]
    task, masks = Segmentation(("skin", "lesion", "ulcer")), split.masks(torch.arange(len(split)))
    sure = torch.nn.functional.one_hot(masks.long(), 3).movedim(-1, 1) * 50.0
    counts = task.count(task.observe(sure, masks), split, single=True)
    numbers = task.summary(counts)["metrics"]
    assert (numbers["dice"], numbers["iou"], numbers["hd95"], numbers["asd"]) == (1, 1, 0, 0)
    assert len(counts["cases"]) == len(volumes_of(split)) == len(set(split.groups().tolist())) < len(split)
    assert sorted(np.concatenate(volumes_of(split)).tolist()) == list(range(len(split)))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("dice", 9.0, "Dice"),
        ("iou", -1.0, "overlaps"),
        ("volumes", 99, "volumes"),
        ("images", 7, "pixels"),
        ("loss", -1.0, "loss"),
    ],
)
def test_counts_that_cannot_be_are_named(name, value, says):
    split = load_federation(config_of_masks().data, 1).sites[0].splits["valid"]
    task, masks = Segmentation(("skin", "lesion", "ulcer")), split.masks(torch.arange(len(split)))
    counts = task.count(task.observe(torch.zeros(len(split), 3, 16, 16), masks), split)
    described = split.class_counts(3).tolist()
    assert task.problem(counts, described) is None
    changed = counts | {name: torch.full_like(counts[name], value)}
    assert says in str(task.problem(changed, described))
    assert "than it described" in str(task.problem(counts, [described[1], described[0], described[2]]))


def test_scores_are_of_structures_and_patients(finished):
    mean = next(event for event in finals(finished) if event["scope"] == "mean")
    assert {"dice", "iou", "hd95", "asd", "worst_dice", "pixel_dice", "loss"} == mean["metrics"].keys()
    table = load_result(finished).volumes()
    site = next(event for event in finals(finished) if event["site"] == "site 1")
    own = table[(table["site"] == "site 1") & (table["split"] == "test")]
    means = own.groupby("structure")["dice"].mean()
    assert site["by_class"]["dice"][1] == pytest.approx(means["lesion"])
    assert site["metrics"]["dice"] == pytest.approx(means.mean())


def test_scores_made_anew_equal_those_of_the_run(finished):
    table = load_result(finished).evaluate(split="test").set_index("site")
    for event in finals(finished):
        if event["scope"] != "mean":
            row = table.loc[event["site"] or ""]
            assert {name: row[name] for name in event["metrics"]} == pytest.approx(event["metrics"], nan_ok=True)


def test_a_run_goes_on_with_the_same_bits(tmp_path, finished):
    run_masks(tmp_path / "run", "fedavg", "train.rounds=1")
    run_masks(tmp_path / "run", resume=True)
    assert all(torch.equal(value, weights(tmp_path / "run")[name]) for name, value in weights(finished).items())
    assert finals(tmp_path / "run") == finals(finished)


@pytest.mark.slow
def test_workers_compute_the_same_bits(tmp_path, finished):
    run_masks(tmp_path / "run", "fedavg", "compute.workers=2")
    assert all(torch.equal(value, weights(tmp_path / "run")[name]) for name, value in weights(finished).items())
    assert finals(tmp_path / "run") == finals(finished)


def tried(folder, method):
    """Whether a method runs on masks; what else it says."""
    try:
        run_masks(folder, method)
    except UserError as problem:
        assert " needs one " in str(problem), problem
        assert "segmentation does not have" in str(problem)
        return False
    assert any(event["metrics"]["dice"] is not None for event in finals(folder))
    return True


@pytest.mark.parametrize("method", ["prr", "fedrod", "apfl", "fediic", "balancefl"])
def test_methods_run_on_masks_or_say_what_they_need(tmp_path, method):
    assert tried(tmp_path / "run", method) == (method in EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize("method", method_names())
def test_every_method_runs_on_masks_or_says_what_it_needs(tmp_path, method):
    assert tried(tmp_path / "run", method) or method not in EXPECTED


@pytest.mark.parametrize("suffix", [pytest.param(".pt2", marks=pytest.mark.slow), ".onnx"])
def test_a_written_model_gives_the_chances_of_each_pixel(tmp_path, finished, suffix):
    from equipoise.engine.exporting import export_model

    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
    card = export_model(finished, tmp_path / f"model{suffix}")  # which compares both models
    assert card["task"] == "segmentation" and "each pixel" in card["gives"]


@pytest.mark.parametrize("crop", ["centre", "squash"])
def test_masks_of_new_images_have_their_sizes(tmp_path, finished, crop):
    from equipoise.engine.predicted_masks import predicted_masks, write_masks
    from equipoise.engine.prediction import load_predictor

    predictor = load_predictor(finished)
    predictor.config = predictor.config.model_copy(
        update={"data": predictor.config.data.model_copy(update={"crop": crop})}
    )
    files = [tmp_path / "images" / name for name in ("a.png", "b/a.png")]
    pixels = np.random.default_rng(0).integers(0, 255, (20, 32, 3), dtype=np.uint8)
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    found = dict(predicted_masks(predictor, files))
    assert [mask.shape for mask in found.values()] == [(20, 32)] * 2
    if crop == "centre":
        assert not found[files[0]][:, :6].any() and not found[files[0]][:, 26:].any()
    written = write_masks(predictor, files, tmp_path / "out")
    assert written == [tmp_path / "out" / "a.png", tmp_path / "out" / "b" / "a.png"]
    for file, path in zip(files, written):
        assert np.array_equal(np.asarray(Image.open(path)), found[file])
    (archive,) = write_masks(predictor, files, tmp_path / "out.npz")
    with np.load(archive) as saved:
        assert np.array_equal(saved["b/a"], found[files[1]])
        assert saved["classes"].tolist() == ["skin", "lesion", "ulcer"]


def test_a_model_for_masks_does_not_classify_images(finished):
    with pytest.raises(UserError, match="use masks"):
        load_result(finished).predict(np.zeros((1, 16, 16, 3), np.uint8))
