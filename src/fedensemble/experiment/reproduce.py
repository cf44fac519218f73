"""Carries out what is to be reproduced: trains the cells of a table or figure as far as they are
not finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config.schema import Config
from ..errors import DataError, InputError
from .compare import Comparison, Row, RowResult, compare, run_folder, same_data
from .data_cache import DataCache
from .paper_table import Cell, Reproduction
from .read_json import read_table
from .run import RunCallbacks
from .run_folder import RunFolder


@dataclass(frozen=True)
class CellResult:
    """A cell with its runs, or without them."""

    cell: Cell
    runs: RowResult | None
    failed: Mapping[int, str] = field(default_factory=dict)  # how its runs have diverged, by seed


def without_missing(reproduction: Reproduction, root: Path) -> Reproduction:
    """The same with those cells skipped whose data are not there; what has been trained already
    needs no data.
    """
    reasons: dict[str, str] = {}
    shelf = DataCache()
    cells = []
    for cell in reproduction.cells:
        unfinished = [
            config for config in cell.configs if not RunFolder(run_folder(config, root)).done
        ]
        if unfinished:
            key = same_data(unfinished[0])
            if key not in reasons:
                reasons[key] = _missing(unfinished[0], shelf)
            if reasons[key]:
                cell = replace(cell, configs=(), skipped=reasons[key])  # noqa: PLW2901
        cells.append(cell)
    return replace(reproduction, cells=tuple(cells))


def _missing(config: Config, shelf: DataCache) -> str:
    """Why the data cannot be loaded; empty if they can."""
    try:
        shelf.build_data(config)
    except DataError as error:
        return str(error)
    return ""


def reproduce(
    reproduction: Reproduction,
    root: Path,
    watch: Callable[[str, int], RunCallbacks],
    finished: Callable[[], None],
    only: Sequence[str] = (),
) -> list[CellResult]:
    """Trains the chosen cells as far as they are not finished, and collects all that are.

    A cell that diverges keeps nothing from the others.

    Args:
        only: parts of labels; cells with none of them are left for another time.
    """
    cells = [cell for cell in reproduction.cells if cell.configs]
    chosen = [cell for cell in cells if is_chosen(cell, only)]
    if only and not chosen:
        labels = "; ".join(cell.label for cell in cells)
        raise InputError(f"--only {' '.join(only)} fits none of the cells that can run: {labels}.")
    rows = tuple(Row(cell.label, cell.configs) for cell in chosen)
    seeds = tuple(sorted({config.seed for cell in chosen for config in cell.configs}))
    comparison = Comparison(reproduction.name, reproduction.table.metric, rows, seeds)
    trained = {result.label: result for result in compare(comparison, root, watch, finished)}
    results = []
    for cell in reproduction.cells:
        runs = trained.get(cell.label) or _finished(cell, root)
        results.append(
            CellResult(cell, None, runs.failed) if runs and runs.failed else CellResult(cell, runs)
        )
    return results


def is_chosen(cell: Cell, only: Sequence[str]) -> bool:
    """Whether a cell has one of these parts in its label, or there are none."""
    return not only or any(part.lower() in cell.label.lower() for part in only)


def _finished(cell: Cell, root: Path) -> RowResult | None:
    """A cell's runs where all of them are done, or how they have diverged."""
    stores = [RunFolder(run_folder(config, root)) for config in cell.configs]
    failed = {
        config.seed: str(read_table(store.diverged_file).get("error", "the reason was not kept"))
        for config, store in zip(cell.configs, stores, strict=True)
        if store.diverged_file.is_file()
    }
    if failed:
        return RowResult(cell.label, (), (), failed=failed)
    if not stores or not all(store.done for store in stores):
        return None
    folders, summaries = tuple(s.path for s in stores), tuple(s.summary() for s in stores)
    return RowResult(cell.label, folders, summaries, tuple(s.metrics() for s in stores))
