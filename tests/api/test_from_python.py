"""Equipoise from Python: data from memory, a run, its tables and models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import equipoise as eq
from harness import all_state, assert_same_bits, events

PHANTOM = {"images": 160, "sites": 3, "classes": 4, "size": 16}
SMALL = {"train.batch_size": 8, "augment.name": "flips"}
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (60, 24, 20, 3), dtype=np.uint8)
LABELS = np.arange(60) % 3
SITES = ["Bern"] * 30 + ["Graz"] * 30


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> eq.Result:
    """A run of PRR, which has personal models."""
    folder = tmp_path_factory.mktemp("finished")
    fed = eq.load_federation("phantom", phantom=PHANTOM, store=folder / "data")
    return eq.train(fed, "prr", rounds=2, out=folder / "run", settings=SMALL)


# ---- what is imported ------------------------------------------------------------------------------------------


def test_the_package_loads_nothing_heavy_before_a_name_is_used():
    code = "import sys, equipoise; dir(equipoise); print({'torch', 'numpy', 'pandas', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_public_name_is_there():
    assert all(hasattr(eq, name) for name in eq.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = eq.absent


# ---- images in memory --------------------------------------------------------------------------------------------


def _pixels(fed: eq.Federation) -> np.ndarray:
    """All images of a federation in the order of their rows."""
    return fed.sites[0].splits["train"].store.packed


def test_layouts_and_kinds_of_numbers_give_the_same_federation():
    first = eq.Federation.from_arrays(IMAGES, LABELS, SITES)
    chw = torch.from_numpy(IMAGES).permute(0, 3, 1, 2)
    alike = (chw, chw.numpy(), chw.float() / 255, IMAGES.astype(np.int64), [Image.fromarray(i) for i in IMAGES])
    for images in alike:
        other = eq.Federation.from_arrays(images, torch.from_numpy(LABELS), SITES)
        assert other.name == first.name and other.image_size == 20, "named after the content"
    assert (_pixels(first)[:, :, 10, 10] == IMAGES[:, 12, 10]).all(), "the central square, channels first"


def test_grey_images_and_an_ambiguous_axis():
    grey = eq.Federation.from_arrays(IMAGES[..., 0], LABELS, SITES)
    assert (_pixels(grey)[:, 0] == _pixels(grey)[:, 2]).all() and grey.channels == 3
    odd = RANDOM.integers(0, 256, (60, 3, 9, 3), dtype=np.uint8)
    as_last = eq.Federation.from_arrays(odd, LABELS, SITES, size=8, crop="squash")
    as_first = eq.Federation.from_arrays(odd, LABELS, SITES, size=8, crop="squash", layout="channels_first")
    as_tensor = eq.Federation.from_arrays(torch.from_numpy(odd), LABELS, SITES, size=8, crop="squash")
    assert as_last.name != as_first.name == as_tensor.name


def test_splits_groups_and_sites_are_given_or_drawn():
    split = ["train", "val", "test"] * 20
    given = eq.Federation.from_arrays(IMAGES, RANDOM.permutation(LABELS), SITES, split)
    assert given.table().groupby("split").sum().sum(axis=1).to_dict() == {"train": 20, "valid": 20, "test": 20}
    groups = np.arange(60) // 6
    drawn = eq.Federation.from_arrays(IMAGES, LABELS, 2, group=groups, alpha=100.0)
    assert [site.name for site in drawn.sites] == ["site 1", "site 2"] and drawn.common is not None
    parts = {part: set(groups[split.rows]) for place in drawn.places() for part, split in place.splits.items()}
    assert not parts["test"] & parts["valid"]
    named = eq.Federation.from_arrays(IMAGES, [["a", "b", "c"][n] for n in LABELS], SITES, classes=["c", "b", "a"])
    assert named.classes == ("c", "b", "a") and named.table().to_numpy().sum() == 60


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"images": IMAGES / 1.0}, "floats from 0 to 255, not 0 to 1; give raw pixels"),
        ({"images": IMAGES.astype(float) * np.nan}, "NaN"),
        ({"images": IMAGES[..., :2]}, "channels are unknown"),
        ({"images": IMAGES[0]}, "there are 24 images but 60 values of labels"),
        ({"images": [IMAGES[0], IMAGES[1][:9]] * 30}, r"2 different sizes.*size=128"),
        ({"labels": LABELS[:5]}, "60 images but 5 values of labels"),
        ({"labels": np.eye(3)[LABELS]}, "argmax"),
        ({"labels": LABELS / 2}, "fractions"),
        ({"labels": LABELS * 0}, "one class only"),
        ({"classes": ["a", "b"]}, "label 2, which classes do not name"),
        ({"classes": ["a", "b", "c", "d"]}, "no image of class 'd'"),
        ({"sites": ["Bern", "bern"] * 30}, "differ only in case"),
        ({"sites": ["Bern", ""] * 30}, "sites of image 1 is empty"),
        ({"split": ["train"] * 59 + ["tst"]}, "unknown split 'tst'"),
        ({"names": ["a"] * 60}, "more than once"),
        ({"limits": 3}, "unknown key; did you mean 'limit'"),
    ],
)
def test_data_from_memory_is_checked_as_files_are(changed, told):
    with pytest.raises(eq.UserError, match=told):
        eq.Federation.from_arrays(**({"images": IMAGES, "labels": LABELS, "sites": SITES} | changed))
    assert not list(Path("data").glob("*.partial"))


def test_a_table_of_files():
    for number, image in enumerate(IMAGES):
        Image.fromarray(image).save(f"{number}.png")
    table = pd.DataFrame({"file": [f"{n}.png" for n in range(60)], "dx": LABELS, "hospital": SITES})
    fed = eq.Federation.from_frame(table, path="file", label="dx", site="hospital", size=20)
    arrays = eq.Federation.from_arrays(IMAGES, LABELS, SITES)
    assert (_pixels(fed) == _pixels(arrays)).all()
    assert eq.load_federation(fed.config.name, size=20).table().equals(fed.table()), "a manifest for the command line"
    for column, told in (("label", "no column for label='label'; it has file, dx"), ("hospital", "row 7")):
        wrong = table.assign(hospital=table["hospital"].where(table.index != 7))
        with pytest.raises(eq.UserError, match=told):
            eq.Federation.from_frame(wrong, path="file", label=column if column == "label" else "dx", site="hospital")


def test_a_table_keeps_the_columns_of_subgroups_that_it_is_asked_for():
    for number, image in enumerate(IMAGES):
        Image.fromarray(image).save(f"{number}.png")
    table = pd.DataFrame({"path": [f"{n}.png" for n in range(60)], "label": LABELS, "sex": ["F", None, "M"] * 20})
    plain = eq.Federation.from_frame(table, size=20)
    fed = eq.Federation.from_frame(table, size=20, subgroups=["sex"])
    assert "sex" not in Path(plain.config.name.removeprefix("manifest:")).read_text().splitlines()[0]
    result = eq.train(fed, rounds=1, epochs=1, out="run")
    assert {*result.scores(by="sex")["sex"]} >= {"F", "M"}
    with pytest.raises(eq.UserError, match="no column for subgroups='age'"):
        eq.Federation.from_frame(table, size=20, subgroups=["age"])


def test_arrays_have_subgroups_by_which_any_federation_is_evaluated():
    sexes = ["F", None, "M"] * 20
    fed = eq.Federation.from_arrays(IMAGES, LABELS, SITES, subgroups={"sex": sexes, "age": torch.arange(60)})
    assert fed.name != eq.Federation.from_arrays(IMAGES, LABELS, SITES).name
    result = eq.train(fed, rounds=1, epochs=1, out="run")
    assert {*result.columns()} == {"sex", "age"} and {*result.scores(by="sex")["sex"]} >= {"F", "M"}
    other = eq.Federation.from_arrays(IMAGES[::-1].copy(), LABELS, SITES, subgroups={"sex": sexes})
    found = result.evaluate(other, by="sex", interval=True).query("scope == 'pooled'").set_index("sex")
    assert found["n"].to_dict() == {"F": 20, "M": 20, "unknown": 20} and "low(accuracy)" in found
    with pytest.raises(eq.UserError, match="60 images but 2 values of subgroup 'sex'"):
        eq.Federation.from_arrays(IMAGES, LABELS, SITES, subgroups={"sex": ["F", "M"]})
    with pytest.raises(eq.UserError, match="sites = 'Bern': give a column with one value for each of the 60 images"):
        eq.Federation.from_arrays(IMAGES, LABELS, "Bern")


def test_a_federation_is_printed_on_one_short_line():
    fed = eq.Federation.from_arrays(IMAGES, LABELS, SITES)
    assert len(repr(fed)) < 200 and all(site.name in repr(fed) for site in fed.sites)


def test_torch_datasets():
    tensors = torch.from_numpy(IMAGES).permute(0, 3, 1, 2).float() / 255
    data = [torch.utils.data.TensorDataset(tensors[k::4], torch.from_numpy(LABELS)[k::4]) for k in range(4)]
    fed = eq.Federation.from_datasets({"A": (data[0], None, data[1]), "B": {"train": data[2], "test": data[3]}})
    assert fed.table().loc["A"].sum(axis=1).to_dict()["test"] == 15
    with pytest.raises(eq.UserError, match="some sites have one dataset"):
        eq.Federation.from_datasets({"A": (data[0], data[1]), "B": data[2]})


# ---- a run ---------------------------------------------------------------------------------------------------------


def test_one_run_by_python_command_line_and_config_file_is_the_same():
    fed = eq.load_federation("phantom", phantom=PHANTOM)
    eq.train(fed, "fedprox", rounds=2, seed=3, out="python", settings={**SMALL, "fedprox.mu": 0.5})
    sets = [f"--set=data.phantom.{key}={value}" for key, value in PHANTOM.items()]
    sets += ["--set=train.batch_size=8", "--set=augment.name=flips", "--set=fedprox.mu=0.5"]
    command = [sys.executable, "-m", "equipoise", "run", "--method=fedprox", "--rounds=2", "--seed=3", *sets]
    subprocess.run([*command, "--out=command"], check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "equipoise", "run", "python/config.toml", "--out=file"], check=True)
    names = _files("python")
    for other in ("command", "file"):
        assert _files(other) == names and "predictions.npz" in names and "report.html" in names
        assert_same_bits(all_state(Path("python")), all_state(Path(other)))
        for name in ("config.toml", "predictions.npz"):
            assert Path(other, name).read_bytes() == Path("python", name).read_bytes()


def _files(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*")}


def test_images_from_memory_train_resume_and_run_in_workers(tmp_path):
    fed = eq.Federation.from_arrays(IMAGES, LABELS, SITES)
    whole = eq.train(fed, rounds=2, out="whole", settings=SMALL)
    eq.train(fed, rounds=1, out="part", settings=SMALL)
    resumed = eq.load_result("part").resume(rounds=2)
    assert_same_bits(all_state(whole.path), all_state(resumed.path))
    assert any("train.rounds was 1, is 2" in text for text in resumed.warnings) and resumed.config.train.rounds == 2
    spread = eq.train(fed, rounds=2, workers=2, out="spread", settings=SMALL)
    assert_same_bits(all_state(whole.path), all_state(spread.path))


def test_images_that_are_gone_are_missed_with_a_remedy(monkeypatch, tmp_path):
    fed = eq.Federation.from_arrays(IMAGES, LABELS, SITES)
    result = eq.train(fed, rounds=1, out="run", settings=SMALL)
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(eq.UserError, match="make the Federation from the same arrays again"):
        result.resume(rounds=2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"method": "fedavgg"}, "no method 'fedavgg'"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": 2, "settings": {"train.rounds": 3}}, "train.rounds is given as an argument and in settings"),
        ({"settings": {"train.epoch": 3}}, "did you mean 'epochs'"),
        ({"settings": {"prr.pfa": "off"}}, "options of prr have no effect"),
        ({"settings": {"seed": 1, "seed.x": 1}}, "a value and no table"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(arguments, told, capsys):
    with pytest.raises(eq.UserError, match=told):
        eq.train("phantom", **({"out": "run", "progress": True} | arguments))
    assert not Path("run").exists() and capsys.readouterr().out == ""


# ---- results -------------------------------------------------------------------------------------------------------


def test_scores_and_histories_are_tables(finished):
    scores = finished.scores()
    finals = events(finished.path, "final")
    assert len(scores) == len(finals) and set(scores["view"]) == {"personal"}
    told = {(e["scope"], e["site"]): e["metrics"]["macro_f1"] for e in finals}
    for row in scores.to_dict("records"):
        assert row["macro_f1"] == pytest.approx(told[row["scope"], row["site"] or None])
    assert set(finished.history()["round"]) == {0, 1, 2}
    assert len(finished.history("training")) == 2 * 3 and finished.history("training")["loss"].notna().all()
    html = finished._repr_html_()
    assert "prr on phantom" in html and "balanced_accuracy" in html


def test_predictions_are_those_of_the_test_and_say_nothing_of_names(finished):
    federation = eq.load_federation("phantom", phantom=PHANTOM, store=finished.config.data.store)
    table = finished.predictions(federation)
    assert len(table) == federation.class_counts("valid").sum() + federation.class_counts("test").sum()
    assert table.filter(like="p(").sum(axis=1).to_numpy() == pytest.approx(1, abs=1e-5)
    test = table[(table["site"] == "site 1") & (table["split"] == "test")]
    split = federation.sites[0].splits["test"]
    assert test["name"].tolist() == [split.store.index.names[row] for row in split.rows]
    probabilities = finished.model("site 1")(split.images(np.arange(len(split))))
    assert test.filter(like="p(").to_numpy() == pytest.approx(probabilities.numpy(), abs=1e-5)
    raw = (finished.path / "predictions.npz").read_bytes()
    with np.load(finished.path / "predictions.npz") as file:
        stored = {text for name in ("image", "group") for text in file[name].tolist()}
    assert b"phantom-0" not in raw and not any("phantom" in text for text in stored)


def test_scores_come_out_of_predictions_again(finished):
    again = finished.evaluate()
    again = again[again["split"] == "test"].set_index(["scope", "site"])
    for row in finished.scores().to_dict("records"):
        if row["scope"] != "mean":
            same = again.loc[(row["scope"], row["site"])]
            for metric in ("balanced_accuracy", "balanced_auc", "ece", "loss", "recall(nevus)"):
                assert same[metric] == pytest.approx(row[metric], nan_ok=True, abs=1e-6), metric


def test_a_model_is_a_module_and_predicts(finished):
    model = finished.model("site 2")
    assert isinstance(model, torch.nn.Module) and not model.training
    images = RANDOM.integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    table = finished.predict(images, "site 2")
    direct = model(torch.from_numpy(images).permute(0, 3, 1, 2))
    assert table.filter(like="p(").to_numpy() == pytest.approx(direct.numpy(), abs=1e-6)
    assert table["prediction"].tolist() == [model.classes[k] for k in direct.argmax(1)]
    Path("new").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(f"new/{number}.png")
    assert finished.predict("new", "site 2").to_numpy().tolist() == table.to_numpy().tolist()
    with pytest.raises(eq.UserError, match="only personal models"):
        finished.predict(images)


def test_a_finished_model_is_evaluated_elsewhere(finished):
    names = list(reversed(finished.classes))
    images = RANDOM.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    other = eq.Federation.from_arrays(images, [names[k % 4] for k in range(40)], ["x"] * 40, classes=names)
    table = finished.evaluate(other, site="site 1")
    assert set(table["n"]) == {40} and set(table["scope"]) == {"site", "mean", "pooled"}
    predicted = finished.predict(images, "site 1")["prediction"].to_numpy()
    assert table["accuracy"].iloc[0] == pytest.approx(np.mean(predicted == [names[k % 4] for k in range(40)]))
    with pytest.raises(eq.UserError, match="the run learned from"):
        finished.evaluate(eq.load_federation("phantom", phantom=PHANTOM))
    with pytest.raises(eq.UserError, match="load the federation with size=16"):
        finished.evaluate(eq.load_federation("phantom", phantom=PHANTOM | {"size": 24}))
    with pytest.raises(eq.UserError, match="classes that the run does not know: 0"):
        finished.evaluate(eq.Federation.from_arrays(images, np.arange(40) % 2, ["x"] * 40))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda result: result.history("losses"), "no history 'losses'; there are evaluation, training"),
        (lambda result: eq.train("phantom", components="margins"), "give a list"),
        (lambda result: eq.compare("phantom", ["fedavg"], seeds=0), "seeds = 0 asks for no run"),
        (lambda result: eq.load_federation(None), "source = None is no source of images"),
        (lambda result: eq.Federation.from_frame("list.csv"), "table is str and no pandas DataFrame"),
    ],
)
def test_arguments_of_a_wrong_kind_are_told_in_words(finished, call, told):
    with pytest.raises(eq.UserError, match=told):
        call(finished)
    assert not Path("runs").exists() and not Path("studies").exists()


def test_a_source_by_name_is_read_as_the_runs_images_were(finished):
    for number, image in enumerate(IMAGES):
        folder = Path("other clinic", finished.classes[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    table = finished.evaluate("folder:other clinic", site="site 1")
    loaded = eq.load_federation("folder:other clinic", size=16)
    assert table.equals(finished.evaluate(loaded, site="site 1"))


def test_a_folder_without_a_run_is_refused_with_the_runs_in_it(finished):
    with pytest.raises(eq.UserError, match=r"its folders .*run do"):
        eq.load_result(finished.path.parent)
    assert eq.load_result(finished.path).report().exists()
