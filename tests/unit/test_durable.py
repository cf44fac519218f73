"""Writes are atomic, leave no temporary files, and are private on request."""

import errno
import os
import stat
from pathlib import Path

import pytest

from fedensemble import durable
from fedensemble.errors import StoreError

LEFT = ".file.4711-0a1b2c3d.part"


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", [LEFT, ".file.4711.part", ".file.PID.part", ".file.1.part"])
def test_leftovers_of_dead_processes_are_deleted_for_any_process_id(
    tmp_path: Path, name: str
) -> None:
    # Insert the process id here, because test names must be the same in all workers.
    (tmp_path / name.replace("PID", str(os.getpid()))).write_bytes(b"half")
    for other in (".other.1.part", "file.part", ".file.part", ".file.x.part", "file"):
        (tmp_path / other).write_bytes(b"")
    durable.write_bytes(tmp_path / "file", b"new")
    assert sorted(os.listdir(tmp_path)) == sorted(
        [".other.1.part", "file.part", ".file.part", ".file.x.part", "file"]
    )
    durable.clean_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["file.part", ".file.part", ".file.x.part", "file"]
    )


def test_a_file_that_is_being_written_is_not_a_leftover(tmp_path: Path) -> None:
    def pieces():
        yield b"first, "
        durable.clean_leftovers(tmp_path)
        durable.write_bytes(tmp_path / "file", b"of another writer")
        yield b"second"

    durable.write_pieces(tmp_path / "file", pieces())
    assert (tmp_path / "file").read_bytes() == b"first, second"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_of_another_process_is_kept_while_that_process_lives(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)

        def pieces():
            yield b"half"
            os.read(reader, 1)  # until the parent closes the pipe
            os._exit(0)

        durable.write_pieces(tmp_path / "file", pieces())
    os.close(reader)
    while not any(path.stat().st_size for path in tmp_path.iterdir()):
        pass
    durable.clean_leftovers(tmp_path)
    assert len(os.listdir(tmp_path)) == 1
    os.close(writer)
    os.waitpid(child, 0)
    durable.clean_leftovers(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_file_deleted_before_it_was_locked_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Racing(durable.Disk):
        tries = 0

        def create(self, path, mode=0o666):
            descriptor = super().create(path, mode)
            self.tries += 1
            if self.tries == 1:
                durable.clean_leftovers(tmp_path)
            return descriptor

    disk = Racing()
    monkeypatch.setattr(durable, "disk", disk)
    durable.write_bytes(tmp_path / "file", b"new")
    assert disk.tries == 2 and (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.usefixtures("no_umask")
def test_private_files_and_folders(tmp_path: Path) -> None:
    durable.write_bytes(tmp_path / "a" / "b" / "file", b"", private=True)
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/file")] == [0o700, 0o700, 0o600]
    durable.write_bytes(tmp_path / "c" / "file", b"")
    assert [mode(tmp_path / name) for name in ("c", "c/file")] == [0o777, 0o666]
    durable.make_private(tmp_path / "c")
    assert mode(tmp_path / "c") == 0o700


def test_steps_of_a_write_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    class Noting(durable.Disk):
        def __getattribute__(self, name):
            steps.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(durable, "disk", Noting())
    durable.write_bytes(tmp_path / "folder" / "file", b"new")
    assert steps == [
        "make_folder",
        "sync_folder",
        "create",
        "write",
        "sync",
        "rename",
        "sync_folder",
    ]


def test_a_folder_that_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    durable.write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_a_failed_deletion_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreError, match=r"Could not delete .*file: no permission"):
        durable.remove(tmp_path / "file")


def test_files_of_a_group_are_synced_once_and_together(tmp_path: Path, monkeypatch) -> None:
    synced: list[str] = []

    class Counting(durable.Disk):
        def sync(self, descriptor: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{descriptor}").rpartition("/")[2])

        def sync_folder(self, path: Path) -> None:
            synced.append(f"{path.name}/")

    monkeypatch.setattr(durable, "disk", Counting())
    monkeypatch.setattr(durable, "_SYNCS_AT_ONCE", 1)
    folder = tmp_path / "new"
    with durable.sync_later():
        for name in ("b", "a", "b", "gone"):
            durable.write_bytes(folder / name, name.encode())
        durable.remove(folder / "gone")
        assert synced == []
        durable.sync_now()
        # Parents sort before what is in them.
        assert synced == ["a", "b", f"{tmp_path.name}/", "new/"]
        synced.clear()
        durable.write_bytes(folder / "c", b"c")
    assert synced == ["c", "new/"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "a": b"a",
        "b": b"b",
        "c": b"c",
    }
    durable.write_bytes(folder / "d", b"d")  # outside, at once
    assert len(synced) == 4
    with pytest.raises(RuntimeError), durable.sync_later(), durable.sync_later():
        pass


def test_a_group_that_cannot_be_synced_is_an_error(tmp_path: Path, monkeypatch) -> None:
    class Full(durable.Disk):
        def sync(self, descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(durable, "disk", Full())
    with pytest.raises(StoreError, match="the disk is full"), durable.sync_later():
        durable.write_bytes(tmp_path / "a", b"a")
