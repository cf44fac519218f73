"""Implements `fedensemble watch`."""

from __future__ import annotations

from pathlib import Path

import typer

from ...errors import InputError
from ...experiment.storage.folder_lock import LOCK
from ...report.html.run_data import is_run
from ...report.live.server import LiveServer
from ..console import console, print_line


def watch(folder: Path, port: int, open_browser: bool) -> None:
    """Serves the report of a run until Ctrl-C."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give the folder of a run.")
    # A run that is just starting has a lock before it has anything else.
    begun = folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())
    if begun and not is_run(folder):
        raise InputError(
            f"{folder} is a comparison. Watch one of its runs; 'fedensemble report' shows all."
        )
    with LiveServer(folder, port) as server:
        print_line(f"Report: {server.url} (Ctrl-C stops showing it; the run goes on)")
        if not begun:
            print_line(f"There is no run in {folder} yet; the page follows it when it begins.")
        console.file.flush()  # if the output is a pipe
        if open_browser:
            typer.launch(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print_line("")
