"""A run, round by round: rounds as transactions, evaluation, selection on validation, checkpoints, final test."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from equipoise.contract.config import Config
from equipoise.contract.method import Method, Setting
from equipoise.contract.protocol import Ask, Conversation, Replies
from equipoise.core.errors import UserError
from equipoise.core.storage import write_text
from equipoise.core.streams import stream
from equipoise.data.federation import Federation
from equipoise.engine.allocator import keep_freed_memory
from equipoise.engine.beside import beside
from equipoise.engine.checkpoint import Checkpoints, Manifest
from equipoise.engine.engine import Engine
from equipoise.engine.evaluation import TRAINED, Evaluator, Score, pack_scores, unpack_scores
from equipoise.engine.events import EventLog
from equipoise.engine.image_scores import FILE, write_image_scores
from equipoise.engine.local_engine import LocalEngine
from equipoise.engine.opening import check_new, data_told, resumed, rounds_before, warned_on_resume
from equipoise.engine.payload_files import claimed_folder
from equipoise.engine.pictures import PICTURES, write_pictures
from equipoise.engine.selection import Selection
from equipoise.engine.start import check_run, opening_warnings, start_facts
from equipoise.engine.summing import ALL_SITES
from equipoise.engine.volume_scores import VOLUMES, write_volume_scores

ATTEMPTS = 3
Turns = Generator[None, None, None]
EngineMaker = Callable[[Method, Setting, Federation, Path], Engine]


class Observer(Protocol):
    """Someone who watches a run: the progress display, a tracker."""

    def event(self, event: str, **fields: Any) -> None: ...


class RoundFailed(Exception):
    """Too few sites answered; the round is repeated."""


class Run:
    """One run of one method on one federation, in one folder."""

    def __init__(
        self,
        config: Config,
        method: Method,
        federation: Federation,
        folder: Path,
        observers: Sequence[Observer] = (),
        device: str = "cpu",
        engine: EngineMaker = LocalEngine,
    ):
        self.config = config
        self.method = method
        self.federation = federation.pooled() if method.pooled else federation
        self.folder = folder
        self.observers = observers
        self.make_engine = engine
        self.setting = Setting.of(config, method, self.federation, device)
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._log_path = folder / "events.jsonl"
        self.sites = [site.name for site in self.federation.training_sites(config.privacy.limit)]
        #: called after each round; True: save it even if it is not due
        self.after_round: Callable[[int], bool] = lambda number: False
        #: a context held while the folder is this process's own; a study looks there for a run that another process
        #: has finished, and clears away what a finished run no longer needs
        self.tenancy: Callable[[], AbstractContextManager[None]] = nullcontext

    @cached_property
    def data_told(self) -> dict[str, Any]:
        """What the run tells of its data."""
        return data_told(self.federation, self.config.privacy.limit)

    @property
    def fingerprint(self) -> str:
        """Identifies the data."""
        return str(self.data_told["data"])

    def execute(self, resume: bool = False) -> None:
        """Run to the end, from the start or from the last complete round."""
        for _ in self.steps(resume):
            pass

    def steps(self, resume: bool = False) -> Turns:
        """The run as a generator that yields between steps, so that several runs can share a device."""
        torch.set_num_threads(self.config.compute.threads)
        keep_freed_memory()
        check_run(self.config, self.method, self.setting, self.federation, self.sites)
        with self.make_engine(self.method, self.setting, self.federation, self.folder) as self.engine:
            self.server = self.method.server_class(self.config)(self.setting)
            self.evaluator = Evaluator(self.engine, self.server, self.federation)
            self.selection = Selection(self.config, self.evaluator.deciding_view())
            # All errors in the settings have shown by now: from here on the folder is written.
            with claimed_folder(self.folder), self.tenancy():
                latest = self._open(resume)
                if latest:
                    self._go_back_to(latest)
                began = time.perf_counter() - (latest.seconds if latest else 0.0)
                kept = (latest.events, latest.log) if latest else ()
                with closing(EventLog(self._log_path, *kept)) as self.log:
                    if latest:
                        self._go_on(latest)
                    else:
                        self._start()
                    for number in range(latest.round + 1 if latest else 0, self.config.train.rounds + 1):
                        yield from self._round(number)
                        self._checkpoint(number, time.perf_counter() - began)
                    yield from self._finish()
                    self._tell("end", seconds=time.perf_counter() - began, checksum=self.log.checksum())

    # ---- beginning ---------------------------------------------------------------------------------

    def _open(self, resume: bool) -> Manifest | None:
        """The checkpoint to go on from, if any."""
        if resume:
            check_sites = self.engine.states.check
            return resumed(self.folder, self._log_path, self.checkpoints, self.config, self.fingerprint, check_sites)
        check_new(self.folder, self._log_path)
        return None

    def _start(self) -> None:
        """Write down what is known before the first round."""
        write_text(self.folder / "config.toml", self.config.to_toml())
        tested, view = self._tested_sites(), self.selection.view
        warnings = opening_warnings(self.engine, self.federation, self.data_told, self.sites, tested, view)
        self._tell("start", **start_facts(self.engine, self.federation, self.data_told, warnings, self.folder))

    def _go_on(self, latest: Manifest) -> None:
        """Write down that the run goes on after its last complete round."""
        useless = self.checkpoints.settle(latest.round)
        self.engine.states.collect(manifest.sites for manifest in self.checkpoints.manifests())
        self._tell("resumed", round=latest.round)
        self._prolong(latest)
        for text in warned_on_resume(self._log_path, useless, self.setting.device.type):
            self._tell("warning", text=text)

    def _prolong(self, latest: Manifest) -> None:
        """Take up a config that asks for more rounds than the run had."""
        before, rounds = rounds_before(self.folder, self.config), self.config.train.rounds
        if before is None:
            return
        if self.config.privacy.epsilon is not None:
            raise UserError(
                f"privacy.epsilon = {self.config.privacy.epsilon:g} was kept for {before} rounds; {rounds} rounds "
                "would reveal more. Start a new run with a lower privacy.epsilon"
            )
        self.selection.prolong(before, latest.round)
        self.checkpoints.relabel(self.config.digest())
        write_text(self.folder / "config.toml", self.config.to_toml())
        change = f"the config changed: train.rounds was {before}, is {rounds}"
        follows = f"what depends on the number of rounds may give other scores than a new run of {rounds} rounds"
        self._tell("warning", text=f"{change}; {follows}")

    def _tested_sites(self) -> list[str]:
        least, size = self.config.privacy.limit, len(self.federation.classes)
        return [site.name for site in self.federation.training_sites(least) if site.tells("test", size, least)]

    def _go_back_to(self, latest: Manifest) -> None:
        """Everything as the checkpoint says; those of selected rounds, which the end will need, can be read as well."""
        with self.checkpoints.damage_named():
            kept = unpack_scores(self.checkpoints.scores(latest.round), self.setting.task)
            self.selection.restore(latest.selection, kept)
        for number in sorted(self.selection.rounds):
            if number < latest.round:  # the last round may be selected before it is there
                self._restore(number)
        self._restore(latest.round)

    def _restore(self, round_number: int) -> None:
        with self.checkpoints.damage_named():
            self.server.state.restore(self.checkpoints.server(round_number), self.setting.device)
            sites = self.checkpoints.manifest(round_number).sites
            self.engine.states.check(sites)
            self.engine.states.restore(sites)

    # ---- a round -----------------------------------------------------------------------------------

    def _round(self, number: int) -> Turns:
        """Hold a round's conversation until enough sites have answered, each attempt from the state before it.

        Round 0 is the start. What is gathered there holds for the whole run, so every site has to answer.
        """
        began, before = time.perf_counter(), self.server.state.snapshot()
        what, least = (f"round {number}", self.config.least_answers) if number else ("the start", len(self.sites))
        for attempt in range(ATTEMPTS):
            self.engine.begin(number, attempt)
            self.server.notes = {}
            self.server.unfinished = [] if self.engine.elsewhere and self.setting.device.type == "cpu" else None
            conversation, replies = self._conversation(number, attempt), None
            try:
                while ask := _next(conversation, replies):
                    replies = yield from self.engine.ask(ask)
                    _check_enough(replies, ask, least)
                break
            except RoundFailed as failure:
                conversation.close()
                self.server.state.check()
                self.server.state.restore(before, self.setting.device)
                self._tell("warning", text=f"{what} is repeated: {failure}")
        else:
            raise UserError(self._gave_up(what))
        self.server.state.check()
        self.engine.commit()
        if number:
            self._tell_round(number, time.perf_counter() - began)
        if not (unfinished := self.server.unfinished) and number:
            self._tell_actions(number)
        with beside(unfinished or (), self.config.compute.threads):
            yield from self._evaluate(number)
        if unfinished:
            self.server.state.check()
            self._tell_actions(number)

    def _conversation(self, number: int, attempt: int) -> Conversation:
        """What the server says in a round; at the start it asks all sites."""
        return self.server.round(number, self._drawn(number, attempt)) if number else self.server.start(self.sites)

    def _gave_up(self, what: str) -> str:
        lost = "; ".join(f"{site}: {why}" for site, why in self.engine.failed.items())
        advice = ""
        if self.engine.diverged:
            advice = ". Training may have diverged: try a lower train.optimiser.lr, or train.optimiser.clip"
        return f"{what} failed {ATTEMPTS} times ({lost}){advice}"

    def _drawn(self, number: int, attempt: int) -> list[str]:
        """The sites of a round: a share of all, drawn from the seed, in the federation's order."""
        share = self.config.train.participation
        whole = int(share * len(self.sites) + 1e-9)  # 0.29 of 100 sites are 29, and 28.999... in binary fractions
        count = max(whole, self.config.least_answers)
        if count >= len(self.sites):
            return list(self.sites)
        draw = random.Random(stream(self.config.seed, "participation", number, attempt))
        chosen = set(draw.sample(self.sites, count))
        return [site for site in self.sites if site in chosen]

    def _tell_round(self, number: int, seconds: float) -> None:
        self._tell(
            "round",
            round=number,
            seconds=seconds,
            lr=self.config.train.optimiser.lr * self.config.train.schedule.factor(number - 1),
            sites=self.engine.facts,
            missing=self.engine.failed,
            entries=self.engine.entry_bytes(),
        )

    def _tell_actions(self, number: int) -> None:
        """Tell how the method acted in a round; where the server works beside the evaluation, after that."""
        sites, server = self.engine.notes, {site: notes.taken() for site, notes in self.server.notes.items()}
        if sites or server:
            self._tell("actions", round=number, sites=sites, server=server)
        for notes in self.server.notes.values():
            for name, images in notes.pictures.items():
                write_pictures(self.folder / PICTURES / f"{name}-round{number:05d}.png", images)

    # ---- evaluation and selection --------------------------------------------------------------------

    def _evaluate(self, number: int) -> Turns:
        settings = self.config.evaluation
        last = number == self.config.train.rounds
        in_tail = settings.rule == "mean_last" and self.config.may_report(number)
        parts = ("valid", "test") if settings.test == "always" or in_tail else ("valid",)
        trained = self.evaluator.trained_scores()
        for score in trained:
            if score.part in parts:
                self._tell_score(score, number)
        if number % settings.every and not last:
            return
        scores = yield from self.evaluator.round_scores(number, parts)
        self._tell_undone(number)
        for score in scores:
            self._tell_score(score, number)
        if number >= settings.earliest:
            missing = self.evaluator.unmeasured(self.selection.view, parts, scores)
            self._tell_incomplete(number, missing)
            self.selection.note(number, [*scores, *trained], missing)
        if last:
            chosen = self.selection.record()
            self._tell("selection", rule=settings.rule, metric=settings.score, view=self.selection.view, **chosen)

    def _tell_undone(self, number: int) -> None:
        for (site, what), why in self.engine.undone.items():
            self._tell("warning", text=f"round {number}: {site} did not {what}: {why}")
        self.engine.undone.clear()

    def _tell_incomplete(self, number: int, missing: Sequence[str]) -> None:
        if missing and self.config.evaluation.rule == "best":
            text = f"round {number} lacks the validation score of {', '.join(missing)}"
            self._tell("warning", text=f"{text}: it is selected only if no round was measured at more sites")

    def _tell_untrained(self) -> None:
        """Name the sites whose test scores right after training are wanted, but not known."""
        known = {score.site for score in chain(*self.selection.kept) if score.view == TRAINED}
        absent = [site for site in self._tested_sites() if not {site, ALL_SITES} & known]
        if self.config.evaluation.trained_test and absent:
            text = f"not tested right after training: {', '.join(absent)} took no part in the reported round"
            self._tell("warning", text=text)

    def _tell_score(self, score: Score, number: int) -> None:
        self._tell("evaluation", round=number, part=score.part, view=score.view, site=score.site, **score.summary)

    # ---- saving and ending -----------------------------------------------------------------------------

    def _checkpoint(self, number: int, seconds: float) -> None:
        settings = self.config.checkpoint
        anyway = self.after_round(number)
        if not anyway and number % settings.every and number not in {self.config.train.rounds, *self.selection.rounds}:
            return
        self.log.settle()
        manifest = Manifest(
            round=number,
            digest=self.config.digest(),
            data=self.fingerprint,
            events=self.log.size(),
            sites=self.engine.states.flush(),
            selection=self.selection.record(),
            seconds=seconds,
            log=self.log.checksum(),
        )
        self.checkpoints.save(manifest, self.server.state.snapshot(), pack_scores(self.selection.kept))
        self.engine.states.collect(retained.sites for retained in self.checkpoints.retain(settings.keep))

    def _finish(self) -> Turns:
        """Measure the selected models on the test part and write them out."""
        rule, selection, present = self.config.evaluation.rule, self.selection, self.config.train.rounds
        measured: list[Score] = []
        cohorts: list[dict[str, Any]] = []
        for number, sites in selection.reported(self.sites):
            if number != present:
                self._restore(number)
                present = number
            models, message = self.folder / "models", self.server.message()
            yield from self.engine.publish(models, message, sites, whole=number != selection.common)
            reports = partial(selection.reports, number)
            scores = yield from self.evaluator.test_scores(number, reports)
            measured += scores if rule != "mean_last" else []
            cohorts += yield from self.evaluator.cohorts(number, reports)
            self._tell_undone(number)
        kept = selection.kept if rule == "mean_last" else [[*measured, *chain(*selection.kept)]]
        self._tell_untrained()
        for fields in (*self.evaluator.finals(kept), *cohorts):
            reported = {"round": selection.round_of(fields["view"], fields["site"]), **fields}
            self._tell("final", part="test", rule=rule, **reported)
        images = self.evaluator.image_scores
        if rule == "mean_last":
            images = self.evaluator.averaged_images(self.config.evaluation.reportable(present), selection.kept)
        write_image_scores(self.folder / FILE, images, self.federation)
        write_volume_scores(self.folder / VOLUMES, self.evaluator.volume_scores, self.federation)

    def _tell(self, event: str, **fields: Any) -> None:
        self.log.write(event, **fields)
        for observer in self.observers:
            observer.event(event, **fields)


def _next(conversation: Conversation, replies: Replies | None) -> Ask | None:
    """What the server asks next, after these replies; nothing where it has no more to ask."""
    try:
        return next(conversation) if replies is None else conversation.send(replies)
    except StopIteration:
        return None


def _check_enough(replies: Replies, ask: Ask, least: int) -> None:
    """Give a round up that fewer than `least` of the asked sites have answered."""
    if len(replies) < min(least, len(ask.sites)):
        lost = "; ".join(f"{site}: {why}" for site, why in replies.missing.items())
        raise RoundFailed(f"only {len(replies)} of {len(ask.sites)} sites answered '{ask.action}' ({lost})")
