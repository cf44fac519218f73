"""What `fedensemble reproduce` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import DataError, InputError
from ..experiment.compare import run_folder
from ..experiment.reproduce import reproduce, without_missing
from ..experiment.reproduction import NAMES, Reproduction, find_experiment, read_reproduction
from ..experiment.store import RunFolder
from ..report.comparison import int_
from ..report.comparison import names as parts
from ..report.progress import Live
from ..report.reproduction import collect, write_reproduction
from ..report.tables import TextTable
from .terminal import console, print_table


def reproduce_names(
    names: Sequence[str], scale: str, settings: Sequence[str], seeds: str | None, only: Sequence[str], runs: Path,
    out: Path, page: Path | None,
) -> None:  # fmt: skip
    """Trains tables and figures, prints them, and puts all there are so far into a page if it has a name."""
    if not names and page is None:
        raise InputError(f"Say which table or figure: {', '.join(NAMES)}, or all.")
    chosen = [int_(seed, "--seeds") for seed in parts(seeds)] if seeds else None
    wanted = [name for given in names for name in (NAMES if given == "all" else (given,))]
    planned = [read_reproduction(find_experiment(name), scale, settings, chosen) for name in wanted]
    for table in _carry_out(planned, only, runs, out):
        print_table(table)
    if page is not None:
        found = collect(out / scale, page)
        console.print(f"{page}: {', '.join(found)}", highlight=False)


def _carry_out(planned: Sequence[Reproduction], only: Sequence[str], root: Path, out: Path) -> list[TextTable]:
    """Runs tables and figures one after another; each is written as soon as it is done."""
    made = []
    for reproduction in planned:
        folder = out / reproduction.scale / reproduction.name
        try:
            made.append(_one(reproduction, only, root, folder))
        except DataError as error:  # with others to come, what cannot run must not keep them
            if len(planned) == 1:
                raise
            console.print(f"{reproduction.name}: {error}", highlight=False)
            continue
        console.print(f"{reproduction.name}: {folder / 'table.md'}", highlight=False)
    return made


def _one(reproduction: Reproduction, only: Sequence[str], root: Path, folder: Path) -> TextTable:
    checked = without_missing(reproduction, root)
    if all(cell.skipped for cell in checked.cells):
        raise DataError(f"Nothing of {reproduction.name} can run: {checked.cells[0].skipped}")
    for reason in dict.fromkeys(cell.skipped for cell in checked.cells if cell.skipped):
        labels = [cell.label for cell in checked.cells if cell.skipped == reason]
        console.print(f"Left out: {'; '.join(labels)}. {reason}", highlight=False)
    paths = [run_folder(config, root) for cell in checked.cells for config in cell.configs]
    waiting = [path for path in paths if not RunFolder(path).done]
    started = time.monotonic()
    with Live(console, runs=len(paths)) as live:
        results = reproduce(
            checked, root, lambda label, seed: live.watcher(f"{label}, seed {seed}"), live.finished, live.say, only
        )
    seconds = time.monotonic() - started
    trained = [str(path) for path in waiting if RunFolder(path).done]
    return write_reproduction(folder, checked, results, root, seconds, trained)
