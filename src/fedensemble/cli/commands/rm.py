"""Implements `fedensemble rm`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import typer

from ...errors import StoreError
from ...experiment.storage.removal import select_runs
from ...report.tables.run_row import run_record
from ..console import print_line
from ..exit_codes import FAILED


def remove_runs(paths: Sequence[Path], root: Path, *, unfinished: bool, yes: bool) -> None:
    """Deletes runs, after a question unless `yes`; runs in use are kept and reported at the end."""
    runs = select_runs(paths, root, unfinished)
    if not runs:
        print_line("There are no unfinished runs.")
        return
    for run in runs:
        record = run_record(run)
        print_line(f"{record['path']}: {record['state']}, rounds {record.get('rounds', '?')}")
    if not yes and not _confirm(len(runs)):
        print_line("Nothing was deleted.")
        raise typer.Exit(FAILED)
    kept = []
    for run in runs:
        try:
            run.delete()
        except StoreError as error:
            kept.append(str(error))
    print_line(f"Deleted {len(runs) - len(kept)} of {len(runs)} runs.")
    if kept:
        raise StoreError(" ".join(kept))


def _confirm(count: int) -> bool:
    """Asks the user; the end of the input, as in a script, means no."""
    try:
        return click.confirm(
            f"Delete {'these' if count > 1 else 'this'} {count} run{'s' * (count > 1)}?"
        )
    except click.Abort:
        return False
