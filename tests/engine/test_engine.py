"""The engine keeps the contract: every hook, transactions, resume, workers, replies that must not be merged."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import contract_method
from clients import new_client, new_server, noise_batch
from equipoise.components.averaging import FedAvgClient, FedAvgServer
from equipoise.contract.method import Client, Method, Setting
from equipoise.contract.protocol import Action, Ask, Payload, Scan, SiteFailure, Train
from equipoise.contract.server import State
from equipoise.core.errors import UserError
from equipoise.data.augment import build_augmentation
from equipoise.data.federation import Site
from equipoise.engine.gpu_place import GpuPlace
from equipoise.engine.loop import Run
from equipoise.engine.slot import Request
from equipoise.engine.training import EagerSteps, Progress, SiteData, cut, train
from equipoise.engine.worker_pool import Pool
from equipoise.methods import get_method
from equipoise.methods.local import LocalClient, LocalServer
from harness import (
    all_state,
    assert_same_bits,
    events,
    run_tiny,
    server_state,
    site_states,
    tiny_config,
    tiny_federation,
)

CONTRACT = contract_method.METHOD
MEAN = ("evaluation.rule='mean_last'", "evaluation.last=3")
ADAM = ("train.optimiser.name='adam'", "train.optimiser.lr=0.001", "train.optimiser.keep=true")
ADAMW = ("train.optimiser.name='adamw'", "train.optimiser.weight_decay=0.1")


def variant(client: type[Client], server: type = FedAvgServer) -> Method:
    """FedAvg with another client or server."""
    return Method(server, client, "test", 2026, "test")


def test_contract_method_runs_every_hook_and_keeps_state(tmp_path):
    folder = run_tiny(tmp_path, CONTRACT)
    state = site_states(folder)
    visits = {name: value for name, value in state.items() if "visits" in name}
    assert len(visits) == 3 and all(value == 2 for value in visits.values())
    views = {event["view"] for event in events(folder, "evaluation")}
    assert views == {"global", "personal", "trained"}
    assert server_state(folder)["counts"].sum() > 0


@pytest.mark.parametrize("more", [(), MEAN, ADAMW], ids=["best", "mean_last", "adamw"])
@pytest.mark.parametrize("method", [CONTRACT, "local"], ids=["contract", "local"])
def test_resume_gives_the_same_bits(tmp_path, method, more):
    settings = ("train.rounds=3", *ADAM, *more)
    straight = run_tiny(tmp_path / "straight", method, *settings)
    halted = tmp_path / "halted"

    class Stop(Exception):
        pass

    class Halt:
        def event(self, event, **fields):
            if event == "round" and fields["round"] == 3:
                raise Stop

    config = tiny_config(method if isinstance(method, str) else "fedavg", *settings)
    chosen = get_method(method) if isinstance(method, str) else method
    with pytest.raises(Stop):
        Run(config, chosen, tiny_federation(config), halted, [Halt()]).execute()
    Run(config, chosen, tiny_federation(config), halted).execute(resume=True)
    assert_same_bits(all_state(straight), all_state(halted))
    assert events(straight, "final") == events(halted, "final")


@pytest.mark.parametrize("method", [CONTRACT, "fedavg"], ids=["contract", "fedavg"])
def test_number_of_workers_does_not_change_a_bit(tmp_path, method):
    one = run_tiny(tmp_path / "one", method)
    two = run_tiny(tmp_path / "two", method, "compute.workers=2")
    assert_same_bits(all_state(one), all_state(two))
    assert [e["metrics"] for e in events(one, "final")] == [e["metrics"] for e in events(two, "final")]


def test_another_config_is_refused_on_resume(tmp_path):
    run_tiny(tmp_path)
    with pytest.raises(UserError, match="another config"):
        run_tiny(tmp_path, "fedavg", "train.optimiser.lr=0.5", resume=True)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    run_tiny(tmp_path)
    with pytest.raises(UserError, match="already holds a run"):
        run_tiny(tmp_path)


class BadReply(FedAvgClient):
    """One site replies what it should not."""

    fault = "nan"

    def update(self) -> Payload:
        payload = super().update()
        if self.workplace.site == "site 2":
            model = {name: tensor.clone() for name, tensor in payload["model"].items()}
            name = next(n for n, t in model.items() if t.is_floating_point())
            if self.fault == "nan":
                model[name].view(-1)[0] = float("nan")
            elif self.fault == "infinity":
                model[name].view(-1)[0] = float("inf")
            elif self.fault == "misshapen":
                model[name] = model[name].reshape(-1)
            elif self.fault == "missing":
                del model[name]
            payload["model"] = model
        return payload


@pytest.mark.parametrize("fault", ["nan", "infinity", "misshapen", "missing"])
def test_a_bad_reply_is_left_out_and_named(tmp_path, fault):
    client = type("Faulty", (BadReply,), {"fault": fault})
    folder = run_tiny(tmp_path, variant(client))
    assert all(torch.isfinite(t).all() for t in server_state(folder).values())
    for event in events(folder, "round"):
        assert list(event["missing"]) == ["site 2"]
        assert "site 2" not in event["sites"]


def test_the_mean_without_a_bad_site_is_the_mean_of_the_others(tmp_path):
    bad = run_tiny(tmp_path / "bad", variant(BadReply), "train.rounds=1")

    class Fewer(FedAvgServer):
        def round(self, number, sites):
            yield from super().round(number, [s for s in sites if s != "site 2"])

    fewer = run_tiny(tmp_path / "fewer", variant(FedAvgClient, Fewer), "train.rounds=1")
    assert_same_bits(server_state(bad), server_state(fewer))


class KeepsAndFails(FedAvgClient):
    """Counts its visits; one site fails in round 2 after it has changed what it keeps."""

    def build(self) -> None:
        super().build()
        self.visits = self.keeps("visits", torch.zeros(()))

    def train(self, message: Payload) -> Action:
        self.visits += 1
        yield Train()
        if self.workplace.site == "site 1" and self.workplace.round == 2:
            raise SiteFailure("the power went out")
        return self.update()


def test_a_failed_site_rolls_back_and_takes_part_again(tmp_path):
    folder = run_tiny(tmp_path, variant(KeepsAndFails), "train.rounds=3")
    visits = {name.split("/")[0]: int(v) for name, v in site_states(folder).items() if "visits" in name}
    assert visits == {"site 1": 2, "site 2": 3, "site 3": 3}
    assert events(folder, "round")[1]["missing"] == {"site 1": "the power went out"}


def test_a_round_with_too_few_answers_is_repeated_then_given_up(tmp_path):
    with pytest.raises(UserError, match="round 2 failed 3 times"):
        run_tiny(tmp_path, variant(KeepsAndFails), "train.rounds=3", "train.min_sites=3")
    warnings = [event["text"] for event in events(tmp_path, "warning")]
    assert len(warnings) == 3 and "the power went out" in warnings[0]
    assert events(tmp_path, "round")[-1]["round"] == 1


NOTHING = [Train(epochs=0), Train(steps=0), Train(epochs=0, steps=0)]


class IdleClient(FedAvgClient):
    """Is asked for no training before whatever its subclass does."""

    def train(self, message: Payload) -> Action:
        yield from NOTHING
        return self.update()


class IdleThenTrains(IdleClient):
    """Trains after that."""

    def train(self, message: Payload) -> Action:
        yield from super().train(message)
        yield Train()
        return self.update()


@pytest.mark.parametrize("config", ["train.epochs=2", "train.steps=3"])
def test_training_for_no_epochs_or_steps_does_nothing_and_draws_nothing(tmp_path, config):
    """Whatever the config says, and also for the dropout of later training."""
    settings = (config, "train.rounds=1", "net.dropout=0.5", "data.phantom.sites=1")
    idle = run_tiny(tmp_path / "idle", variant(IdleClient), *settings)
    assert_same_bits(server_state(idle), {f"model/{name}": t for name, t in new_server("fedavg").state.model.items()})
    plain = run_tiny(tmp_path / "plain", "fedavg", *settings)
    later = run_tiny(tmp_path / "later", variant(IdleThenTrains), *settings)
    assert_same_bits(server_state(plain), server_state(later))


@pytest.mark.parametrize("work", NOTHING)
def test_the_training_loop_takes_no_step_where_none_is_asked_for(work):
    config = tiny_config()
    client, federation = new_client("fedavg"), tiny_federation(config)
    part = SiteData(federation.sites[0], client.setting.task, client.setting.device)["train"]
    augmentation = build_augmentation(config.augment, federation.image_size, federation.channels)
    progress = Progress(torch.zeros(()))
    assert list(train(client, part, augmentation, work, progress, EagerSteps())) == []
    assert (progress.steps, progress.epochs, progress.samples) == (0, 0, 0)


def test_nets_run_in_the_precision_of_the_setting_but_where_a_method_asks_for_full_precision(monkeypatch):
    client, batch = new_client("fedavg"), noise_batch()
    entered: list[bool] = []
    monkeypatch.setattr(Setting, "autocasts", True)
    monkeypatch.setattr(Setting, "precision", lambda setting, full=False: entered.append(not full) or nullcontext())

    def times() -> int:
        entered.clear()
        client.outputs(batch)
        client.workplace.logits(client.net, batch.image)
        return sum(entered)

    assert times() == 2
    with client.workplace.full_precision():
        with client.workplace.full_precision():
            assert times() == 0
        assert times() == 0, "still within the outer one"
    assert times() == 2


def test_an_undeclared_reply_is_refused(tmp_path):
    class Leaky(FedAvgClient):
        def update(self) -> Payload:
            return super().update() | {"patients": 3}

    with pytest.raises(TypeError, match="patients"):
        run_tiny(tmp_path, variant(Leaky))


def test_an_undeclared_tensor_is_refused(tmp_path):
    class Undeclared(FedAvgClient):
        def build(self) -> None:
            super().build()
            self.secret = torch.zeros(3)

    with pytest.raises(TypeError, match="secret"):
        run_tiny(tmp_path, variant(Undeclared))


class CountsInPlace(FedAvgServer):
    """A server that spoils its own snapshots."""

    def setup(self) -> None:
        super().setup()
        self.state.count = torch.zeros(())

    def round(self, number, sites):
        self.state.count.add_(1)
        yield from super().round(number, sites)


@pytest.mark.parametrize(("client", "least"), [(FedAvgClient, 1), (KeepsAndFails, 3)])
def test_a_server_that_changes_its_state_in_place_is_refused(tmp_path, client, least):
    """A round that is repeated could not go back to where it began."""
    with pytest.raises(TypeError, match=r"changed state\.count in place"):
        run_tiny(tmp_path, variant(client, CountsInPlace), f"train.min_sites={least}")


def test_a_state_whose_dict_gets_another_tensor_is_refused():
    state = State()
    state.model = {"weight": torch.zeros(2)}
    state.check()
    state.model["weight"] = torch.ones(2)
    with pytest.raises(TypeError, match=r"changed state\.model in place"):
        state.check()


def test_a_state_that_cannot_be_saved_is_refused(tmp_path):
    class HoldsAnOptimiser(FedAvgServer):
        def setup(self) -> None:
            super().setup()
            self.state.optimiser = torch.optim.Adam([torch.zeros(1)])

    with pytest.raises(TypeError, match="'optimiser' is a Adam; only tensors and plain values"):
        run_tiny(tmp_path, variant(FedAvgClient, HoldsAnOptimiser))


def test_an_unsent_message_entry_is_nan_not_a_leftover(tmp_path):
    class Forgetful(FedAvgServer):
        def round(self, number, sites):
            payload = {"model": self.state.model} if number == 1 else {}
            updates = yield Ask("train", sites, **payload)
            assert number == 1 or len(updates) == 0

    folder = run_tiny(tmp_path, variant(FedAvgClient, Forgetful), "train.min_sites=1", "train.rounds=1")
    assert events(folder, "round")[0]["missing"] == {}
    with pytest.raises(UserError, match=r"NaN or infinity.*lower train\.optimiser\.lr"):
        run_tiny(tmp_path / "again", variant(FedAvgClient, Forgetful), "train.rounds=2")


@pytest.mark.parametrize(("view", "anew"), [("augmented", True), ("cached", False), ("plain", False)])
def test_each_pass_of_a_round_over_augmented_images_draws_anew(tmp_path, view, anew):
    seen = []

    class Looks(FedAvgClient):
        def train(self, message):
            for _ in range(2):
                found = yield Scan("train", lambda batch: {"image": batch.image}, view, "concatenate")
                seen.append(found["image"])
            return (yield from super().train(message))

    run_tiny(tmp_path, variant(Looks), "train.rounds=1", "augment.name='prr'", "data.phantom.sites=1")
    assert torch.equal(*seen) != anew


def test_a_site_whose_own_model_diverges_goes_back_to_the_one_before(tmp_path):
    class Diverges(LocalClient):
        def train(self, message):
            reply = yield from super().train(message)
            if (self.workplace.site, self.workplace.round) == ("site 2", 2):
                with torch.no_grad():
                    self.net.head.weight[0] = torch.inf
            return reply

    folder = run_tiny(tmp_path, variant(Diverges, LocalServer), "train.rounds=2", "train.min_sites=1")
    (missing,) = [event["missing"] for event in events(folder, "round")][1:]
    assert list(missing) == ["site 2"] and "'net/head.weight', which the site keeps, holds NaN" in missing["site 2"]
    assert all(tensor.isfinite().all() for tensor in site_states(folder).values())


@pytest.mark.parametrize(("share", "sites", "count"), [(0.29, 100, 29), (0.57, 100, 57), (0.5, 5, 2), (0.999, 10, 9)])
def test_a_share_of_sites_is_not_lost_to_binary_fractions(share, sites, count):
    config = tiny_config("fedavg", f"train.participation={share}")
    loop = SimpleNamespace(config=config, sites=[str(number) for number in range(sites)])
    assert len(Run._drawn(loop, 1, 0)) == count


def test_partial_participation_draws_from_the_seed(tmp_path):
    folders = [
        run_tiny(tmp_path / str(i), "fedavg", "train.rounds=6", "train.participation=0.67", f"seed={seed}")
        for i, seed in enumerate([1, 1, 2])
    ]
    drawn = [[sorted(e["sites"]) for e in events(folder, "round")] for folder in folders]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(sites) == 2 for sites in drawn[0])
    assert len({tuple(sites) for sites in drawn[0]}) > 1


def test_one_site_is_local_training(tmp_path):
    one = ("data.phantom.sites=1", "data.phantom.missing=0")
    fedavg = server_state(run_tiny(tmp_path / "fedavg", "fedavg", *one))
    local = site_states(run_tiny(tmp_path / "local", "local", *one))
    assert_same_bits(
        {name.removeprefix("model/"): t for name, t in fedavg.items()},
        {name.split("/net/")[1]: t for name, t in local.items()},
    )


def test_central_with_one_site_is_fedavg(tmp_path):
    """Bit for bit, where the site is called as central learning calls its own: draws depend on a site's name."""
    one = ("data.phantom.sites=1", "data.phantom.missing=0")
    central = run_tiny(tmp_path / "central", "central", *one)
    config = tiny_config("fedavg", *one)
    federation = tiny_federation(config)
    renamed = dataclasses.replace(federation, sites=(Site("pooled", federation.sites[0].splits),))
    Run(config, get_method("fedavg"), renamed, tmp_path / "fedavg").execute()
    assert_same_bits(server_state(central), server_state(tmp_path / "fedavg"))


