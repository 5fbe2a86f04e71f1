"""The config: what it refuses, and that the message names the place and is no longer than it needs to be."""

import re

import pytest

from equipoise.contract.config import Config
from equipoise.contract.config_files import override, read_raw
from equipoise.core.errors import UserError
from equipoise.engine.runs import choose_device, make_config


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.optimiser.lr=inf", "train.optimiser.lr: Input should be a finite number"),
        ("train.optimiser.momentum=nan", "train.optimiser.momentum: Input should be a finite number"),
        ("train.schedule.gamma=inf", "train.schedule.gamma: Input should be a finite number"),
        ("npr.weight=inf", "npr.weight: Input should be a finite number"),
        ("data.alpha=inf", "data.alpha: Input should be a finite number"),
        ("data.alphas=[1.0, nan]", r"data.alphas.2: Input should be a finite number"),
        ("data.phantom.skew=inf", "data.phantom.skew: Input should be a finite number"),
        ("augment.mean=[inf]", "augment.mean.1: Input should be a finite number"),
        ("net.dropout=nan", "net.dropout: Input should be a finite number"),
        ("fedprox.mu=inf", "mu: Input should be a finite number"),
    ],
)
def test_numbers_are_finite_in_every_table(setting, message):
    with pytest.raises(UserError, match=message):
        make_config(None, [setting])


@pytest.mark.parametrize(
    "setting",
    [
        "data.phantom.seed=-1",
        "data.phantom.skew=1e6",
        "data.phantom.shift=1e6",
        "data.phantom.difficulty=1e6",
        "train.optimiser.betas=[0.9, 1.0]",
        "train.optimiser.betas=[-0.1, 0.9]",
    ],
)
def test_values_that_no_run_could_use_are_refused(setting):
    with pytest.raises(UserError, match=setting.partition("=")[0]):
        make_config(None, [setting])


@pytest.mark.parametrize(
    "key", ["train.rounds", "train.steps", "train.optimiser.lr", "data.limit", "data.phantom.skew"]
)
def test_true_is_no_number(key):
    with pytest.raises(UserError, match=rf"{key}: Input should be a number \(got True\)"):
        make_config(None, [f"{key}=true"])


def test_true_stays_true_where_a_truth_is_wanted():
    assert make_config(None, ["train.optimiser.keep=true"]).train.optimiser.keep is True


def test_a_message_about_several_keys_does_not_print_their_tables():
    with pytest.raises(UserError) as raised:
        make_config(None, ["evaluation.first_round=99"])
    lines = str(raised.value).splitlines()
    assert lines[1].strip().startswith("evaluation.first_round = 99 lies after the last round")
    assert "{" not in str(raised.value) and len(lines) == 2


def test_a_date_is_refused_by_its_key(tmp_path):
    (tmp_path / "dated.toml").write_text("[train]\nrounds = 2024-05-01\n")
    with pytest.raises(UserError, match=r"dated\.toml is not valid:\n  train\.rounds: Input should be a valid integer"):
        make_config(str(tmp_path / "dated.toml"))
    with pytest.raises(UserError, match=r"name: Input should be a valid string"):
        make_config(None, ["name=10:30:00"])


def test_a_config_that_is_not_utf8_is_refused_with_file_and_line(tmp_path):
    (tmp_path / "latin.toml").write_bytes('method = "fedavg"\nname = "Zürich"\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.toml, line 2: the text is not UTF-8"):
        read_raw(str(tmp_path / "latin.toml"))


def test_a_value_of_several_lines_is_no_second_setting():
    assert override({}, ["name=1\nother=2"]) == {"name": "1\nother=2"}


def test_settings_leave_the_tables_they_override_alone():
    raw = {"train": {"rounds": 3}}
    assert override(raw, ["train.rounds=5"]) == {"train": {"rounds": 5}}
    assert raw == {"train": {"rounds": 3}}


def test_a_gpu_by_its_number_becomes_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    assert [choose_device(name) for name in ("auto", "cuda", "cuda:1", "cpu")] == ["cuda", "cuda", "cuda:1", "cpu"]
    assert [str(device) for device in chosen] == ["cuda:1"]
    with pytest.raises(UserError, match="has 2 usable GPUs"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("train.roundz=3", "train.roundz: unknown key; did you mean 'rounds'?"),
        ("trian.rounds=3", "trian: unknown key; did you mean 'train'?"),
        ("data.phantom.imags=3", "data.phantom.imags: unknown key; did you mean 'images'?"),
        ("compute.xyz=3", "compute.xyz: unknown key; known are "),
    ],
)
def test_an_unknown_key_is_answered_by_the_known_ones(setting, advice):
    with pytest.raises(UserError, match=f"^what the command line sets is not valid:\n  {re.escape(advice)}"):
        make_config(None, [setting])


def test_whether_a_round_may_be_reported_is_known_without_counting_all_rounds():
    config = make_config(None, ["train.rounds=1000000000000", "evaluation.every=10", "evaluation.first_round=20"])
    assert [config.may_report(number) for number in (10, 20, 25, 10**12)] == [False, True, False, True]


def test_settings_that_came_later_do_not_keep_earlier_runs_from_going_on():
    """The digest is that of the first version with checkpoints, which lacked some of today's settings."""
    assert make_config(None).digest() == Config().digest()
    assert make_config(None, ["train.epochs=1"]).digest() == "5a5f8f28fb0d2f24"
    for setting in ("layout=class", "columns.label=dx", "plane=coronal", 'header=["Modality"]', "brightness=true"):
        assert make_config(None, [f"data.{setting}"]).digest() != Config().digest()


def test_a_runs_config_is_not_given_what_its_method_has_come_to_imply_since(tmp_path):
    """Without `clip`, which no file can set to nothing, an old run of FedDyn could not go on."""
    before = make_config(method="feddyn")
    optimiser = before.train.optimiser.model_copy(update={"clip": None})
    written = before.model_copy(update={"train": before.train.model_copy(update={"optimiser": optimiser})})
    path = tmp_path / "config.toml"
    path.write_text(written.to_toml())
    assert make_config(str(path)).digest() == written.digest() != before.digest()
    assert make_config(str(path), method="fedavg").train.optimiser.clip is None
    path.write_text('method = "feddyn"\n')
    assert make_config(str(path)).train.optimiser.clip == 10.0
