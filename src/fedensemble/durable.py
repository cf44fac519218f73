"""Atomic and durable file writes: a kill or a power cut leaves the old content or the new one.

A file is written under a temporary name in the same folder, synced, and renamed; then the folder is
synced. All files of a run are written by the functions of this module, which change the disk only
by the methods of a `Disk`. Tests substitute another `Disk`, which stops a run at any step or loses
everything that was not yet synced.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import StoreError

# None on Windows, which has no fcntl. No lock is needed there, because an open file cannot be
# deleted.
fcntl: Any = import_module("fcntl") if os.name == "posix" else None
# Temporary names, see `write_pieces`; those without a hexadecimal suffix are of older versions.
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.\d+(-[0-9a-f]{8})?\.part")
# Files and folders whose sync is put off, see `sync_later`; None if everything is synced at once.
_LATER: ContextVar[tuple[set[Path], set[Path]] | None] = ContextVar("later", default=None)
_SYNCS_AT_ONCE = 16
# Errors of file systems that cannot sync a folder.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class Disk:
    """All operations that change something on disk; their effects are durable only after a sync."""

    def make_folder(self, path: Path, mode: int = 0o777) -> None:
        """Creates one folder; its parent must exist."""
        path.mkdir(mode=mode, exist_ok=True)

    def create(self, path: Path, mode: int = 0o666) -> int:
        """A file descriptor for writing a new file."""
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode
        )

    def open_end(self, path: Path) -> int:
        """A file descriptor for appending to a file, which is created if it is missing."""
        return os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666
        )

    def write(self, descriptor: int, content: bytes | memoryview) -> None:
        """Writes all of the content."""
        remaining = memoryview(content).cast("B")
        while len(remaining):  # os.write may write only a part
            remaining = remaining[os.write(descriptor, remaining) :]

    def sync(self, descriptor: int) -> None:
        """Makes the content of a file durable."""
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Makes the folder's entries durable: created, renamed and deleted files."""
        if not hasattr(os, "O_DIRECTORY"):  # Windows cannot sync folders
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
        """Renames a file; an existing target is replaced atomically."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Deletes a file if it exists."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Deletes an empty folder."""
        path.rmdir()


