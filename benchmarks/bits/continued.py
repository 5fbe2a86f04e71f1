"""What the new commit does with folders that the old one wrote: reports, predictions, exports, studies, hospitals."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bits.cases import TINY, Case, case, dotted
from bits.compare import differences, differing
from bits.sides import Side

#: what a run that stopped in its last round would not have
LATER = ("models", "report.html", "report.csv", "report.tex")
SITE = "site 1"
PRR = case("prr", {"prr.global_view": True})
#: runs whose folders are used, with the site whose model predicts; none: the global model does
FINISHED: tuple[tuple[Case, str | None], ...] = (
    (case("fedavg", {}), None),
    (case("fedrep", {}), SITE),
    (PRR, SITE),
    (PRR, None),
    (case("fedbm", {}), None),
    (case("fednpr-per", {}), SITE),
)
#: bytes on the wire: what a site that goes on has received before is not sent again
TRAFFIC = ("sent", "received", "entries")
ROWS = ("fedavg", "fedrep")
PIXELS: int = TINY["data.phantom.size"]

Finding = tuple[str, list[str]]
Answer = dict[str, Any]


def cut(run: Path, folder: Path) -> Path:
    """A copy of a finished run as a crash would leave it, in the middle of writing the last round's events."""
    shutil.copytree(run, folder)
    before, last = sorted((folder / "checkpoints").glob("round-*"))[-2:]
    events = json.loads((before / "manifest.json").read_bytes())["events"]
    shutil.rmtree(last)
    for path in (folder / name for name in LATER):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    log = folder / "events.jsonl"
    log.write_bytes(log.read_bytes()[: events + 100])
    return folder


class Folders:
    """Puts the same question to both sides, each with a copy of the folder that the old commit wrote."""

    def __init__(self, old: Side, new: Side, scratch: Path, reference: Callable[[Case], Path]):
        self.old, self.new, self.scratch, self.reference = old, new, scratch, reference
        self._numbers = itertools.count()

    def folders(self) -> Iterator[Finding]:
        """All but the pilot, as pairs of a name and lines about what differs."""
        for finished in dict.fromkeys(finished for finished, _ in FINISHED):
            yield f"report of {finished.name}", self.both(self.reference(finished), "report", "{}")
        for finished, site in FINISHED:
            run, name = self.reference(finished), f"{finished.name}, {site or 'global model'}"
            yield f"predict with {name}", self.predicted(run, site)
            for ending in ("pt2", "onnx"):
                yield f"export of {name} to {ending}", self.exported(run, site, ending)
        runs = [self.reference(finished) for finished, _ in FINISHED[:2]]
        yield "report of two runs", self.both(_gathered(runs, self.place("runs")), "report", "{}/0", "{}/1")
        yield from self.studies()

    def place(self, name: str) -> Path:
        """A path that nothing has used yet."""
        return self.scratch / f"{name}-{next(self._numbers)}"

    def both(self, folder: Path, *arguments: str) -> list[str]:
        """A command line of each side on its copy of the folder, `{}`; compares statuses, prints and files."""
        before, after = (self.answer(side, folder, arguments) for side in (self.old, self.new))
        return _parted(before, after, " ".join(arguments))

    def answer(self, side: Side, folder: Path, arguments: Sequence[str]) -> Answer:
        """What a command line of one side does with a copy of the folder."""
        copy = self.place("copy") / "folder"
        shutil.copytree(folder, copy)
        status, said = side.run(*(argument.replace("{}", str(copy)) for argument in arguments)).result()
        return {"status": status, "said": said.replace(str(copy), "FOLDER"), "files": texts(copy)}

    def predicted(self, run: Path, site: str | None) -> list[str]:
        """Probabilities of some images."""
        images = pictures(self.place("images"))
        return self.both(run, "predict", "{}", *map(str, images), "--csv", *(["--site", site] if site else []))

    def exported(self, run: Path, site: str | None, ending: str) -> list[str]:
        """Probabilities from an exported model, which PyTorch or ONNX computes."""
        pixels = self.place("pixels").with_suffix(".npy")
        np.save(pixels, np.stack([_picture(seed).transpose(2, 0, 1) for seed in range(3)]))
        command = ["--site", site] if site else []
        before, after = (self.model(side, [str(run), ending, *command], pixels) for side in (self.old, self.new))
        return _parted(before, after, f"export to {ending}")

    def model(self, side: Side, asked: Sequence[str], pixels: Path) -> Answer:
        """What one side says of an export, and what the exported model says of images."""
        run, ending, *more = asked
        file = self.place("model").with_suffix(f".{ending}")
        status, said = side.run("export", run, file, *more).result()
        found = ""
        if not status:
            status, found = side.exported(file, pixels).result()
        return {"status": status, "said": said.replace(str(file), "FILE"), "probabilities": found}

    def studies(self) -> Iterator[Finding]:
        """A small study: its tables anew, and its runs where one was interrupted."""
        file, out = self.scratch / "guard.toml", self.place("studies")
        file.write_text(study_text(self.reference(FINISHED[0][0]) / "config.toml"))
        self.old.said("study", file, "--out", out, "--keep-checkpoints")
        yield "study --report-only", self.both(out, "study", str(file), "--out", "{}", "--report-only")
        broken = self.place("broken")
        shutil.copytree(out, broken)
        run = broken / "guard" / "runs" / f"{ROWS[1]}-seed1"
        shutil.rmtree(run)
        cut(out / "guard" / "runs" / run.name, run)
        status, said = self.new.run("study", file, "--out", broken, "--keep-checkpoints").result()
        lines = [f"exit status {status}: {said[-400:]}"] if status else []
        lines += [line for name in sorted((out / "guard" / "runs").iterdir()) for line in _runs(name, broken, out)]
        yield "study that goes on", lines

    def pilot(self) -> Iterator[Finding]:
        """A federation of processes: server and hospitals of the old commit go on under the new one.

        The hospitals' policies and what they keep between rounds are the old commit's.
        """
        whole, again = self.place("pilot"), self.place("pilot")
        command = ["pilot", *case("fedrep", {}).arguments[1:]]
        self.old.said(*command, "--out", whole)
        cut(whole, again)
        for models in again.glob("pilot/sites/*/state/runs/*/models"):
            shutil.rmtree(models)
        for file in again.glob("pilot/**/site.toml"):  # sites now refuse runs without a least count, unless told
            file.write_text(f"least = 0\n{file.read_text()}")
        status, said = self.new.run("pilot", whole / "config.toml", "--out", again, "--resume").result()
        yield (
            "pilot that goes on",
            [f"ends with status {status}: {said}"] if status else [*differences(whole, again, TRAFFIC)],
        )


