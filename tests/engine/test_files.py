"""Payloads on disk: what is read back computes as what was written, a full disk is told, a folder has one owner."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from equipoise.core.errors import FolderBusy
from equipoise.engine import payload_files as files
from equipoise.engine.payload_files import DAMAGE, SpilledPayload, claimed_folder, read_payload, write_payload
from harness import assert_same_bits

ALIGNMENT = 64


def odd_payload() -> dict:
    """Tensors of odd sizes, so that in a file most of them begin at odd addresses."""
    return {"model": {f"w{size}": torch.randn(size) for size in (1, 3, 7, 33)}, "lone": torch.randn(5), "n": 3}


def test_no_damaged_byte_changes_what_is_read_unnoticed(tmp_path):
    path, noticed = tmp_path / "p.safetensors", 0
    write_payload(path, odd_payload())
    before, whole = read_payload(path), path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = read_payload(path)
        except DAMAGE:
            noticed += 1
            continue
        assert found["n"] == 3 and torch.equal(found["lone"], before["lone"])
        assert_same_bits(found["model"], before["model"])
    assert noticed > 0.9 * len(whole)


def test_files_of_versions_without_checksums_are_read(tmp_path):
    save_file({"lone": torch.ones(3)}, tmp_path / "p.safetensors", metadata={"plain": '{"n": 3}'})
    assert read_payload(tmp_path / "p.safetensors")["n"] == 3


def test_tensors_are_read_into_aligned_memory(tmp_path):
    payload = odd_payload()
    write_payload(tmp_path / "p.safetensors", payload)
    spilled = SpilledPayload(tmp_path / "p.safetensors")
    for found in (read_payload(tmp_path / "p.safetensors"), {name: spilled[name] for name in spilled}):
        for name, tensor in {"lone": found["lone"], **dict(found["model"])}.items():
            assert torch.equal(tensor, payload["model"].get(name, payload["lone"]))
            assert tensor.data_ptr() % ALIGNMENT == 0, name


def test_a_full_disk_is_an_error_of_the_system_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(tensors, path: Path, metadata):
        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_payload(tmp_path / "p.safetensors", odd_payload())
    assert caught.value.errno == 28 and caught.value.filename == str(tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_claimed_folder_is_refused_to_others_by_name_until_it_is_let_go(tmp_path):
    with claimed_folder(tmp_path / "run"):
        with pytest.raises(FolderBusy, match=str(tmp_path / "run")), claimed_folder(tmp_path / "run"):
            pytest.fail("both are at work")
        with claimed_folder(tmp_path / "other"):
            pass
    with claimed_folder(tmp_path / "run"):
        pass


def test_what_blocks_inside_a_claimed_folder_is_not_another_process(tmp_path):
    with pytest.raises(BlockingIOError, match="the work's own"), claimed_folder(tmp_path):
        raise BlockingIOError("the work's own")
