"""Input that nobody should write, at every door: it is taken or refused in words, and never ends in a traceback."""

from __future__ import annotations

import json
import random
import shutil
import string
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from equipoise.api import load_result
from equipoise.cli.app import main
from equipoise.contract.config import Config
from equipoise.contract.config_files import parse_config, read_raw
from equipoise.core.errors import is_users
from equipoise.core.table import dotted
from equipoise.data import DataConfig, load_federation
from equipoise.data.store import Store
from equipoise.engine.prediction import load_predictor
from equipoise.engine.runs import make_config
from equipoise.methods import all_options, method_names, option_tables
from equipoise.report import write_report
from harness import run_tiny, tiny_config, tiny_federation

FEW = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
#: keys of a config, with those of all methods
KEYS = sorted(
    {
        *dotted(Config().model_dump(mode="json")),
        *(f"{name}.{key}" for name in method_names() for key in all_options(name, {})),
    }
)
ODD = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(),
    some.integers(-3, 3),
    some.floats(),
    some.text(max_size=12),
    some.sampled_from(["auto", "best", "fedavg", "/", "..", "\x00", "off", "1e999", "phantom", "a:b", "x.py"]),
    some.lists(some.integers() | some.text(max_size=4), max_size=3),
    some.dictionaries(some.text(max_size=4), some.integers(), max_size=2),
)


def users(problem: BaseException) -> bool:
    """Whether a problem is told in words, as the command line does for what users can mend."""
    return is_users(problem) and bool(str(problem).strip())


# ---- configs and commands ------------------------------------------------------------------------------------------


@FEW
@given(some.lists(some.tuples(some.sampled_from([*KEYS, "no.such.key", "method", "train"]), ODD), max_size=4))
def test_configs(changes):
    raw: dict[str, Any] = {}
    for key, value in changes:
        *path, name = key.split(".")
        table = raw
        for part in path:
            inner = table.setdefault(part, {})
            table = inner if isinstance(inner, dict) else table
        table[name] = value
    try:
        parse_config(raw, option_tables(raw)).to_toml()
    except Exception as problem:
        assert users(problem), repr(problem)


@FEW
@given(some.sampled_from(KEYS), some.text(string.printable, max_size=14))
def test_settings_of_the_command_line(key, text):
    try:
        make_config(None, [f"{key}={text}"])
    except Exception as problem:
        assert users(problem), repr(problem)


@FEW
@given(some.binary(max_size=80) | some.text(max_size=60).map(str.encode))
def test_config_files(tmp_path, content):
    path = tmp_path / "odd.toml"
    path.write_bytes(content)
    try:
        make_config(str(path))
        read_raw(str(path))
    except Exception as problem:
        assert users(problem), repr(problem)


TYPED = """run resume compare study report evaluate predict audit export init runs presets methods components data
    concepts settings show inspect prepare features list --set --method --with --data --root --plan --site --by --out
    --rounds --lr train.lr=1 x=y folder:nowhere manifest:nowhere.csv nowhere prr margins -1 -- train= ."""
WORDS = TYPED.split()


@settings(FEW, max_examples=120)
@given(words=some.lists(some.sampled_from(WORDS) | some.text(string.printable, max_size=8), min_size=1, max_size=5))
def test_commands(tmp_path, monkeypatch, capsys, words):
    """Nothing is trained: every run names data that is not there."""
    monkeypatch.chdir(tmp_path)
    if words[0] in ("run", "compare", "study"):
        words = [*words, "--set", "data.name=folder:nowhere"]
    if words[0] in ("demo", "pilot", "server", "site"):
        return
    monkeypatch.setattr("sys.argv", ["equipoise", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    told = capsys.readouterr()
    assert stop.value.code in (0, 2), (words, told.err[-800:])
    assert "Traceback" not in told.err


# ---- data ------------------------------------------------------------------------------------------------------------


@FEW
@given(
    some.lists(some.lists(some.text(string.printable, max_size=6), max_size=5), max_size=5),
    some.sampled_from([",", ";", "\t", "|"]),
    some.sampled_from(["path,label", "path,label,site,split,group", "image;dx", "", "path", "\ufeffpath,label"]),
)
def test_manifests(tmp_path, rows, separator, head):
    path = tmp_path / "odd.csv"
    path.write_text("\n".join([head, *(separator.join(row) for row in rows)]), encoding="utf-8")
    _refused_or_taken(lambda: load_federation(DataConfig(name=f"manifest:{path}", store=tmp_path / "store"), 1))


@FEW
@given(some.binary(max_size=200))
def test_manifests_of_bytes(tmp_path, content):
    path = tmp_path / "odd.csv"
    path.write_bytes(content)
    _refused_or_taken(lambda: load_federation(DataConfig(name=f"manifest:{path}", store=tmp_path / "store"), 1))


def _refused_or_taken(load: Any) -> None:
    try:
        load()
    except Exception as problem:
        assert users(problem), repr(problem)


def changed(content: bytes, draw: random.Random) -> bytes:
    """The content of a file with a bit, a stretch or its end changed."""
    how = draw.choice(("bit", "cut", "text", "longer", "empty"))
    place = draw.randrange(max(len(content), 1))
    if how == "bit" and content:
        return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]
    if how == "text":
        return content[:place] + draw.choice((b"null", b"-1", b"[]", b"{}", b"1e400", b'"x"')) + content[place + 4 :]
    return {"cut": content[:place], "longer": content + bytes(9)}.get(how, b"")


@pytest.fixture(scope="module")
def store_folder(tmp_path_factory) -> Path:
    from PIL import Image

    images, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("stores")
    for number in range(12):
        path = images / ("ab"[number % 2]) / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number * 20, 3, 5)).save(path)
    load_federation(DataConfig(name=f"folder:{images}", store=out, size=8), 1)
    return next(path for path in out.iterdir() if (path / "index.json").is_file())