disk = Disk()


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Writes a file atomically and durably: readers see the old or the new content, never a part.

    Args:
        private: only this user may read the file and the folders that are created for it.
    """
    write_pieces(path, [content], private=private)


def write_pieces(
    path: Path, pieces: Iterable[bytes | memoryview], *, private: bool = False
) -> None:
    """As `write_bytes`, piece by piece, so that the content need not fit into memory.

    The file is synced before the rename, and the folder after it. Without the first sync, a power
    cut can leave an empty file under the final name; without the second, it can undo the rename.
    """
    # In the same folder, because a rename is atomic only within a file system; unique, because
    # several processes may write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        make_folders(path.parent, private=private)
        clean_leftovers(path.parent, path.name)
        descriptor = _create_locked(temporary, 0o600 if private else 0o666)
        try:
            for piece in pieces:
                disk.write(descriptor, piece)
            _sync(descriptor, path)
            # Rename while the lock is held, or another process could delete the file as a leftover
            # before the rename. Windows cannot rename an open file.
            if fcntl is not None:
                disk.rename(temporary, path)
        finally:
            os.close(descriptor)
        if fcntl is None:
            disk.rename(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        # Deleting may fail as well, for example on a read-only file system: report the first error.
        with suppress(OSError):
            disk.remove(temporary)
        raise StoreError(f"Could not write {path}: {describe_os_error(error)}") from None


@contextmanager
def sync_later() -> Iterator[None]:
    """Syncs what is written in this context at its end, or at the next `sync_now`, all together.

    A sync waits for the disk. A few files of many runs, one after another, wait longer than their
    training takes. Many syncs at once share the wait: file systems commit them in groups.

    After a power cut, a file that was written here may be missing, empty or incomplete. After a
    kill it is complete. So use this for files that can be recreated, and check them after a
    restart.
    """
    if _LATER.get() is not None:
        raise RuntimeError("sync_later() is not nested")
    token = _LATER.set((set(), set()))
    try:
        yield
    finally:
        try:
            sync_now()
        finally:
            _LATER.reset(token)


def sync_now() -> None:
    """Makes everything durable whose sync `sync_later` has put off."""
    if (later := _LATER.get()) is None:
        return
    try:
        # Files before the names that lead to them. Those that are gone were deleted or replaced.
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
            list(pool.map(_sync_path, sorted(path for path in later[0] if path.is_file())))
            list(pool.map(disk.sync_folder, sorted(path for path in later[1] if path.is_dir())))
    except OSError as error:
        raise StoreError(f"Could not write {error.filename}: {describe_os_error(error)}") from None
    for paths in later:
        paths.clear()


def _sync_path(path: Path) -> None:
    descriptor = disk.open_end(path)
    try:
        disk.sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int, path: Path) -> None:
    """Makes the content of an open file durable, now or later.

    Args:
        path: its final name.
    """
    if (later := _LATER.get()) is None:
        disk.sync(descriptor)
    else:
        later[0].add(path)


def _sync_folder(path: Path) -> None:
    """Makes a folder's entries durable, now or later."""
    if (later := _LATER.get()) is None:
        disk.sync_folder(path)
    else:
        later[1].add(path)


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file with indentation; the same content gives the same bytes."""
    write_bytes(path, json_bytes(content))


def json_bytes(content: Any) -> bytes:
    """The bytes that `write_json` writes."""
    return (json.dumps(content, indent=2) + "\n").encode()


def make_folders(path: Path, *, private: bool = False) -> None:
    """Creates a folder and its missing parents durably."""
    missing = []
    while not path.is_dir():
        if path.exists() or path.is_symlink():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        disk.make_folder(folder, 0o700 if private else 0o777)
        _sync_folder(folder.parent)


def make_private(folder: Path) -> None:
    """Removes the access of other users to an existing folder, if this user may change it."""
    with suppress(OSError):  # a folder that another user owns
        if folder.stat().st_mode & 0o077:
            folder.chmod(0o700)


@contextmanager
def appending(path: Path) -> Iterator[int]:
    """A descriptor for appending with `disk.write`; the data are durable only after `sync_file`."""
    try:
        descriptor = disk.open_end(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"Could not write {path}: {describe_os_error(error)}") from None


def sync_file(path: Path) -> None:
    """Makes the data that were appended to a file durable, and its entry in the folder."""
    with appending(path) as descriptor:
        _sync(descriptor, path)
        _sync_folder(path.parent)


def remove(*paths: Path) -> None:
    """Deletes those of the files that exist, durably; all of them must be in one folder."""
    existing = [path for path in paths if path.exists()]
    try:
        for path in existing:
            disk.remove(path)
        if existing:
            _sync_folder(existing[0].parent)
    except OSError as error:
        raise StoreError(f"Could not delete {existing[0]}: {describe_os_error(error)}") from None


def remove_tree(path: Path) -> None:
    """Deletes a file, or a folder with everything in it; links are deleted and never followed."""
    try:
        if path.is_dir() and not path.is_symlink():
            for inner in list(path.iterdir()):
                remove_tree(inner)
            disk.remove_folder(path)
        else:
            disk.remove(path)
        _sync_folder(path.parent)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"Could not delete {path}: {describe_os_error(error)}") from None


def is_leftover(name: str, of: str | None = None) -> bool:
    """True for temporary names, which `write_pieces` uses until a file is complete.

    Args:
        of: the final name; None for any.

    >>> names = (".summary.json.4711-0a1b2c3d.part", "summary.json", "my.part")
    >>> [is_leftover(name) for name in names]
    [True, False, False]
    """
    match = _LEFTOVER.fullmatch(name)
    return match is not None and of in (None, match["name"])


def clean_leftovers(folder: Path, of: str | None = None) -> None:
    """Deletes unfinished files of killed processes; files that are being written are kept.

    A writer holds a lock on its file, which the operating system releases when the process ends for
    any reason. The process id in the name would not do: another process may have it by now, or the
    writer may be on another machine.

    Args:
        of: only those of this final name; None for all.
    """
    with os.scandir(folder) as entries:
        leftovers = [Path(entry.path) for entry in entries if is_leftover(entry.name, of)]
    for path in leftovers:
        with suppress(OSError):  # already deleted, open (Windows), or without permission
            if fcntl is None:
                disk.remove(path)
                continue
            descriptor = os.open(path, os.O_RDWR)
            try:
                # Raises if a writer holds the lock.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                disk.remove(path)
            finally:
                os.close(descriptor)


def _create_locked(path: Path, mode: int) -> int:
    """A descriptor of a new, locked file; the lock shows other processes that it is no leftover.

    Another process may delete the file after it is created and before it is locked. Its link count
    is then 0, and it is created again.
    """
    for _ in range(10):
        descriptor = disk.create(path, mode)
        try:
            if fcntl is None:
                return descriptor
            with suppress(OSError):  # the file system does not support locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.EBUSY, "another process keeps deleting it")


def describe_os_error(error: OSError) -> str:
    """The cause of a file error and what to do about it, as the end of a sentence."""
    permission = "no permission. Choose another folder, or change its permissions."
    not_a_folder = "a part of its path is a file, not a folder."
    free_space = "Free some space and run the same command again; finished work is kept."
    messages = {
        errno.ENOSPC: f"the disk is full. {free_space}",
        errno.EDQUOT: f"the disk quota is used up. {free_space}",
        errno.EACCES: permission,
        errno.EPERM: permission,
        errno.EROFS: "the file system is read-only. Choose another folder.",
        errno.ENOTDIR: not_a_folder,
        errno.EEXIST: not_a_folder,
    }
    return messages.get(error.errno or 0, f"{error.strerror or error}.")
