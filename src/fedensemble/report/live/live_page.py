"""The report of a run as it is now, made again when a file of the run has changed."""

from __future__ import annotations

import threading
import time
from hashlib import sha256
from pathlib import Path

from ...errors import FedEnsembleError
from ..html.page import message_page, run_page
from ..html.run_data import raise_on_damaged_files

# Files that the report shows. The folder's other files, such as checkpoints, change it in no way.
_FILES = (
    "config.toml",
    "env.json",
    "clients.json",
    "roster.json",
    "metrics.jsonl",
    "diverged.json",
    "predictions.json",
    "summary.json",
    "checksums.json",
)


class LivePage:
    """The page of a run; several threads may use it.

    Only reads: the run may be trained by another process, may not have begun, and may be deleted.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0  # that the page took the last time it was made
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None  # version and page

    def version(self) -> str:
        """Returns a text that changes with the files of the run."""
        return sha256(repr([_state(self.folder / name) for name in _FILES]).encode()).hexdigest()

    def html(self) -> bytes:
        """Returns the page."""
        with self._lock:  # browsers that ask at the same time get one page
            version = self.version()  # before reading: what changes meanwhile gives another version
            if self._made is None or self._made[0] != version:
                started = time.perf_counter()
                page = self._render(version).encode("utf-8", "backslashreplace")
                self._made = version, page
                self.seconds = time.perf_counter() - started
            return self._made[1]

    def _render(self, version: str) -> str:
        try:
            if not (self.folder / "config.toml").exists():
                return message_page(
                    str(self.folder), "There is no run in this folder: it has not begun, or was "
                    "deleted. This page follows it when it begins.", version
                )  # fmt: skip
            with raise_on_damaged_files(self.folder):
                return run_page(self.folder, version)
        except FedEnsembleError as error:  # no finished round yet, or a file is damaged
            return message_page(str(self.folder), str(error), version)


def _state(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
