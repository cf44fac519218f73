"""Carries out what is to be reproduced: trains the cells of a table or figure as far as they are not finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import DataError, DivergedError, InputError
from .compare import Comparison, Row, RowResult, compare, run_folder
from .config import Config
from .reproduction import Cell, Reproduction
from .run import Watcher
from .shelf import Shelf
from .store import RunFolder, Say


@dataclass(frozen=True)
class CellResult:
    """A cell with its runs, or without them."""

    cell: Cell
    runs: RowResult | None


def without_missing(reproduction: Reproduction, root: Path) -> Reproduction:
    """The same with those cells skipped whose data are not there; what has been trained already needs no data."""
    reasons: dict[str, str] = {}
    shelf = Shelf()
    cells = []
    for cell in reproduction.cells:
        unfinished = [config for config in cell.configs if not RunFolder(run_folder(config, root)).done]
        if unfinished:
            key = repr({name: value for name, value in unfinished[0].data.items() if name != "seed"})
            if key not in reasons:
                reasons[key] = _missing(unfinished[0], shelf)
            if reasons[key]:
                cell = replace(cell, configs=(), skipped=reasons[key])  # noqa: PLW2901
        cells.append(cell)
    return replace(reproduction, cells=tuple(cells))


def _missing(config: Config, shelf: Shelf) -> str:
    """Why the data cannot be loaded; empty if they can."""
    try:
        shelf.build_data(config)
    except DataError as error:
        return str(error)
    return ""


def reproduce(
    reproduction: Reproduction, root: Path, watch: Callable[[str, int], Watcher], finished: Callable[[], None],
    say: Say, only: Sequence[str] = (),
) -> list[CellResult]:  # fmt: skip
    """Trains the chosen cells as far as they are not finished, and collects all that are.

    Args:
        only: parts of labels; cells with none of them are left for another time.
    """
    cells = [cell for cell in reproduction.cells if cell.configs]
    chosen = [cell for cell in cells if not only or any(part.lower() in cell.label.lower() for part in only)]
    if only and not chosen:
        labels = "; ".join(cell.label for cell in cells)
        raise InputError(f"--only {' '.join(only)} fits none of the cells that can run: {labels}.")
    trained: dict[str, RowResult] = {}
    try:
        trained = _compare(reproduction, chosen, root, watch, finished)
    except DivergedError:  # the others are to have their numbers all the same
        for cell in chosen:
            try:
                trained |= _compare(reproduction, [cell], root, watch, finished)
            except DivergedError as error:
                say(f"{cell.label}: {error}")
    results = []
    for cell in reproduction.cells:
        runs = trained.get(cell.label) or _finished(cell, root)
        results.append(CellResult(cell, runs))
    return results


def _compare(
    reproduction: Reproduction, cells: Sequence[Cell], root: Path, watch: Callable[[str, int], Watcher],
    finished: Callable[[], None],
) -> dict[str, RowResult]:  # fmt: skip
    rows = tuple(Row(cell.label, cell.configs) for cell in cells)
    seeds = tuple(sorted({config.seed for cell in cells for config in cell.configs}))
    comparison = Comparison(reproduction.name, reproduction.table.metric, rows, seeds)
    return {result.label: result for result in compare(comparison, root, watch, finished)} if rows else {}


def _finished(cell: Cell, root: Path) -> RowResult | None:
    """A cell's runs where all of them are done."""
    stores = [RunFolder(run_folder(config, root)) for config in cell.configs]
    if not stores or not all(store.done for store in stores):
        return None
    folders, summaries = tuple(s.path for s in stores), tuple(s.summary() for s in stores)
    return RowResult(cell.label, folders, summaries, tuple(s.metrics() for s in stores))
