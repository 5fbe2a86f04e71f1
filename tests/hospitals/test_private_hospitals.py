"""Differential privacy between hospitals: noise is made of a secret of the site, and descriptions carry it, too."""

import json

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("opacus")

from equipoise.contract.tables import PrivacyConfig
from equipoise.engine.disclosure import DESCRIBE
from equipoise.hospitals.descriptions import describe
from equipoise.hospitals.office import Refused
from equipoise.hospitals.parcels import Parcel, prepare, seal
from harness import events, run_tiny, server_state
from postbox import Hospitals, Postbox

PRIVATE = ("privacy.epsilon=8", "net.group_norm=true", "train.batch_size=16", "privacy.counts_noise=4")


def test_between_hospitals_numbers_of_images_carry_noise_that_the_server_cannot_make(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", *PRIVATE)
    told = {site: office.described(hospitals.config)["counts"] for site, office in hospitals.post.offices.items()}
    folder = hospitals.run()
    local = run_tiny(tmp_path / "local", "fedavg", *PRIVATE)
    assert set(server_state(local)) == set(server_state(folder))
    assert any(not torch.equal(server_state(local)[name], value) for name, value in server_state(folder).items())
    (start,) = events(folder, "start")
    noisy: list[bool] = []
    for site in start["sites"]:
        exact = describe(site["name"], hospitals.federation)["counts"]
        assert {part: site[part] for part in exact} == told[site["name"]]
        noisy += [site[part] != exact[part] for part in exact if any(exact[part])]
        images = start["certificate"]["sites"][site["name"]]["images"]
        assert images == sum(site["train"])
    assert sum(noisy) > len(noisy) / 2  # noise may round to nothing now and then
    secrets = [(hospitals.records(site) / "noise.key") for site in told]
    assert len({path.read_text() for path in secrets}) == len(secrets)
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)


@pytest.mark.parametrize(
    ("method", "settings", "told"),
    [("fedavg", ("components=['npr']",), "npr"), ("fedavg", ("privacy.counts_noise=0.1",), "counts_noise")],
)
def test_a_site_checks_the_promise_by_itself(tmp_path, method, settings, told):
    """It does not rely on the server's check."""
    hospitals = Hospitals(tmp_path, method, *PRIVATE, *settings)
    office = next(iter(hospitals.post.offices.values()))
    with pytest.raises(Refused, match=told):
        office._work(hospitals.config.to_toml())