def _parted(before: Answer, after: Answer, name: str) -> list[str]:
    """In which entries two answers differ; where the old commit fails, there is nothing to compare with."""
    if before["status"]:
        return [f"the old commit fails with {before['status']}: {' '.join(before['said'].split())[-500:]}"]
    return list(differing(before, after, name))


def _runs(run: Path, broken: Path, out: Path) -> Iterator[str]:
    yield from (f"{run.name}: {line}" for line in differences(run, broken / run.relative_to(out)))


def _gathered(runs: list[Path], folder: Path) -> Path:
    for number, run in enumerate(runs):
        shutil.copytree(run, folder / str(number))
    return folder


def texts(folder: Path) -> dict[str, str]:
    """The files of a folder that are text, without bold type in tables.

    Pages are left out: their design changes, and the CSV file beside each holds the same scores.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".csv", ".md", ".tex", ".json", ".toml"):
            text = path.read_text(encoding="utf-8")
            found[str(path.relative_to(folder))] = re.sub(r"\\textbf\{([^}]*)\}|\*\*([^*]*)\*\*", r"\1\2", text)
    return found


def pictures(folder: Path) -> list[Path]:
    """Images as a user has them, of noise and larger than those in training."""
    folder.mkdir(parents=True)
    paths = [folder / f"{seed}.png" for seed in range(3)]
    for seed, path in enumerate(paths):
        Image.fromarray(_picture(seed).repeat(3, 0).repeat(3, 1)).save(path)
    return paths


def _picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), np.uint8)


def study_text(config: Path) -> str:
    """A study of two methods and two seeds, with all settings of a run's config, whatever defaults are."""
    held = dict(dotted(tomllib.loads(config.read_text(encoding="utf-8"))))
    settings = "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in held.items() if key not in ("name", "method", "seed")
    )
    rows = "".join(f'[[row]]\nname = "{name}"\nmethod = "{name}"\n' for name in ROWS)
    return f'name = "guard"\ntitle = "Guard"\nscope = "sites"\nseeds = [1, 2]\n[settings]\n{settings}{rows}'
