"""Implements `fedensemble data get`."""

from __future__ import annotations

from pathlib import Path

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ...data import get
from ..console import console


class DownloadBar:
    """The progress bar of a download, with the interface that pooch expects of one."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("downloading", total=None)

    @property
    def total(self) -> float | None:
        """Bytes of the file; None before the server has said."""
        return self.bar.tasks[0].total

    @total.setter
    def total(self, value: float) -> None:
        self.bar.update(self.task, total=value or None)

    def update(self, count: int) -> None:
        """Counts more bytes."""
        self.bar.advance(self.task, count)

    def reset(self) -> None:
        """Starts at 0 again."""
        self.bar.reset(self.task)

    def close(self) -> None:
        """Called by pooch at the end of a file; the next file uses the same bar."""


def download(name: str, root: Path | None) -> list[Path]:
    """Returns the files of a dataset; shows a bar for those that are downloaded."""
    shown = DownloadBar()
    with shown.bar:
        return get(name, root, bar=shown)
