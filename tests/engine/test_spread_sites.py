"""A run's sites on several devices: equal bits, work dealt by its cost, refusals before anything is written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.core.device_names import places_of_run
from equipoise.core.errors import UserError
from equipoise.data.federation import Site
from equipoise.engine.runs import choose_device
from equipoise.engine.slot import EVALUATE, Request
from equipoise.engine.worker_pool import Pool, deal
from harness import all_state, assert_same_bits, run_tiny, tiny_config, tiny_federation

FEW = ("data.phantom.images=120", "train.batch_size=16", "evaluation.trained=false")


@given(st.lists(st.floats(0.1, 100), max_size=30), st.integers(1, 5))
def test_dealing_gives_all_work_out_and_no_hand_much_more_than_its_share(costs, hands):
    shares = deal(costs, hands)
    assert sorted(place for share in shares for place in share) == list(range(len(costs)))
    longest = max(sum(costs[place] for place in share) for share in shares)
    assert longest <= sum(costs) / hands + max(costs, default=0) + 1e-6


def test_a_run_goes_on_on_other_devices_with_the_same_bits(tmp_path):
    straight = run_tiny(tmp_path / "straight", "fedavg", *FEW, "compute.device='cpu'", "train.rounds=3")
    run_tiny(tmp_path / "spread", "fedavg", *FEW, "compute.device='cpu'")
    run_tiny(tmp_path / "spread", "fedavg", *FEW, "compute.device='cpu:2'", "train.rounds=3", resume=True)
    assert_same_bits(all_state(straight), all_state(tmp_path / "spread"))


def test_each_device_is_dealt_one_share_of_all_sites_by_their_images(tmp_path):
    """A stand-in for the processes: sites of 60, 30, 20 and 10 images go to two devices as 60 and 30 + 20 + 10."""

    class Stand:
        client = staticmethod(lambda setting: None)
        federation = folder = None

        def __init__(self):
            self.images = {"a": 10, "b": 60, "c": 20, "d": 30}
            config = tiny_config("fedavg", "compute.device='cpu:2'")
            self.method, self.setting = "fedavg", type("Setting", (), {"config": config})

        def groups(self, requests, ask):
            return [[place] for place in range(len(requests))]

        def cost(self, request):
            return self.images[request.site]

    pool = Pool(Stand(), ["cpu", "cpu"])
    try:
        requests = [Request("train", site, 1) for site in "abcd"]
        dealt = [[requests[place].site for place in places] for _, places in pool._dealt(requests, None)]
        assert dealt == [["b"], ["d", "c", "a"]]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("compute.device='cpu,cuda:0'",), "mixes kinds"),
        (("compute.device='cpu,gpu'",), "no list of devices"),
        (("compute.device='cpu:2'", "compute.workers=2"), "leave compute.workers out"),
    ],
)
def test_places_that_do_not_go_together_are_refused_before_anything_is_written(tmp_path, settings, says):
    with pytest.raises(UserError, match=says):
        run_tiny(tmp_path / "run", "fedavg", *FEW, *settings)
    assert not (tmp_path / "run").exists()


def test_the_first_of_several_devices_is_the_servers_and_one_name_stays_as_it_is():
    assert choose_device("cpu,cpu") == choose_device("cpu:2") == "cpu"
    assert places_of_run("auto") == ["auto"] and places_of_run("cuda:1") == ["cuda:1"]


def test_spread_runs_have_the_digest_of_one_device_of_their_kind_and_others_keep_theirs():
    one = tiny_config("fedavg", "compute.device='cpu'").digest()
    assert {
        tiny_config("fedavg", f"compute.device='{text}'").digest() for text in ("cpu:1", "cpu:2", "cpu,cpu,cpu")
    } == {one}
    kinds = ("cuda", "cuda:0,cuda:1", "cuda:0,cuda:1,cuda:2")
    assert len({tiny_config("fedavg", f"compute.device='{text}'").digest() for text in kinds}) == 1
    assert tiny_config("fedavg", "compute.device='cuda:1'").digest() not in {one, tiny_config("fedavg").digest()}


def test_training_costs_by_images_and_epochs_or_by_steps_and_measuring_by_the_parts_measured(tmp_path):
    from equipoise.contract.method import Setting
    from equipoise.engine.local_engine import LocalEngine
    from equipoise.methods import get_method

    def costs(*settings):
        config = tiny_config("fedavg", *FEW, *settings)
        federation = tiny_federation(config)
        method = get_method("fedavg")
        with LocalEngine(method, Setting.of(config, method, federation), federation, tmp_path) as engine:
            sites: list[Site] = list(federation.sites)
            trained = [engine.cost(Request("train", site.name, 1)) for site in sites]
            measured = [engine.cost(Request(EVALUATE, s.name, 1, measure=("test",), views=("global",))) for s in sites]
        return sites, trained, measured

    sites, trained, measured = costs("train.epochs=2")
    assert trained == [3 * 2 * len(site.splits["train"]) for site in sites]
    assert measured == [len(site.splits["test"]) for site in sites]
    assert set(costs("train.steps=5")[1]) == {3 * 5 * 16}
