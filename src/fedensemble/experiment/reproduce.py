"""The paper's tables and figures: comparison files with columns, scales and the paper's own numbers beside ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, ValidationError

from ..core.algorithm import algorithms
from ..errors import DataError, DivergedError, InputError, unknown
from .build import resolve_device
from .compare import (
    Comparison,
    ComparisonTable,
    Row,
    RowResult,
    RowTable,
    changes_of,
    compare,
    problems_of,
    run_folder,
)
from .config import Config, resolve
from .files import Values, merge, read_toml, with_settings
from .run import Watcher
from .sections import Table
from .shelf import Shelf
from .store import RunFolder, Say

# In the order of the paper; `all` goes through them in this order.
NAMES = (
    "table1", "table2-mnist", "table2-cifar10", "table2-cifar10-long", "table2-cifar100", "table2-shakespeare",
    "table2-openimage", "table3", "table4", "figure-toy", "figure-loss-surface", "figure-curves",
)  # fmt: skip


class CellsTable(RowTable):
    """A row or a column: a label, what it changes, and, for a row, perhaps seeds of its own and only a few columns."""

    seeds: list[NonNegativeInt] | None = None
    columns: list[str] | None = None


class ScaleTable(Table):
    """How large: what a scale changes of the whole file."""

    set: dict[str, Any] = Field(default_factory=dict)
    seeds: list[NonNegativeInt] | None = None
    rows: list[str] | None = None
    columns: list[str] | None = None
    column_seeds: dict[str, list[NonNegativeInt]] = Field(default_factory=dict)
    note: str = ""


class ReproductionTable(ComparisonTable):
    """A comparison file with columns: a cell is a row's and a column's changes of the base, with every seed."""

    title: str
    base: str = ""
    report: str = "grid"
    row: list[CellsTable] = Field(default_factory=list)  # type: ignore[assignment]
    column: list[CellsTable] = Field(default_factory=list)
    of: list[str] = Field(default_factory=list, description="other files, whose cells are taken")
    columns: list[str] | None = Field(default=None, description="only these of their columns")
    shown: list[str] = Field(default_factory=list, description="metrics; left out, `metric` alone")
    ways: list[str] = Field(default_factory=lambda: ["test"], description="of testing: test, test_dropout")
    gap: list[str] = Field(default_factory=list, description="two columns, whose difference is shown")
    choose: bool = Field(default=False, description="mark each row's best column")
    options: dict[str, Any] = Field(default_factory=dict, description="of the report")
    paper: dict[str, dict[str, str]] = Field(default_factory=dict, description="the paper's numbers, by row and column")
    note: str = ""
    scale: dict[str, ScaleTable] = Field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One place of a table: a run for each seed, or the reason why there is none."""

    row: str
    column: str
    configs: tuple[Config, ...] = ()
    skipped: str = ""

    @property
    def label(self) -> str:
        """What it is called in progress lines and on the command line."""
        return f"{self.row} / {self.column}"


@dataclass(frozen=True)
class Reproduction:
    """A table or figure at a scale."""

    table: ReproductionTable
    scale: str
    note: str
    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.table.name


@dataclass(frozen=True)
class CellResult:
    """A cell with its runs, or without them."""

    cell: Cell
    runs: RowResult | None


def experiments_folder() -> Path:
    """Where the files that come with the package are."""
    return Path(str(files("fedensemble") / "experiments"))


def find_experiment(name: str) -> Path:
    """The file of a name, or the path itself where it is one."""
    if name.endswith(".toml"):
        return Path(name)
    path = experiments_folder() / f"{name}.toml"
    if not path.is_file():
        known = [other.stem for other in sorted(experiments_folder().glob("*.toml"))]
        raise InputError(unknown("experiment", name, [*known, "all"]))
    return path


def read_reproduction(
    path: Path, scale: str = "full", settings: Sequence[str] = (), seeds: Sequence[int] | None = None
) -> Reproduction:
    """The table or figure a file describes, at a scale.

    A cell's settings are the base's, then the scale's, then `settings`, then the row's, then the column's.
    """
    try:
        table = ReproductionTable.model_validate(read_toml(path))
    except ValidationError as error:
        raise InputError(f"{path} is no file of a table or figure: {problems_of(error, ReproductionTable)}") from None
    if scale not in table.scale:
        raise InputError(f"{path.name}: {unknown('scale', scale, table.scale)}")
    size = table.scale[scale]
    if table.of:
        cells = _cells_of_others(path, table, size, scale, settings, seeds)
    else:
        base = merge(read_toml(path.parent / table.base), changes_of(size.set))
        cells = _cells(table, size, with_settings(base, settings), seeds)
    return Reproduction(table, scale, size.note, tuple(cells))


def _cells(table: ReproductionTable, size: ScaleTable, base: Values, seeds: Sequence[int] | None) -> list[Cell]:
    cells = []
    for row in _chosen(table.row, size.rows, "row"):
        for column in _chosen(table.column, size.columns, "column"):
            if row.columns is not None and column.label not in row.columns:
                continue
            values = merge(merge(base, changes_of(row.set)), changes_of(column.set))
            chosen = seeds or row.seeds or size.column_seeds.get(column.label) or size.seeds or table.seeds
            cells.append(_cell(row.label, column.label, values, chosen))
    return cells


def _cell(row: str, column: str, values: Values, seeds: Sequence[int]) -> Cell:
    method = values.get("algorithm", {}).get("name", "fedavg")
    if method not in algorithms:
        return Cell(row, column, skipped=f"algorithm '{method}' is not there")
    resolved = [resolve(merge(values, {"seed": seed}), f"'{row} / {column}'") for seed in seeds]
    return Cell(row, column, tuple(resolve_device(config) for config in resolved))


def _cells_of_others(
    path: Path, table: ReproductionTable, size: ScaleTable, scale: str, settings: Sequence[str],
    seeds: Sequence[int] | None,
) -> list[Cell]:  # fmt: skip
    cells = [
        cell
        for name in table.of
        for cell in read_reproduction(path.parent / f"{name}.toml", scale, settings, seeds).cells
    ]
    rows, columns = size.rows, size.columns or table.columns
    return [c for c in cells if (rows is None or c.row in rows) and (columns is None or c.column in columns)]


def _chosen(tables: Sequence[CellsTable], labels: Sequence[str] | None, what: str) -> list[CellsTable]:
    known = {table.label: table for table in tables}
    for label in labels or ():
        if label not in known:
            raise InputError(unknown(what, label, known))
    return [table for table in tables if labels is None or table.label in labels]


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


def facts(config: Config) -> Mapping[str, str]:
    """What a reader must know of a run, in words."""
    data, method, work = config.data, config.algorithm, config.training
    inner = {name: value for name, value in method["optimizer"].items() if value and name != "name"}
    count, what = (work.epochs, "epoch") if work.steps is None else (work.steps, "step")
    local = f"{count} local {what}{'s' * (count > 1)}"
    decay = f", ×{method['lr_decay']:g} every {method['lr_decay_every']} rounds" if method["lr_decay"] < 1 else ""
    return {
        "data": str(data["source"]),
        "clients": f"{data['clients'] or 'natural'} clients, {config.ensemble.clients_per_round} a round",
        "model": " ".join([config.model["name"], *(f"{n}={v}" for n, v in config.model.items() if n != "name")]),
        "work": f"{config.rounds} rounds, {local}, batches of {work.batch_size}",
        "optimiser": f"{method['optimizer']['name']} {method['lr']:g}{decay}"
        + "".join(f", {name} {value:g}" for name, value in inner.items() if isinstance(value, float)),
    }
