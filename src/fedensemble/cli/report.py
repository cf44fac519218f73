"""What `fedensemble report` does."""

from __future__ import annotations

from pathlib import Path

import typer

from ..experiment.run_folder import RunFolder
from ..report.html import write_all
from ..report.tables import TextTable


def write_and_warn(folder: Path, out: Path | None) -> tuple[TextTable, Path]:
    """Writes the report and returns its table and its page; warns if the run's files have
    changed.
    """
    if changes := RunFolder(folder).changes():
        typer.echo(f"warning: {changes}", err=True)
    return write_all(folder, out)
