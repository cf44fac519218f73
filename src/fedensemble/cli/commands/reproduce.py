"""Implements `fedensemble reproduce`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ...errors import DataError, DivergedError, InputError
from ...experiment.storage.run_folder import RunFolder
from ...experiment.studies.compare import exploded, run_folder
from ...experiment.studies.paper_table import (
    NAMES,
    Reproduction,
    find_paper_table,
    read_reproduction,
)
from ...experiment.studies.reproduce import is_chosen, reproduce, test_shift, without_missing
from ...report.comparison_report import int_
from ...report.comparison_report import names as split_names
from ...report.reproduction_report import write_reproduction
from ...report.results_page import check_page, collect
from ...report.tables.result_table import TextTable
from ..console import console, print_line, print_table, working
from ..progress import ProgressDisplay


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
    train: bool = True,
) -> None:
    """Trains tables and figures, prints them, and writes all results so far to `page` if given.

    If `train` is False, only finished runs are collected: no data and no GPU are needed.

    Results are written to `out`/scale/name; with `settings` or `seeds`, a hash of these is appended
    to the name.
    """
    if not names and page is None:
        raise InputError(f"Name a table or figure: {', '.join(NAMES)}, or all.")
    if page is not None:
        check_page(page, scale)
    seed_list = [int_(seed, "--seeds") for seed in split_names(seeds)] if seeds else None
    expanded = [each for name in names for each in (NAMES if name == "all" else (name,))]
    # Read all files before anything is trained: an error in the last one must not cost hours.
    reproductions = [
        read_reproduction(find_paper_table(name), scale, settings, seed_list, device, train)
        for name in expanded
    ]
    tables, diverged = _reproduce_all(reproductions, only, runs, out, train)
    for table in tables:
        print_table(table)
    if page is not None:
        collected = collect(out / scale, page)
        print_line(f"{page}: {', '.join(collected)}")
    if diverged:
        raise DivergedError(f"These cells diverged and have no results: {'; '.join(diverged)}.")


def _reproduce_all(
    reproductions: Sequence[Reproduction],
    only: Sequence[str],
    root: Path,
    out: Path,
    train: bool,
) -> tuple[list[TextTable], list[str]]:
    """Reproduces tables and figures in order; each is written as soon as it is done.

    Returns:
        the tables, and the labels of the cells that have diverged.
    """
    tables, diverged = [], []
    for reproduction in reproductions:
        folder = out / reproduction.scale / reproduction.folder
        try:
            table, labels = _reproduce_one(reproduction, only, root, folder, train)
            diverged += [f"{reproduction.name}, {label}" for label in labels]
            if table is None:
                continue
            tables.append(table)
        except DataError as error:  # missing data of one table must not stop the other tables
            if len(reproductions) == 1:
                raise
            print_line(f"{reproduction.name}: {error}")
            continue
        print_line(f"{reproduction.name}: {folder / 'table.md'}")
    return tables, diverged


def _reproduce_one(
    reproduction: Reproduction, only: Sequence[str], root: Path, folder: Path, train: bool
) -> tuple[TextTable | None, list[str]]:
    """Returns the table and the labels of diverged cells; None if a figure needs those cells."""
    runnable = without_missing(reproduction, root) if train else reproduction
    if all(cell.skipped for cell in runnable.cells):
        raise DataError(f"Nothing of {reproduction.name} can run: {runnable.cells[0].skipped}")
    for reason in dict.fromkeys(cell.skipped for cell in runnable.cells if cell.skipped):
        labels = [cell.label for cell in runnable.cells if cell.skipped == reason]
        print_line(f"Skipped: {'; '.join(labels)}. {reason}")
    paths = [run_folder(config, root) for cell in runnable.cells for config in cell.configs]
    unfinished = [path for path in paths if not RunFolder(path).done]
    started = time.monotonic()
    with ProgressDisplay(console, runs=len(paths)) as display:
        results = reproduce(
            runnable,
            root,
            lambda label, seed: display.callbacks(f"{label}, seed {seed}"),
            display.finished,
            only,
            train,
        )
    seconds = time.monotonic() - started
    trained = [str(path) for path in unfinished if RunFolder(path).done]
    diverged = [
        result.cell.label for result in results if result.failed and is_chosen(result.cell, only)
    ]
    for line in exploded([result.runs for result in results if result.runs is not None]):
        print_line(f"warning: {line}")
    with working("Testing"):
        test_shift(results, only, print_line)
    try:
        with working("Writing the report"):
            table = write_reproduction(folder, runnable, results, root, seconds, trained)
        return table, diverged
    except DataError:
        if not diverged:
            raise
        return None, diverged