@pytest.mark.parametrize("number", range(30))
def test_stores(tmp_path, store_folder, number):
    draw, folder = random.Random(number), tmp_path / "store"
    shutil.copytree(store_folder, folder)
    victim = draw.choice(sorted(path for path in folder.iterdir() if path.suffix in (".json", ".npy")))
    victim.write_bytes(changed(victim.read_bytes(), draw))
    _refused_or_taken(lambda: Store(folder).images(np.array([0, 1])))


# ---- run folders -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return run_tiny(tmp_path_factory.mktemp("runs") / "run", "fedbn", "data.phantom.images=80", known_as="fedbn")


@pytest.mark.parametrize("number", range(60))
def test_run_folders(tmp_path, run_folder, number):
    draw, folder = random.Random(number), tmp_path / "run"
    shutil.copytree(run_folder, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "checkpoints" not in path.parts)
    victim = draw.choice(files)
    victim.write_bytes(changed(victim.read_bytes(), draw))
    for look in (
        lambda: load_result(folder).scores(),
        lambda: load_result(folder).history(),
        lambda: load_result(folder).predictions(),
        lambda: load_predictor(folder, "site 1"),
        lambda: write_report([folder]),
    ):
        _refused_or_taken(look)


# ---- messages from sites ---------------------------------------------------------------------------------------------

NESTED = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=6),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@FEW
@given(some.text(max_size=40) | NESTED.map(json.dumps), some.integers(0, 2))
def test_parcels(text, tensors):
    pytest.importorskip("flwr")
    from equipoise.hospitals.parcels import MissingTensors, Parcel, UnreadableParcel, open_parcel

    parcel = Parcel(text, {f"{number:064x}": torch.zeros(number) for number in range(tensors)})
    with suppress(UnreadableParcel, MissingTensors):
        open_parcel(parcel)


@FEW
@given(NESTED)
def test_descriptions(raw):
    pytest.importorskip("flwr")
    from equipoise.hospitals.descriptions import read_description

    _refused_or_taken(lambda: read_description("A", raw))


@FEW
@given(facts=NESTED, measures=NESTED, kept=NESTED, action=some.sampled_from(["facts", "measures", "kept", "all"]))
def test_what_a_reply_notes(facts, measures, kept, action):
    pytest.importorskip("flwr")
    from equipoise.hospitals.parcels import UnreadableParcel
    from equipoise.hospitals.replies import read_noted
    from equipoise.tasks.classification import Classification

    good: dict[str, Any] = {"facts": {}, "measures": {}, "kept": False}
    odd = {"facts": facts, "measures": measures, "kept": kept}
    header = odd if action == "all" else {**good, action: odd[action]}
    with suppress(UnreadableParcel):
        read_noted(header, {"global.valid"}, Classification(("a", "b")), {"valid": [3, 4]})


@pytest.fixture(scope="module")
def office(tmp_path_factory) -> Any:
    pytest.importorskip("flwr")
    from equipoise.hospitals.office import Office
    from equipoise.hospitals.policy import policy_for
    from equipoise.methods import get_method

    config = tiny_config("fedavg")
    policy = policy_for(get_method("fedavg").client_class(config))
    return Office("site 1", tiny_federation(config), tmp_path_factory.mktemp("office"), policy)


@FEW
@given(header=NESTED, action=some.sampled_from(["train", "evaluate", "describe", "publish", "survey"]), entries=NESTED)
def test_an_office_answers_anything_in_words(office, header, action, entries):
    from equipoise.hospitals.parcels import Parcel

    fields = header if isinstance(header, dict) else {"run": header}
    text = json.dumps({**fields, "action": action, "entries": entries, "plain": {}, "protocol": 3})
    told = office.answer(Parcel(text)).header
    assert "error" in told or told.get("lacks") or "description" in told
