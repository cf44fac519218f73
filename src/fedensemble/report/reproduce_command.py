"""What `fedensemble reproduce` does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..errors import DataError
from ..experiment.compare import run_folder
from ..experiment.reproduce import NAMES, Reproduction, find_experiment, read_reproduction, reproduce, without_missing
from ..experiment.store import RunFolder
from .progress import Live
from .reproduction import write_reproduction
from .tables import TextTable


def reproduce_names(
    names: Sequence[str], scale: str, settings: Sequence[str], seeds: Sequence[int] | None, only: Sequence[str],
    root: Path, out: Path, console: Console,
) -> list[tuple[TextTable, Path]]:  # fmt: skip
    """Runs tables and figures one after another; each is written as soon as it is done."""
    wanted = [name for given in names for name in (NAMES if given == "all" else (given,))]
    planned = [read_reproduction(find_experiment(name), scale, settings, seeds) for name in wanted]
    made = []
    for reproduction in planned:
        folder = out / scale / reproduction.name
        try:
            table = _one(reproduction, only, root, folder, console)
        except DataError as error:  # with others to come, what cannot run must not keep them
            if len(planned) == 1:
                raise
            console.print(f"{reproduction.name}: {error}", highlight=False)
            continue
        made.append((table, folder))
        console.print(f"{reproduction.name}: {folder / 'table.md'}", highlight=False)
    return made


def _one(reproduction: Reproduction, only: Sequence[str], root: Path, folder: Path, console: Console) -> TextTable:
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
