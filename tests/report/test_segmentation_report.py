"""Reports of segmentation: Dice by patient, worst cases first, and overlays that stay in the run's folder."""

import re
import shutil
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from PIL import Image

from equipoise.data import load_federation
from equipoise.engine.loop import Run
from equipoise.engine.runs import decided_by_data, make_config
from equipoise.methods import get_method
from equipoise.report import read_run, write_report
from equipoise.report.curves import retrogress
from equipoise.report.run_tables import columns_of, headline
from equipoise.report.thumbnails import FOLDER, PREDICTED, TRUTH, cases_of, outline, overlays_of
from equipoise.report.volume_figures import dice_boxes, patients, worst_cases

MASKS = (
    "train.rounds=2",
    "train.batch_size=8",
    "data.phantom.masks=true",
    "data.phantom.images=80",
    "data.phantom.sites=2",
    "data.phantom.size=16",
    "augment.name='flips'",
)


def run_masks(folder, method):
    config = make_config(None, [*MASKS], method=method)
    federation = load_federation(config.data, config.seed)
    config = decided_by_data(config, federation)
    Run(config, get_method(method), federation, folder).execute()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("masks")
    return [run_masks(place / method, method) for method in ("fedavg", "fedbn")]


def links(page):
    """The files that a browser loads for the pictures of a page."""
    return [unquote(urlsplit(link).path) for link in re.findall(r'<img src="([^"]+)"', page)]


def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / run.name)


def test_tables_have_the_scores_of_masks_alone_with_distances_in_pixels(runs):
    rows = headline([read_run(runs[0])])
    names = [column.name for column in columns_of(rows)]
    assert {"dice", "iou", "hd95", "worst_site"} <= {*names} and not {"balanced_accuracy", "ece"} & {*names}
    shown = {column.name: column.told(rows.iloc[0][column.name]) for column in columns_of(rows)}
    assert float(shown["dice"]) == pytest.approx(100 * rows.iloc[0]["dice"], abs=0.01)
    assert float(shown["hd95"]) == pytest.approx(rows.iloc[0]["hd95"], abs=0.01)


def test_boxes_hold_every_patient_of_the_test_part_once(runs):
    run = read_run(runs[0])
    config = make_config(None, [*MASKS])
    federation = load_federation(config.data, config.seed)
    pages = dice_boxes(run).pages
    assert list(pages) == ["lesion", "ulcer"]
    for structure, panels in pages.items():
        label = federation.classes.index(structure)
        for trace, site in zip(panels[0].traces, federation.sites):
            split = site.splits["test"]
            assert len(trace["x"]) <= len({*split.groups()})
            if label == 1:
                assert len(trace["x"]) == len({*split.groups()})


def test_worst_cases_come_first(runs):
    run = read_run(runs[1])
    cells = worst_cases(run).cells
    dice = cells["Dice"].astype(float)
    assert dice.is_monotonic_increasing
    assert dice.iloc[0] == pytest.approx(100 * patients(run)["dice"].min(), abs=0.01)


def test_retrogress_is_the_drop_in_dice(runs):
    run = read_run(runs[0])
    scored = run.evaluations[run.evaluations["part"] == "valid"].set_index(["view", "round", "site"])["dice"]
    drops = retrogress(run)
    assert len(drops) == 2
    for (number, site), drop in drops.stack().items():
        assert drop == pytest.approx(scored["trained", number, site] - scored["global", number, site])


def test_overlays_lie_in_the_runs_folder_and_the_page_links_to_them(runs, tmp_path):
    run = copied(runs[0], tmp_path)
    page = write_report([run]).read_text()
    sources = links(page)
    assert sources and all((run / source).is_file() and source.startswith(FOLDER) for source in sources)
    assert "data:image" not in page
    shown = np.asarray(Image.open(run / sources[0]))
    assert (shown == TRUTH).all(axis=2).any()
    assert not list(tmp_path.glob("*.png"))


def test_overlays_of_several_runs_show_the_same_patients(runs, tmp_path):
    folder = tmp_path / "100% mine #2"
    both = [copied(run, folder) for run in runs]
    page = write_report(both, tmp_path / "both.html").read_text()
    sources = [link.removeprefix(f"{folder.name}/") for link in links(page)]
    files = {name: [source for source in sources if source.startswith(name)] for name in ("fedavg", "fedbn")}
    assert [source[len("fedavg") :] for source in files["fedavg"]] == [
        source[len("fedbn") :] for source in files["fedbn"]
    ]
    assert all((folder / source).is_file() for source in sources)


def test_a_report_without_the_images_stands_without_overlays(runs, tmp_path):
    run = copied(runs[0], tmp_path)
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    config = run / "config.toml"
    config.write_text(config.read_text().replace('name = "phantom"', 'name = "pbc"'))
    assert 'name = "pbc"' in config.read_text()
    assert "<img" not in write_report([run]).read_text()
    assert not (run / FOLDER).exists()


def test_overlays_outline_what_the_stored_model_predicts(runs, tmp_path, monkeypatch):
    """A model that predicts the truth draws its outline on the truth's."""
    from equipoise.report import thumbnails

    run = read_run(copied(runs[0], tmp_path))
    original = thumbnails.load_predictor

    def perfect(folder, site=None):
        model = original(folder, site)
        seen = {}
        prepared = model.prepared

        def remembering(pixels, targets):
            images, truth = prepared(pixels, targets)
            seen["truth"] = truth
            return images, truth

        model.prepared = remembering
        model.logits_of = lambda images: (
            seen["truth"][:, None] == thumbnails.torch.arange(3)[None, :, None, None]
        ).float()
        return model

    monkeypatch.setattr(thumbnails, "load_predictor", perfect)
    drawn = overlays_of([run], run.folder)[0]
    assert len(drawn) == len(cases_of(run))
    shown = np.asarray(Image.open(run.folder / drawn[0].source))
    assert (shown == PREDICTED).all(axis=2).any() and not (shown == TRUTH).all(axis=2).any()


def test_an_outline_is_where_a_structure_ends():
    classes = np.zeros((5, 5), dtype=np.uint8)
    classes[1:4, 1:4] = 1
    expected = classes.astype(bool)
    expected[2, 2] = False
    assert (outline(classes) == expected).all()
    assert outline(np.ones((3, 3), dtype=np.uint8)).sum() == 8
