"""Implements `fedensemble report`."""

from __future__ import annotations

from pathlib import Path

import typer

from ...experiment.storage.run_folder import RunFolder
from ...report.html import write_all
from ...report.tables.result_table import TextTable


def write_and_warn(folder: Path, out: Path | None) -> tuple[TextTable, Path]:
    """Writes a report and returns its table and page; warns if files of the run have changed."""
    if changes := RunFolder(folder).changes():
        typer.echo(f"warning: {changes}", err=True)
    return write_all(folder, out)