def test_central_learning_trains_on_every_sites_images_once_an_epoch(tmp_path):
    central = run_tiny(tmp_path, "central", "train.epochs=2")
    counts = sum(site.class_counts(4) for site in tiny_federation(tiny_config()).sites)
    (place,) = [site for site in events(central, "start")[0]["sites"] if sum(site["train"])]
    assert place["train"] == counts.tolist()
    for event in events(central, "round"):
        (work,) = event["sites"].values()
        assert (work["examples"], work["steps"]) == (2 * counts.sum(), 2 * len(cut(torch.arange(counts.sum()), 8)))


def test_every_image_trains_and_a_tail_of_one_joins_the_batch_before():
    assert [len(b) for b in cut(torch.arange(17), 8)] == [8, 9]
    assert [len(b) for b in cut(torch.arange(18), 8)] == [8, 8, 2]
    assert [len(b) for b in cut(torch.arange(1), 8)] == [1]
    assert torch.equal(torch.cat(cut(torch.arange(33), 8)), torch.arange(33))


def test_examples_count_every_training_image(tmp_path):
    folder = run_tiny(tmp_path, "fedavg", "train.epochs=2")
    sizes = {s["name"]: sum(s["train"]) for s in events(folder, "start")[0]["sites"]}
    for event in events(folder, "round"):
        assert {name: facts["examples"] for name, facts in event["sites"].items()} == {
            name: 2 * size for name, size in sizes.items()
        }


