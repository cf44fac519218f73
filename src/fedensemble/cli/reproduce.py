"""What `fedensemble reproduce` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError, DivergedError, InputError
from ..experiment.compare import run_folder
from ..experiment.paper_table import NAMES, Reproduction, find_experiment, read_reproduction
from ..experiment.reproduce import is_chosen, reproduce, without_missing
from ..experiment.run_folder import RunFolder
from ..report.comparison_report import int_
from ..report.comparison_report import names as parts
from ..report.reproduction_report import write_reproduction
from ..report.results_page import check_page, collect
from ..report.tables import TextTable
from .console import console, print_line, print_table
from .progress import Live


def reproduce_names(
    names: Sequence[str],
    scale: str,
    settings: Sequence[str],
    seeds: str | None,
    device: str | None,
    only: Sequence[str],
    runs: Path,
    out: Path,
    page: Path | None,
) -> None:
    """Trains tables and figures, prints them, and puts all there are so far into a page if it has a
    name.

    They are written to `out`/scale/name; with `settings` or `seeds`, a hash of these follows the
    name.
    """
    if not names and page is None:
        raise InputError(f"Say which table or figure: {', '.join(NAMES)}, or all.")
    if page is not None:
        check_page(page, scale)
    chosen = [int_(seed, "--seeds") for seed in parts(seeds)] if seeds else None
    wanted = [name for given in names for name in (NAMES if given == "all" else (given,))]
    planned = [
        read_reproduction(find_experiment(name), scale, settings, chosen, device) for name in wanted
    ]
    tables, failed = _carry_out(planned, only, runs, out)
    for table in tables:
        print_table(table)
    if page is not None:
        found = collect(out / scale, page)
        print_line(f"{page}: {', '.join(found)}")
    if failed:
        raise DivergedError(f"diverged, and without numbers: {'; '.join(failed)}.")


def _carry_out(
    planned: Sequence[Reproduction], only: Sequence[str], root: Path, out: Path
) -> tuple[list[TextTable], list[str]]:
    """Runs tables and figures one after another; each is written as soon as it is done.

    Returns:
        the tables, and which cells have diverged.
    """
    made, failed = [], []
    for reproduction in planned:
        folder = out / reproduction.scale / reproduction.folder
        try:
            table, without = _one(reproduction, only, root, folder)
            failed += [f"{reproduction.name}, {label}" for label in without]
            if table is None:
                continue
            made.append(table)
        except DataError as error:  # with others to come, what cannot run must not keep them
            if len(planned) == 1:
                raise
            print_line(f"{reproduction.name}: {error}")
            continue
        print_line(f"{reproduction.name}: {folder / 'table.md'}")
    return made, failed


def _one(
    reproduction: Reproduction, only: Sequence[str], root: Path, folder: Path
) -> tuple[TextTable | None, list[str]]:
    """The table, and the cells that have diverged; some figures cannot be without them."""
    checked = without_missing(reproduction, root)
    if all(cell.skipped for cell in checked.cells):
        raise DataError(f"Nothing of {reproduction.name} can run: {checked.cells[0].skipped}")
    for reason in dict.fromkeys(cell.skipped for cell in checked.cells if cell.skipped):
        labels = [cell.label for cell in checked.cells if cell.skipped == reason]
        print_line(f"Left out: {'; '.join(labels)}. {reason}")
    paths = [run_folder(config, root) for cell in checked.cells for config in cell.configs]
    waiting = [path for path in paths if not RunFolder(path).done]
    started = time.monotonic()
    with Live(console, runs=len(paths)) as live:
        results = reproduce(
            checked,
            root,
            lambda label, seed: live.watcher(f"{label}, seed {seed}"),
            live.finished,
            only,
        )
    seconds = time.monotonic() - started
    trained = [str(path) for path in waiting if RunFolder(path).done]
    failed = [
        result.cell.label for result in results if result.failed and is_chosen(result.cell, only)
    ]
    try:
        return write_reproduction(folder, checked, results, root, seconds, trained), failed
    except DataError:
        if not failed:
            raise
        return None, failed
