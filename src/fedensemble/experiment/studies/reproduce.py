"""Trains the unfinished cells of a table or figure of the paper, and collects all results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...config.schema import Config
from ...errors import DataError, InputError
from ..run import RunCallbacks
from ..storage.run_folder import RunFolder
from .compare import Comparison, Row, RowResult, compare, run_folder, same_data
from .data_cache import DataCache
from .paper_table import Cell, Reproduction
from .shift_test import ShiftTest, read_shift


@dataclass(frozen=True)
class CellResult:
    """A cell with its runs.

    Attributes:
        cell: of the table.
        runs: None if they are unfinished, were skipped or have diverged.
        failed: error messages of diverged runs, by seed.
    """

    cell: Cell
    runs: RowResult | None
    failed: Mapping[int, str] = field(default_factory=dict)

    def shift(self) -> dict[int, dict[str, Any]]:
        """The results of the runs on shifted inputs, by seed; empty if there are none."""
        if self.runs is None or self.cell.shift is None:
            return {}
        return {
            config.seed: read_shift(folder, self.cell.shift, self.cell.way)
            for config, folder in zip(self.cell.configs, self.runs.folders, strict=True)
        }


def without_missing(reproduction: Reproduction, root: Path) -> Reproduction:
    """Returns the reproduction with those cells skipped whose data are not available.

    Finished cells are kept: they need no data.
    """
    reasons: dict[str, str] = {}
    cache = DataCache()
    cells = []
    for cell in reproduction.cells:
        unfinished = [
            config for config in cell.configs if not RunFolder(run_folder(config, root)).done
        ]
        if unfinished:
            key = same_data(unfinished[0])
            if key not in reasons:
                reasons[key] = _data_problem(unfinished[0], cache)
            if reasons[key]:
                cell = replace(cell, configs=(), skipped=reasons[key])  # noqa: PLW2901
        cells.append(cell)
    return replace(reproduction, cells=tuple(cells))


def _data_problem(config: Config, cache: DataCache) -> str:
    """Returns why the data cannot be loaded; empty if they can."""
    try:
        cache.build_data(config)
    except DataError as error:
        return str(error)
    return ""


def reproduce(
    reproduction: Reproduction,
    root: Path,
    make_callbacks: Callable[[str, int], RunCallbacks],
    finished: Callable[[], None],
    only: Sequence[str] = (),
    train: bool = True,
) -> list[CellResult]:
    """Trains the selected cells that are not finished, and returns the results of all cells.

    A cell that diverges does not stop the others.

    Args:
        reproduction: the table or figure.
        root: folder under which all runs are stored.
        make_callbacks: returns the callbacks of a run for its cell's label and its seed.
        finished: called after each run.
        only: parts of labels; cells whose label contains none of them are not trained.
        train: if False, nothing is trained, and only finished cells have results.
    """
    if not train:
        return [_collected(cell, root) for cell in reproduction.cells]
    cells = [cell for cell in reproduction.cells if cell.configs]
    selected = [cell for cell in cells if is_chosen(cell, only)]
    if only and not selected:
        labels = "; ".join(cell.label for cell in cells)
        raise InputError(
            f"--only {' '.join(only)} matches none of the cells that can run: {labels}."
        )
    rows = tuple(Row(cell.label, cell.configs) for cell in selected)
    seeds = tuple(sorted({config.seed for cell in selected for config in cell.configs}))
    comparison = Comparison(reproduction.name, reproduction.table.metric, rows, seeds)
    row_results = compare(comparison, root, make_callbacks, finished)
    trained = {result.label: result for result in row_results}
    return [_collected(cell, root, trained.get(cell.label)) for cell in reproduction.cells]


def _collected(cell: Cell, root: Path, trained: RowResult | None = None) -> CellResult:
    """Returns the results of a cell: of the runs just trained, or else of those on disk."""
    runs = trained or _read_results(cell, root)
    return CellResult(cell, None, runs.failed) if runs and runs.failed else CellResult(cell, runs)


def test_shift(
    results: Sequence[CellResult], only: Sequence[str], say: Callable[[str], None]
) -> None:
    """Tests the finished runs of the selected cells on shifted inputs, if their rows have some."""
    runs = [
        (cell.row, config.seed, cell, config, folder)
        for result in results
        for cell in [result.cell]
        if cell.shift is not None and result.runs is not None and is_chosen(cell, only)
        for config, folder in zip(cell.configs, result.runs.folders, strict=True)
    ]
    # Made-up data differ between seeds: in this order, all runs with the same data come together.
    rows = list(dict.fromkeys(row for row, *_ in runs))
    test = ShiftTest(say)
    for _, seed, cell, config, folder in sorted(runs, key=lambda r: (rows.index(r[0]), r[1])):
        assert cell.shift is not None
        test.test(f"{cell.label}, seed {seed}", config, folder, cell.shift, cell.way)


def is_chosen(cell: Cell, only: Sequence[str]) -> bool:
    """Returns whether a cell's label contains one of the parts; True if there are no parts."""
    return not only or any(part.lower() in cell.label.lower() for part in only)


def _read_results(cell: Cell, root: Path) -> RowResult | None:
    """Reads the runs of a cell from disk; None unless all are done, or one has diverged."""
    stores = [RunFolder(run_folder(config, root)) for config in cell.configs]
    failed = {
        config.seed: store.divergence()
        for config, store in zip(cell.configs, stores, strict=True)
        if store.diverged_file.is_file() and not store.done
    }
    if failed:
        return RowResult(cell.label, (), (), failed=failed)
    if not stores or not all(store.done for store in stores):
        return None
    folders, summaries = tuple(s.path for s in stores), tuple(s.summary() for s in stores)
    return RowResult(cell.label, folders, summaries, tuple(s.metrics() for s in stores))