def test_last_checkpoints_and_the_selected_one_stay(tmp_path):
    folder = run_tiny(tmp_path, "local", "train.rounds=5", "checkpoint.keep=2")
    chosen = events(folder, "selection")[0]["round"]
    kept = sorted(int(p.name.removeprefix("round-")) for p in (folder / "checkpoints").iterdir())
    assert set(kept) == {4, 5, chosen}
    assert len(list((folder / "sites").glob("*/*.safetensors"))) == 3 * len(kept)


def test_selection_takes_the_best_validation_round(tmp_path):
    folder = run_tiny(tmp_path, "fedavg", "train.rounds=5")
    chosen = events(folder, "selection")[0]
    means: dict[int, list[float]] = {}
    for event in events(folder, "evaluation"):
        if event["part"] == "valid" and event["view"] == "global" and event["round"] > 0:
            means.setdefault(event["round"], []).append(event["metrics"]["balanced_accuracy"])
    best = {r: sum(v) / len(v) for r, v in means.items()}
    assert chosen["value"] == pytest.approx(max(best.values()))
    assert chosen["round"] == min(r for r in best if best[r] == max(best.values()))
    assert all(event["part"] == "valid" for event in events(folder, "evaluation"))


def test_mean_of_the_last_rounds_averages_their_test_scores(tmp_path):
    folder = run_tiny(tmp_path, "fedavg", "train.rounds=4", "evaluation.rule='mean_last'", "evaluation.last=2")
    finals = {e["site"]: e for e in events(folder, "final") if e["scope"] == "site"}
    tests = {(e["site"], e["round"]): e for e in events(folder, "evaluation") if e["part"] == "test"}
    assert {number for _, number in tests} == {3, 4} and len(finals) == 3
    for site, final in finals.items():
        third, fourth = tests[site, 3], tests[site, 4]
        for name in ("accuracy", "macro_f1", "balanced_accuracy", "loss", "ece"):
            assert final["metrics"][name] == pytest.approx((third["metrics"][name] + fourth["metrics"][name]) / 2)
        pairs = zip(third["recall"], fourth["recall"])
        assert final["recall"] == pytest.approx([None if one is None else (one + two) / 2 for one, two in pairs])
        both = torch.tensor(third["confusion"]) + torch.tensor(fourth["confusion"])
        assert torch.equal(torch.tensor(final["confusion"]), both / 2)
        assert (final["round"], final["rounds"]) == (4, 2)


