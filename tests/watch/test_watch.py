"""The page that follows: it tells what logs tell, goes on after restarts, and lets nobody in without its token."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from browsing import opened
from equipoise.cli.app import app
from equipoise.contract.protocol import Payload
from equipoise.core.errors import UserError
from equipoise.hospitals.ledger import LEDGER, Ledger
from equipoise.hospitals.parcels import Parcel, prepare, seal
from equipoise.watch.following import RunFollowed, SiteFollowed, StudyFollowed, follow
from equipoise.watch.tail import Tail

TOKEN = "a-token-of-the-test"


def line(event: str, **fields: Any) -> str:
    return json.dumps({"event": event, **fields}) + "\n"


START = line(
    "start",
    run="demo",
    method="fedavg",
    classes=["a", "b"],
    config={"train": {"rounds": 5}},
    sites=[
        {"name": "Vienna", "train": [5, 4]},
        {"name": "<b>Graz", "train": [3, 2]},
        {"name": "test", "train": [0, 0]},
    ],
    warnings=["Vienna has no image of b"],
)


def round_lines(number: int, missing: str = "", score: float = 0.5) -> str:
    sites = {
        name: {"loss": 1 / number, "seconds": 2.0, "examples": 9, "sent": 1000, "received": 500}
        for name in ("Vienna", "<b>Graz")
        if name != missing
    }
    lost = {missing: "its update contains NaN"} if missing else {}
    scored = {"part": "valid", "view": "global", "site": "Vienna", "metrics": {"balanced_accuracy": score}}
    return line("round", round=number, seconds=4.0, sites=sites, missing=lost) + line(
        "evaluation", round=number, **scored
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "events.jsonl").write_text(START + round_lines(1) + round_lines(2, "<b>Graz"))
    return folder


def facts(page: dict[str, Any]) -> dict[str, str]:
    return {title: value for title, value, _ in page["facts"]}


# ---- logs that grow, are cut back, come again ------------------------------------------------------------------------


def test_a_log_is_read_on_and_an_unfinished_line_waits(tmp_path: Path):
    log, forgotten = tmp_path / "log", []
    tail = Tail(log, lambda: forgotten.append(True))
    assert tail.lines() == []
    log.write_text('{"a": 1}\n{"a": 2')
    assert tail.lines() == [{"a": 1}] and tail.lines() == []
    log.write_text('{"a": 1}\n{"a": 2}\n')
    assert tail.lines() == [{"a": 2}] and not forgotten


@pytest.mark.parametrize("after", ['{"b": 1}\n', '{"b": 1}\n{"b": 2}\n{"b": 3}\n'])
def test_a_log_that_was_begun_anew_is_read_from_its_start_shorter_or_longer(tmp_path: Path, after: str):
    log, forgotten = tmp_path / "log", []
    log.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(log, lambda: forgotten.append(True))
    tail.lines()
    log.write_text(after)
    assert tail.lines() == [json.loads(text) for text in after.splitlines()] and forgotten


def test_a_log_that_was_cut_back_to_a_checkpoint_is_the_new_truth(run: Path):
    followed, log = RunFollowed(run), run / "events.jsonl"
    assert facts(followed.page())["Round"] == "2 of 5"
    log.write_text(START + round_lines(1) + line("resumed", round=1))
    page = followed.page()
    assert facts(page)["Round"] == "1 of 5" and "Resumed 1 time." in page["status"]
    assert page["tables"]["left-out"]["rows"] == []
    log.unlink()
    assert followed.page()["status"] == "Waiting for the run to begin."


# ---- what the page says ----------------------------------------------------------------------------------------------


def test_a_run_tells_rounds_time_left_traffic_warnings_and_who_did_not_answer_and_why(run: Path):
    page = RunFollowed(run).page()
    told = facts(page)
    assert (told["Round"], told["Time left"], told["Sites that answered"]) == ("2 of 5", "12.0 s", "1 of 2")
    assert (told["Traffic"], told["Balanced accuracy"]) == ("4.50 kB", "50.00 %")
    assert page["status"] == "Running: round 2 of 5 is done; about 12.0 s left."
    rows = {row[0]: row[1] for row in page["tables"]["sites"]["rows"]}
    assert rows == {"Vienna": "answered", "<b>Graz": "left out: its update contains NaN"}
    assert page["tables"]["left-out"]["rows"] == [["<b>Graz", "2", "its update contains NaN"]]
    assert page["warnings"] == ["Vienna has no image of b"]
    (panel,) = page["figures"]["scores-global"]["pages"][0]["panels"]
    assert panel["data"][0]["x"] == [1, 2] and panel["data"][0]["y"] == [50.0, 50.0]


def test_between_hospitals_the_replies_of_the_round_in_progress_are_told(run: Path):
    (run / "consortium.json").write_text("{}")
    (run / "journal").mkdir()
    (run / "journal" / "00003-0-000-Vienna-abc.json").write_text("{}")
    page = RunFollowed(run).page()
    assert page["kicker"] == "Federation"
    assert page["tables"]["sites"]["rows"][0][1] == "has answered in round 3"


def test_a_study_tells_its_runs_and_reads_only_logs_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, rounds in (("fedavg-seed1", 5), ("prr-seed1", 2)):
        folder = tmp_path / "study" / "runs" / name
        folder.mkdir(parents=True)
        text = START + "".join(round_lines(number, score=0.1 * number) for number in range(1, rounds + 1))
        (folder / "events.jsonl").write_text(text + (line("end", seconds=9.0) if rounds == 5 else ""))
    followed = follow(tmp_path / "study")
    assert isinstance(followed, StudyFollowed)
    page = followed.page()
    assert facts(page)["Runs finished"] == "1" and facts(page)["Running"] == "1"
    assert [row[:4] for row in page["tables"]["runs"]["rows"]] == [
        ["fedavg-seed1", "finished", "5 of 5", "50.00"],
        ["prr-seed1", "running", "2 of 5", "20.00"],
    ]
    read = []
    monkeypatch.setattr(Tail, "lines", lambda tail: read.append(tail.path.parent.name) or [])
    with (tmp_path / "study/runs/prr-seed1/events.jsonl").open("a") as log:
        log.write(round_lines(3))
    followed.page()
    assert read == ["prr-seed1"]


def test_a_site_tells_what_came_in_what_left_and_what_was_refused(tmp_path: Path):
    ledger = Ledger(tmp_path)
    payload: Payload = {"examples": 3}
    question = seal(prepare(payload), run="r1", round=2, action="train")
    ledger.note(question, seal(prepare(payload), measures={"x": 1}))
    ledger.note(question, seal(prepare({}), error="the policy allows no 'spectrum' to leave"))
    ledger.note(Parcel("no header"), seal(prepare({}), error="the message cannot be read"))
    followed = follow(tmp_path)
    assert isinstance(followed, SiteFollowed)
    page = followed.page()
    assert {**facts(page)} == {"Came in": "3", "Left": "1", "Refused": "2"}
    ways = [(row[1], row[4], row[5], row[6]) for row in reversed(page["tables"]["exchange"]["rows"])]
    assert ways[:4] == [
        ("Came in", "train", "examples", ""),
        ("Left", "train", "examples, measures", ""),
        ("Came in", "train", "examples", ""),
        ("Refused", "train", "", "the policy allows no 'spectrum' to leave"),
    ]


def test_a_sites_own_file_leads_to_its_state_and_a_folder_of_runs_to_the_newest(run: Path, tmp_path: Path):
    Ledger(tmp_path / "here")
    (tmp_path / "site.toml").write_text('name = "A"\nsuperlink = "127.0.0.1:1"\nstate = "here"\n')
    assert isinstance(follow(tmp_path / "site.toml"), SiteFollowed)
    newest = follow(tmp_path)
    assert isinstance(newest, RunFollowed) and newest.folder == run


def test_a_folder_of_nothing_is_refused_with_what_to_name(tmp_path: Path):
    with pytest.raises(UserError, match="holds no run, study or site to watch"):
        follow(tmp_path)
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "absent")])
    assert isinstance(done.exception, UserError) and "is not there" in str(done.exception)


# ---- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a running page, without its token."""
    uvicorn = pytest.importorskip("uvicorn", reason="needs the extra 'watch'")
    pytest.importorskip("sse_starlette", reason="needs the extra 'watch'")
    from equipoise.watch.serving import make_app

    settings = uvicorn.Config(make_app(follow(folder), TOKEN, 0.05), port=0, log_level="error")
    settings.timeout_graceful_shutdown = 1
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()