def test_epsilon_so_large_that_numbers_are_nearly_exact_is_no_way_around_a_sites_least(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", "privacy.epsilon=1e4", "privacy.counts_noise=0.01", "net.group_norm=true")
    office = next(iter(hospitals.post.offices.values()))
    header = {"action": DESCRIBE, "config": hospitals.config.to_toml()}
    assert "description" in office.answer(seal(prepare({}), **header)).header
    office.least = 5
    assert "5 images" in office.answer(seal(prepare({}), **header)).header["error"]
    usual = hospitals.config.privacy.model_copy(update={"epsilon": 1.0, "counts_noise": 10.0})
    header["config"] = hospitals.config.model_copy(update={"privacy": usual}).to_toml()
    assert "description" in office.answer(seal(prepare({}), **header)).header


class Recorder(Postbox):
    """Keeps the parcels that ask for training, and all tensors, which a site is sent once."""

    def carry(self, site, parcel):
        self.sent = getattr(self, "sent", {}) | parcel.tensors
        if parcel.header["action"] == "train":
            self.trained = [*getattr(self, "trained", ()), (site, parcel)]
        return super().carry(site, parcel)


def test_a_repeated_round_gets_the_same_noise_and_another_model_gets_other_noise(tmp_path):
    """Each further answer about one model would be another release, which no account has."""
    hospitals = Hospitals(tmp_path, "fedavg", *PRIVATE, "train.rounds=1", post=Recorder)
    hospitals.run()
    site, parcel = hospitals.post.trained[0]
    office = hospitals.post.offices[site]

    def trained(**changed):
        text = json.dumps(parcel.header | {"version": "", "omit": False} | changed)
        return office.answer(Parcel(text, hospitals.post.sent)).header

    usual = trained()
    assert usual["entries"], usual
    occasion = office._work(parcel.header["config"]).slot.private.occasion
    assert trained(identity="of another attempt", index=0)["entries"] == usual["entries"]
    names = [name for name in parcel.header["entries"] if name.endswith("bias")]
    entries = parcel.header["entries"] | {names[0]: parcel.header["entries"][names[0]] | {"dtype": "float64"}}
    trained(entries=entries)  # with the same identity, by a lying server
    assert office._work(parcel.header["config"]).slot.private.occasion != occasion


def described(office, config, **more) -> dict:
    """The answer to a server that asks what data the site has."""
    return office.answer(seal(prepare({}), action=DESCRIBE, config=config.to_toml(), **more)).header


def test_a_site_adds_up_epsilon_over_runs_and_refuses_more_than_its_ceiling(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", *PRIVATE)
    hospitals.run()
    office = next(iter(hospitals.post.offices.values()))
    assert office.spending.spent == 8
    hospitals.run(resume=True)
    assert office.spending.spent == 8
    described(office, hospitals.config)  # the next run takes this one up
    assert office.spending.spent == 16
    office.spending.ceiling = 20.0
    other = hospitals.config.model_copy(
        update={"privacy": hospitals.config.privacy.model_copy(update={"epsilon": 4.5, "counts_noise": 10.0})}
    )
    assert "16 of 20 spent" in described(office, other)["error"]
    open_run = hospitals.config.model_copy(update={"privacy": PrivacyConfig(least=5)})
    assert "without privacy.epsilon" in described(office, open_run)["error"]
    office.spending.ceiling = 20.5
    assert "description" in described(office, other) and office.spending.spent == 20.5
    account = office.spending.path
    account.write_text(account.read_text().replace("8.0", "0.8", 1))
    assert "account of epsilon is damaged" in described(office, other)["error"]


def test_a_site_answers_no_more_rounds_than_its_epsilon_covers(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", *PRIVATE, post=Recorder)
    hospitals.run()
    site, parcel = hospitals.post.trained[-1]
    office = hospitals.post.offices[site]

    def trained(**changed):
        text = json.dumps(parcel.header | {"version": "", "omit": False} | changed)
        return office.answer(Parcel(text, hospitals.post.sent)).header

    assert "entries" in trained()  # the same question again
    assert "covers 2 answers about training images" in trained(round=3)["error"]
    assert "covers 2 answers about training images" in trained(index=1)["error"]


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_run_asks_for_no_more_measurements_than_its_epsilon_covers(tmp_path, method):
    """The site would refuse the last ones."""
    hospitals = Hospitals(tmp_path, method, *PRIVATE, "train.rounds=3")
    folder = hospitals.run()
    assert not [event for event in events(folder, "warning") if "measure" in event["text"]]
    assert {event["part"] for event in events(folder, "final")} and events(folder, "evaluation")


@pytest.mark.parametrize("method", ["feddyn", "scaffold"])
def test_the_count_of_images_before_the_first_round_is_no_answer_of_training(tmp_path, method):
    """It carries the noise of the description, so all rounds remain."""
    folder = Hospitals(tmp_path, method, *PRIVATE).run()
    assert [event["missing"] for event in events(folder, "round")] == [{}, {}]


def test_no_action_or_place_measures_images_beside_the_account(tmp_path):
    hospitals = Hospitals(tmp_path, "fedavg", *PRIVATE, "train.rounds=1", post=Recorder)
    hospitals.run()
    site, parcel = hospitals.post.trained[0]
    office = hospitals.post.offices[site]

    def answered(**changed):
        text = json.dumps(parcel.header | {"version": "", "omit": False} | changed)
        return office.answer(Parcel(text, hospitals.post.sent)).header

    assert "not measured on this site's own images" in answered(action="evaluate", data=site)["error"]

    def counted():
        return len(office.spending._runs()[-1]["answers"]["test"])

    before = counted()
    asked = {"views": ["global"], "measure": ["test"], "round": 1}
    for action in ("train", "evaluate"):  # of one model, with other noise
        assert "measures" in answered(action=action, **asked)
    assert counted() == before + 2