@pytest.mark.parametrize(
    "more", [(), ("evaluation.trained_test=true", "train.participation=0.67")], ids=["all", "some"]
)
def test_a_mean_over_rounds_counts_every_test_image_once(tmp_path, more):
    """Also where a site has trained, and been measured after it, in some of the rounds only."""
    folder = run_tiny(tmp_path, "fedavg", "train.rounds=4", *MEAN, *more)
    held = {site["name"]: torch.tensor(site["test"]) for site in events(folder, "start")[0]["sites"]}
    finals = events(folder, "final")
    assert {e["view"] for e in finals} == ({"global", "trained"} if more else {"global"})
    assert not more or len({e.get("rounds", 1) for e in finals}) > 1, (
        "the case is worth nothing if sites took turns alike"
    )
    for final in finals:
        images = held[final["site"]] if final["site"] else sum(held.values())
        assert final["n"] == images.sum()
        assert torch.tensor(final["confusion"]).sum(1).tolist() == pytest.approx(images.tolist())


def test_a_result_of_one_round_holds_whole_images_and_says_nothing_of_rounds(tmp_path):
    for final in events(run_tiny(tmp_path, "fedavg"), "final"):
        assert all(isinstance(cell, int) for row in final["confusion"] for cell in row) and "rounds" not in final


