"""Checkpoints: round trips, damaged files, and writes that fail."""

import errno
import json
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from fedensemble import durable
from fedensemble.checkpoint_file import read_checkpoint, write_bytes, write_checkpoint, write_json
from fedensemble.errors import StoreError

TENSORS = {
    "modes/theta": torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3),
    "schedule/seed": torch.tensor(7),
    "buffers": torch.empty(2, 0),
    "float": torch.tensor([1.5, float("nan")]),
    "flags": torch.tensor([True, False]),
}
FACTS = {"round": 3, "settings": {"name": "größer", "none": None, "list": [1, 2.5]}}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "deep" / "er" / "file.safetensors"
    write_checkpoint(path, TENSORS, FACTS)
    return path


def header_end(content):
    return 8 + struct.unpack("<Q", content[:8])[0]


def test_round_trip(path):
    tensors, facts = read_checkpoint(path)
    assert facts == FACTS
    assert set(tensors) == set(TENSORS)
    for name, value in TENSORS.items():
        assert tensors[name].dtype == value.dtype
        torch.testing.assert_close(tensors[name], value, rtol=0, atol=0, equal_nan=True)


def test_same_content_same_bytes(path, tmp_path):
    other = tmp_path / "other"
    write_checkpoint(other, dict(reversed(TENSORS.items())), dict(reversed(FACTS.items())))
    assert other.read_bytes() == path.read_bytes()


def test_views_and_transposed_tensors_are_stored_by_value(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    write_checkpoint(tmp_path / "a", {"t": whole.T, "part": whole[1:, ::2], "whole": whole}, {})
    tensors, _ = read_checkpoint(tmp_path / "a")
    assert torch.equal(tensors["t"], whole.T)
    assert torch.equal(tensors["part"], whole[1:, ::2])


def test_truncated_anywhere(path):
    content = path.read_bytes()
    end = header_end(content)
    places = {
        0,
        1,
        7,
        8,
        9,
        end // 2,
        end - 1,
        end,
        end + 1,
        (end + len(content)) // 2,
        len(content) - 1,
    }
    for place in sorted(places):
        path.write_bytes(content[:place])
        with pytest.raises(StoreError, match=r"file\.safetensors"):
            read_checkpoint(path)


def test_longer_than_written(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(StoreError):
        read_checkpoint(path)


def test_a_byte_changed_anywhere(path):
    content = path.read_bytes()
    for place in range(len(content)):
        for flip in (0x01, 0x80):
            changed = bytearray(content)
            changed[place] ^= flip
            path.write_bytes(bytes(changed))
            with pytest.raises(StoreError):
                read_checkpoint(path)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(StoreError, match="no checkpoint at"):
        read_checkpoint(tmp_path / "nothing")
    with pytest.raises(StoreError, match="no checkpoint at"):
        read_checkpoint(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "foreign")
    with pytest.raises(StoreError, match="not one of fedensemble's"):
        read_checkpoint(tmp_path / "foreign")
    (tmp_path / "text").write_text("hello, this is no checkpoint at all")
    with pytest.raises(StoreError, match="damaged or no checkpoint"):
        read_checkpoint(tmp_path / "text")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_disk_full_leaves_the_old_content(path, monkeypatch, step):
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(StoreError, match=r"the disk is full\. Free some space"):
        write_checkpoint(path, {"other": torch.ones(3)}, {})
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]
    assert read_checkpoint(path)[1] == FACTS


def test_disk_full_while_writing(path, monkeypatch):
    before = path.read_bytes()

    class Full(durable.Disk):
        def write(self, descriptor, content):
            super().write(descriptor, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "disk", Full())
    with pytest.raises(StoreError, match="the disk is full"):
        write_bytes(path, b"new content")
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_read_only_file_system_is_named(tmp_path, monkeypatch):
    """Deleting the temporary file fails as well; the message reports the first failure."""

    class ReadOnly(durable.Disk):
        def create(self, path, mode=0o666):
            raise OSError(errno.EROFS, "Read-only file system")

        def remove(self, path):
            raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(durable, "disk", ReadOnly())
    with pytest.raises(StoreError, match="the file system is read-only"):
        write_bytes(tmp_path / "file", b"")


def test_facts_that_are_nested_too_deep(tmp_path):
    nested = "[" * 100_000 + "]" * 100_000
    for entry in (
        nested,
        json.dumps({"facts": nested, "sha256": ""}),
        json.dumps({"facts": "[]", "sha256": ""}),
    ):
        save_file({"a": torch.ones(2)}, tmp_path / "file", {"fedensemble": entry})
        with pytest.raises(StoreError, match="is damaged"):
            read_checkpoint(tmp_path / "file")


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is a file, not a folder"):
        write_bytes(tmp_path / "file" / "inside", b"")
    with pytest.raises(StoreError, match="is a file, not a folder"):
        write_bytes(tmp_path / "file" / "deep" / "inside", b"")


def test_json(tmp_path):
    write_json(tmp_path / "a.json", {"b": 1, "a": [1, 2]})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"b": 1, "a": [1, 2]}
    assert text.endswith("}\n")
