"""Lock of a run's folder: only one process at a time may train in it."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from ... import durable
from ...errors import StoreError

LOCK = ".lock"


class FolderLock:
    """An exclusive lock of a folder, held by one process.

    The operating system locks a file, not a path. If the folder is deleted or moved while a process
    trains in it, another process can create and lock a folder with the same name, and both would
    write into it. `check` detects this: it compares the identity of the lock file (device and
    inode) with the one that was locked.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, path / LOCK
        self._lock = FileLock(str(self._file))
        self._identity: tuple[int, int] | None = None

    def acquire(self) -> None:
        """Creates and locks the folder, and deletes temporary files of killed processes."""
        try:
            durable.make_folders(self.path)
            self._lock.acquire(timeout=0)
            self._identity = _identity(self._file)
            for folder in (self.path, self.path / "checkpoint"):
                if folder.is_dir():
                    durable.clean_leftovers(folder)
        except Timeout:
            raise StoreError(
                f"Another process trains in {self.path}; wait until it ends, or choose another "
                "folder (--out or --runs)."
            ) from None
        except OSError as error:
            self.release()
            raise StoreError(
                f"Cannot write to {self.path}: {durable.describe_os_error(error)} "
                "On the command line, --out and --runs set the folder."
            ) from None

    def release(self) -> None:
        """Unlocks the folder."""
        self._lock.release()
        self._identity = None

    def delete(self) -> None:
        """Unlocks the folder and deletes the lock file."""
        # The file is deleted while it is locked, so that no other process can lock it in between.
        # Windows cannot delete an open file.
        if os.name == "posix":
            self._file.unlink(missing_ok=True)
        self.release()
        self._file.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises if the path no longer leads to the locked folder; call it before each write."""
        if self._identity is None:
            return
        try:
            current = _identity(self._file)
        except OSError:
            current = None
        if current != self._identity:
            what = "deleted or moved" if current is None else "replaced by another one"
            raise StoreError(
                f"{self.path} was {what} while this process trained in it; nothing more is written "
                "to it. Start the command again when no other process uses the folder, or choose "
                "another --out or --runs."
            )


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
