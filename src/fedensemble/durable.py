"""Changes to files that survive a kill or a power cut: a file is replaced as a whole or not at all.

All files of a run are written through the functions of this module, and those through the steps of
a `Disk`. Tests put another `Disk` in its place, which stops a run at any step or loses what was not
yet synced.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import StoreError

# Windows has no fcntl, and there a file that is open cannot be deleted: no lock is needed.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.\d+(-[0-9a-f]{8})?\.part")
# file systems that cannot sync a folder
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class Disk:
    """Every step that changes something on disk. None of them is durable before a sync."""

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Makes one folder; its parent must be there."""
        path.mkdir(mode=mode, exist_ok=True)

    def create(self, path: Path, mode: int = 0o666) -> int:
        """A descriptor for writing a new file."""
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode
        )

    def open_end(self, path: Path) -> int:
        """A descriptor for writing at the end of a file, which is made if it is missing."""
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666
        )

    def write(self, descriptor: int, content: bytes | memoryview) -> None:
        """Writes all of the content."""
        rest = memoryview(content).cast("B")
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]

    def sync(self, descriptor: int) -> None:
        """Makes the content of a file durable."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Makes the names in a folder durable: new files, renamed files, removed files."""
        if not hasattr(os, "O_DIRECTORY"):  # Windows
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file the name of another one, whose content is gone."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Deletes a file."""
        path.unlink(missing_ok=True)


disk = Disk()


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Writes a file so that a reader sees the old content or the new, never a part; also across a
    power cut.

    Args:
        private: only this user may read the file and the folders that are made for it.
    """
    write_pieces(path, [content], private=private)


def write_pieces(
    path: Path, pieces: Iterable[bytes | memoryview], *, private: bool = False
) -> None:
    """As `write_bytes`, piece by piece, so that the whole content need not fit into memory.

    The content is synced before the rename and the folder after it. Without the first, a power cut
    can leave an empty file under the final name; without the second, it can take the rename back.
    """
    spare = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        make_folders(path.parent, private=private)
        clean_leftovers(path.parent, path.name)
        descriptor = _create_locked(spare, 0o600 if private else 0o666)
        try:
            for piece in pieces:
                disk.write(descriptor, piece)
            disk.sync(descriptor)
            if fcntl is not None:  # renamed while it is locked: never a leftover to another process
                disk.rename(spare, path)
        finally:
            os.close(descriptor)
        if fcntl is None:
            disk.rename(spare, path)
        disk.sync_folder(path.parent)
    except OSError as error:
        # a read-only file system refuses this, too, and its first error is the one to report
        with suppress(OSError):
            disk.remove(spare)
        raise StoreError(f"Could not write {path}: {reason(error)}") from None


def write_json(path: Path, content: Any) -> None:
    """Writes JSON that reads well and is the same for the same content."""
    write_bytes(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    """What `write_json` writes."""
    return (json.dumps(content, indent=2) + "\n").encode()


def make_folders(path: Path, *, private: bool = False) -> None:
    """Makes a folder and its parents where they are missing, durably."""
    missing = []
    while not path.is_dir():
        if path.exists() or path.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        disk.make_folder(folder, 0o700 if private else 0o777)
        disk.sync_folder(folder.parent)


def make_private(folder: Path) -> None:
    """Lets only this user into a folder that is there; what others own stays as it is."""
    with suppress(OSError):
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)


@contextmanager
def appending(path: Path) -> Iterator[int]:
    """A descriptor for `disk.write` at the end of a file; nothing is durable before `sync_file`."""
    try:
        descriptor = disk.open_end(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"Could not write {path}: {reason(error)}") from None


def sync_file(path: Path) -> None:
    """Makes what was appended to a file durable, and its name."""
    with appending(path) as descriptor:
        disk.sync(descriptor)
        disk.sync_folder(path.parent)


def remove(*paths: Path) -> None:
    """Deletes files of one folder durably, where they are there."""
    there = [path for path in paths if path.exists()]
    try:
        for path in there:
            disk.remove(path)
        if there:
            disk.sync_folder(there[0].parent)
    except OSError as error:
        raise StoreError(f"Could not delete {there[0]}: {reason(error)}") from None


def is_leftover(name: str, of: str | None = None) -> bool:
    """Whether a file name is one of those that `write_pieces` uses until a file is complete.

    Args:
        of: the final name; None for any.

    >>> is_leftover(".summary.json.4711-0a1b2c3d.part"), is_leftover("summary.json"), is_leftover("my.part")
    (True, False, False)
    """
    found = _LEFTOVER.fullmatch(name)
    return found is not None and of in (None, found["name"])


def clean_leftovers(folder: Path, of: str | None = None) -> None:
    """Deletes what killed processes have left half-written in a folder; never a file that a live
    process writes.

    A writer holds a lock on its file, which the operating system releases when the process ends,
    however it ends. Process numbers could not tell: another process may have the number by now, or
    the writer is on another machine.
    """
    with os.scandir(folder) as entries:
        found = [Path(entry.path) for entry in entries if is_leftover(entry.name, of)]
    for path in found:
        with suppress(OSError):  # gone by now, in use (Windows), or not ours to delete
            if fcntl is None:
                disk.remove(path)
                continue
            descriptor = os.open(path, os.O_RDWR)
            try:
                # raises where a writer holds it
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                disk.remove(path)
            finally:
                os.close(descriptor)


def _create_locked(path: Path, mode: int) -> int:
    """A descriptor of a new file that holds its lock, so that nobody takes it for a leftover.

    Another process may delete the file between its creation and the lock; it then has no name, and
    is made again.
    """
    for _ in range(10):
        descriptor = disk.create(path, mode)
        try:
            if fcntl is None:
                return descriptor
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.EBUSY, "another process deletes it again and again")


def reason(error: OSError) -> str:
    """What went wrong with a file and what to do, as the end of a sentence."""
    permission = "no permission. Choose another folder, or change its permissions."
    known = {
        errno.ENOSPC: "the disk is full. Free some space and run the same command again; finished work is kept.",
        errno.EDQUOT: "the disk quota is used up. Free some space and run the same command again; finished work is "
        "kept.",
        errno.EACCES: permission,
        errno.EPERM: permission,
        errno.EROFS: "the file system is read-only. Choose another folder.",
        errno.ENOTDIR: "a part of its path is a file, not a folder.",
        errno.EEXIST: "a part of its path is a file, not a folder.",
    }
    return known.get(error.errno or 0, f"{error.strerror or error}.")