def test_on_a_gpu_sites_with_the_most_images_take_slots_first_and_keep_their_places():
    federation = tiny_federation(tiny_config("fedavg"))
    sites = {site.name: site for site in federation.sites}
    engine = SimpleNamespace(
        setting=SimpleNamespace(config=tiny_config("fedavg")), data=lambda name: SimpleNamespace(site=sites[name])
    )
    requests = [Request("train", name, 1) for name in sites]
    ordered = GpuPlace(engine, None)._longest_first(requests)
    sizes = [sum(map(len, sites[request.site].splits.values())) for _, request in ordered]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) > 1
    assert [requests[place] for place, _ in ordered] == [request for _, request in ordered]


def test_on_a_gpu_sites_come_back_to_the_slot_that_they_had():
    engine = SimpleNamespace(setting=SimpleNamespace(config=tiny_config("fedavg", "compute.slots=2")))
    place = GpuPlace(engine, None)
    first, second = place.slots = [object(), object()]
    place.homes = {"a": first, "b": second}

    def choose(names, busy=()):
        waiting = [(place, Request("train", name, 1)) for place, name in enumerate(names)]
        return place._free_slot([(slot, 0, iter(())) for slot in busy], waiting)

    assert choose("ab") is first and choose("ba") is second
    assert choose("cab") is first, "both are somebody's"
    assert choose("ca") is second and choose("cb") is first, "the one that nobody waits for"
    assert choose("a", busy=[first]) is second
    assert choose("a", busy=[first, second]) is None


def test_a_pool_ends_though_its_workers_do_not_answer():
    """A worker that was killed holds the lock of their queue; here stopped ones stand for those that wait for it."""
    executor = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver"))
    assert [future.result() for future in [executor.submit(abs, number) for number in (-1, 2)]] == [1, 2]
    for worker in executor._processes:
        os.kill(worker, signal.SIGSTOP)
    pool = object.__new__(Pool)
    pool.pools = [executor]
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(120)
    assert not closing.is_alive()


def test_a_worker_that_is_killed_between_two_asks_is_told_in_words(tmp_path, monkeypatch):
    def broken(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(ProcessPoolExecutor, "submit", broken)
    with pytest.raises(UserError, match="a worker process was ended from outside"):
        run_tiny(tmp_path, "fedavg", "compute.workers=2")
