"""One process at a time trains in a folder: a lock, and the certainty that the folder is still the
locked one.
"""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from .. import durable
from ..errors import StoreError

LOCK = ".lock"


class Claim:
    """A process's hold on a folder.

    The lock belongs to a file, not to the path that leads to it. If the folder is deleted or moved
    while a process trains in it, another process may make and lock a folder of the same name;
    without `check`, both would write into it.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, path / LOCK
        self._lock = FileLock(str(self._file))
        self._identity: tuple[int, int] | None = None

    def take(self) -> None:
        """Makes the folder where it is missing, locks it, and deletes what killed processes left
        half-written.
        """
        try:
            durable.make_folders(self.path)
            self._lock.acquire(timeout=0)
            self._identity = _identity(self._file)
            for folder in (self.path, self.path / "checkpoint"):
                if folder.is_dir():
                    durable.clean_leftovers(folder)
        except Timeout:
            raise StoreError(
                f"Another process trains in {self.path}; wait for it, or use another folder (--out or --runs)."
            ) from None
        except OSError as error:
            self.release()
            raise StoreError(
                f"Cannot write to {self.path}: {durable.reason(error)} The folder is given by --out or --runs."
            ) from None

    def release(self) -> None:
        """Lets others in."""
        self._lock.release()
        self._identity = None

    def check(self) -> None:
        """Raises unless the folder at the path is the one that was locked; to be called before each
        write.
        """
        if self._identity is None:
            return
        try:
            there = _identity(self._file)
        except OSError:
            there = None
        if there != self._identity:
            what = "deleted or moved" if there is None else "replaced by another one"
            raise StoreError(
                f"{self.path} was {what} while this process trained in it; nothing more is written to it. "
                "Start the command again once no other process uses the folder, or choose another --out or --runs."
            )


def _identity(path: Path) -> tuple[int, int]:
    facts = os.stat(path)
    return facts.st_dev, facts.st_ino
