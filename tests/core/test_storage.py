"""Files are whole or not there, whoever fails or is killed while writing them; a lock keeps others out."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from equipoise.core.storage import locked, replacing, write_text

TEXTS = [letter * 100_000 for letter in "abc"]


def python(code: str, *arguments: Path | str) -> subprocess.Popen[str]:
    """Another process, which has this module at hand and can be talked to."""
    code = f"import os, sys\nfrom pathlib import Path\nfrom equipoise.core.storage import *\n{code}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), ValueError(), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [["file"], []])
def test_a_failure_of_any_kind_leaves_the_old_content_and_no_draft(tmp_path, before, problem):
    path = tmp_path / "file"
    for name in before:
        (tmp_path / name).write_text("old")
    with pytest.raises(type(problem)) as caught, replacing(path) as draft:
        draft.write_text("half")
        raise problem
    assert caught.value is problem and names(tmp_path) == before
    assert all(path.read_text() == "old" for _ in before)


def test_what_cannot_be_renamed_leaves_no_draft(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError):
        write_text(tmp_path / "file", "text")
    assert names(tmp_path) == ["file"]


def test_the_file_is_as_before_until_the_block_ends_and_then_readable_as_any_other(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    mode = path.stat().st_mode
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old" and draft.parent == tmp_path
    assert path.read_text() == "new" and names(tmp_path) == ["file"]
    assert path.stat().st_mode == mode


def test_what_a_library_puts_in_place_of_the_draft_is_on_the_disk_before_it_gets_the_name(tmp_path, monkeypatch):
    steps: list[str | int] = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda number: steps.append(os.fstat(number).st_ino))
    monkeypatch.setattr(os, "replace", lambda *paths: (steps.append("rename"), replace(*paths)))
    with replacing(tmp_path / "file") as draft:
        (tmp_path / "library").write_text("content")
        (tmp_path / "library").rename(draft)
    assert steps == [(tmp_path / "file").stat().st_ino, "rename"]
    assert (tmp_path / "file").read_text() == "content"


def test_files_of_others_beside_it_are_left_alone(tmp_path):
    for name in ("file.tmp", "file.part", "other"):
        (tmp_path / name).write_text("mine")
    write_text(tmp_path / "file", "text")
    assert names(tmp_path) == ["file", "file.part", "file.tmp", "other"]
    assert (tmp_path / "file.tmp").read_text() == "mine"


def test_text_is_utf8_and_missing_folders_are_made(tmp_path):
    write_text(tmp_path / "deep" / "er" / "file", "größer")
    assert (tmp_path / "deep" / "er" / "file").read_bytes() == "größer".encode()


def test_writers_of_one_file_have_drafts_of_their_own_and_the_last_to_end_prevails(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second" and first.read_text() == "first"
    assert path.read_text() == "first" and names(tmp_path) == ["file"]


def test_processes_that_write_one_file_at_once_never_show_a_mixture_or_a_part(tmp_path):
    path = tmp_path / "file"
    write_text(path, TEXTS[0])
    code = "for _ in range(30): write_text(Path(sys.argv[1]), sys.argv[2] * 100_000)"
    writers = [python(code, path, text[0]) for text in TEXTS]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        seen.add(path.read_text())
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert seen <= set(TEXTS) and names(tmp_path) == ["file"]


def test_a_killed_writer_leaves_the_old_content_and_a_draft_that_is_in_nobodys_way(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    code = "with replacing(Path(sys.argv[1])) as draft:\n draft.write_text('half')\n os._exit(9)"
    assert python(code, path).wait() == 9
    assert path.read_text() == "old"
    (draft,) = set(tmp_path.iterdir()) - {path}
    # This is what tidies the folders of runs, and what git ignores.
    assert draft.name.startswith("file.json") and draft.suffix == ".tmp"
    write_text(path, "new")
    assert path.read_text() == "new"


def test_a_lock_that_another_process_holds_is_refused_until_that_process_is_killed(tmp_path):
    code = "with locked(Path(sys.argv[1]), wait=False):\n print('held', flush=True)\n sys.stdin.read()"
    with python(code, tmp_path / "lock") as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), locked(tmp_path / "lock", wait=False):
            pytest.fail("both hold it")
        holder.kill()
    with locked(tmp_path / "lock", wait=False):
        pass


def test_who_waits_for_a_lock_gets_it_when_the_other_lets_go(tmp_path):
    steps = []

    def wait() -> None:
        with locked(tmp_path / "lock", wait=True):
            steps.append("second")

    with locked(tmp_path / "lock", wait=False):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        steps.append("first")
    waiting.join(10)
    assert steps == ["first", "second"]


def test_a_block_that_fails_lets_go_of_its_lock(tmp_path):
    with pytest.raises(ValueError), locked(tmp_path / "lock", wait=False):
        raise ValueError
    with locked(tmp_path / "lock", wait=False):
        pass