def test_an_interrupt_ends_the_page_without_a_word(run: Path):
    pytest.importorskip("uvicorn", reason="needs the extra 'watch'")
    pytest.importorskip("sse_starlette", reason="needs the extra 'watch'")
    command = [sys.executable, "-m", "equipoise", "watch", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as page:
        assert page.stdout is not None
        told = re.search(r"open http://127.0.0.1:(\d+)/", page.stdout.readline())
        assert told is not None
        while socket.socket().connect_ex(("127.0.0.1", int(told[1]))):
            time.sleep(0.01)
        page.send_signal(signal.SIGINT)
        out, err = page.communicate(timeout=60)
    assert (out, err, page.returncode) == ("", "", 0)


def test_only_who_has_the_token_and_the_right_name_gets_in_and_nothing_can_be_written(run: Path):
    httpx = pytest.importorskip("httpx")
    with served(run) as address, httpx.Client(trust_env=False) as client:
        assert client.get(address).status_code == client.get(address + "events").status_code == 403
        assert client.get(address + "?token=wrong").status_code == 403
        named = client.get(address + f"?token={TOKEN}", headers={"Host": "elsewhere.example"})
        assert named.status_code == 400, "a name of another site's that leads here"
        entered = client.get(address + f"?token={TOKEN}")
        assert entered.status_code == 303 and TOKEN not in entered.headers["location"]
        assert "httponly" in entered.headers["set-cookie"].lower()
        page = client.get(address)
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
        assert client.post(address).status_code == 405


def test_the_page_follows_in_the_browser_through_a_restart_and_keeps_the_readers_order(run: Path, browser: Any):
    with served(run) as address, opened(browser, f"{address}?token={TOKEN}", 400) as page:
        page.wait_for_selector("#figures .main-svg")
        assert TOKEN not in page.url and page.locator("#title").inner_text() == "demo"
        assert page.locator("#sites tbody th").all_inner_texts() == ["Vienna", "<b>Graz"]
        page.locator("#sites th", has_text="Training images").locator("button").click()
        page.locator("#sites th", has_text="Training images").locator("button").click()
        with (run / "events.jsonl").open("a") as log:
            log.write(round_lines(3) + line("warning", text="round 4 is repeated"))
        page.wait_for_selector("#status:has-text('round 3 of 5')")
        assert page.locator("#sites tbody th").all_inner_texts() == ["<b>Graz", "Vienna"], "the reader's order stays"
        assert "round 4 is repeated" in page.locator("#texts").inner_text()
        (run / "events.jsonl").write_text(START + round_lines(1) + line("resumed", round=1))
        page.wait_for_selector("#status:has-text('round 1 of 5')")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_sites_page_shows_messages_as_they_come(tmp_path: Path, browser: Any):
    ledger = Ledger(tmp_path)
    with served(tmp_path) as address, opened(browser, f"{address}?token={TOKEN}") as page:
        question = seal(prepare({"examples": 3}), run="r1", round=2, action="train")
        ledger.note(question, seal(prepare({}), error="not allowed to leave"))
        page.wait_for_selector("#exchange td:has-text('not allowed to leave')")
        assert (tmp_path / LEDGER).read_text().count("\n") == 2
