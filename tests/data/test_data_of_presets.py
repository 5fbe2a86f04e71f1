"""The presets' federations, on small made-up files in the layouts of their data sets."""

import pytest
from typer.testing import CliRunner

from equipoise.cli.app import app
from equipoise.contract.config_files import preset_names, read_raw
from equipoise.data import load_federation
from equipoise.engine.runs import make_config

SQUASHED = ("fedbm-oct", "fedbm-kvasir", "fedbm-ham10000", "fedbm-pbc", "fednpr", "fediic-ich")


def config_of(preset, folder, *settings):
    """A preset's config for small images under a folder."""
    small = ("data.skip_unreadable=true", "data.size=16", f"data.root='{folder}'", f"data.store='{folder / 'stores'}'")
    return make_config(preset, [*small, "augment.size=16", "net.weights='none'", *settings])


def federation_of(preset, made_up, folder):
    source = read_raw(preset).get("data", {}).get("name", "phantom")
    if source in made_up.MAKERS:
        made_up.MAKERS[source](folder)
    config = config_of(preset, folder)
    return load_federation(config.data, config.seed)


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_makes_its_federation_of_files_in_the_documented_layout(preset, made_up, tmp_path):
    federation = federation_of(preset, made_up, tmp_path)
    assert federation.class_counts("train").sum() > 0 and federation.class_counts("test").sum() > 0
    assert not [warning for warning in federation.warnings if "has no effect" in warning]


def test_fednpr_tests_each_of_the_ten_released_sites_on_its_own_slices(made_up, tmp_path):
    federation = federation_of("fednpr-ich", made_up, tmp_path)
    assert len(federation.sites) == 10 and federation.common is None
    assert all({"train", "test"} <= set(site.splits) for site in federation.sites)


def test_fediic_shares_slices_out_to_20_sites_and_tests_on_common_ones(made_up, tmp_path):
    federation = federation_of("fediic-ich", made_up, tmp_path)
    sizes = [len(site.splits["train"]) for site in federation.sites]
    assert len(sizes) == 20 and max(sizes) - min(sizes) <= 1
    assert set(federation.common.splits) == {"valid", "test"}


def test_images_are_squashed_where_the_released_code_squashes(tmp_path):
    for preset in preset_names():
        expected = "squash" if preset.startswith(SQUASHED) else "centre"
        assert config_of(preset, tmp_path).data.crop == expected, preset


def test_every_preset_is_listed_with_its_data():
    listed = CliRunner().invoke(app, ["presets"]).output
    assert all(name in listed for name in preset_names())
    assert "not built in" not in listed
