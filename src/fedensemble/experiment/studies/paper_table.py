"""Reads the TOML file of a table or figure of the paper as cells, each with one run per seed.

Such a file is a comparison file with columns, scales ("smoke", "full") and the paper's results.
The files are `papers/fed_ensemble/*.toml`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from shlex import join
from typing import Any

from pydantic import Field, NonNegativeInt, ValidationError

from ...config.build import resolve_device
from ...config.plugin_tables import Table
from ...config.schema import Config, resolve
from ...config.toml import Values, merge, read_toml, with_settings
from ...core.algorithm import algorithms
from ...errors import InputError, unknown
from .compare import ComparisonTable, RowTable, changes_of, format_problems
from .shift_test import ShiftTable

# In the order of the paper, which is also the order of `fedensemble reproduce all`.
NAMES = (
    "table1",
    "table2-mnist",
    "table2-cifar10",
    "table2-cifar10-long",
    "table2-cifar100",
    "table2-shakespeare",
    "table2-openimage",
    "table3",
    "table4",
    "figure-toy",
    "figure-loss-surface",
    "figure-curves",
    "theory",
)


class CellsTable(RowTable):
    """A row or a column: a label and the settings it overrides.

    A row may also have its own seeds, may be restricted to some columns, and may have settings for
    single columns, such as the learning rate of a method on its data. A column may show an
    evaluation of its own.
    """

    seeds: list[NonNegativeInt] | None = None
    columns: list[str] | None = None
    by_column: dict[str, dict[str, Any]] = Field(default_factory=dict)
    way: str = Field(default="", description="evaluation to show in a table of methods")
    shift: ShiftTable | None = Field(
        default=None, description="of a row: shifted inputs that its runs are tested on"
    )


class ScaleTable(Table):
    """A scale: the settings it overrides in all cells or by column, its seeds, rows and columns."""

    set: dict[str, Any] = Field(default_factory=dict)
    seeds: list[NonNegativeInt] | None = None
    rows: list[str] | None = None
    columns: list[str] | None = None
    column_seeds: dict[str, list[NonNegativeInt]] = Field(default_factory=dict)
    by_column: dict[str, dict[str, Any]] = Field(default_factory=dict)
    shift: dict[str, ShiftTable] = Field(
        default_factory=dict, description="replaces that of a row, by its label"
    )
    note: str = ""


class ReproductionTable(ComparisonTable):
    """The content of the file of a table or figure.

    The settings of a cell are the base config with the overrides of its row and its column.
    """

    title: str = Field(default="", description="of the table; by default, its name")
    base: str = ""
    report: str = "grid"
    row: list[CellsTable] = Field(default_factory=list)  # type: ignore[assignment]
    column: list[CellsTable] = Field(default_factory=list)  # type: ignore[assignment]
    of: list[str] = Field(default_factory=list, description="other files whose cells are used")
    columns: list[str] | None = Field(default=None, description="only these columns of the files")
    shown: list[str] = Field(
        default_factory=list, description="metrics to show; by default, only `metric`"
    )
    ways: list[str] = Field(
        default_factory=lambda: ["test"],
        description="evaluations to show: test, test_last, test_dropout",
    )
    gap: list[str] = Field(
        default_factory=list, description="two columns whose difference is shown"
    )
    choose: bool = Field(default=False, description="mark the best column of each row")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the report")
    paper: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="the paper's results, by row and column"
    )
    note: str = ""
    scale: dict[str, ScaleTable] = Field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """A cell of a table: one config per seed, or the reason why the cell is skipped."""

    row: str
    column: str
    configs: tuple[Config, ...] = ()
    skipped: str = ""
    way: str = "test"
    shift: ShiftTable | None = None

    @property
    def label(self) -> str:
        """The name of the cell in progress lines and for --only."""
        return f"{self.row} / {self.column}"


@dataclass(frozen=True)
class Reproduction:
    """A table or figure at a scale.

    Attributes:
        table: the content of its file.
        scale: name of the scale.
        note: on the scale, for the report.
        cells: row by row.
        argument: of `fedensemble reproduce`: the name or path of the file.
        changes: the options --set and --seeds of the command.
    """

    table: ReproductionTable
    scale: str
    note: str
    cells: tuple[Cell, ...]
    argument: str = ""
    changes: str = ""

    @property
    def name(self) -> str:
        """The name of the table or figure."""
        return self.table.name

    @property
    def folder(self) -> str:
        """The name of its output folder.

        A hash of the changes is appended: results with other settings must not overwrite the table.
        """
        return (
            f"{self.name}-{sha256(self.changes.encode()).hexdigest()[:8]}"
            if self.changes
            else self.name
        )

    @property
    def command(self) -> str:
        """The command that reproduces it."""
        scale = [] if self.scale == "full" else ["--scale", self.scale]
        words = join(["fedensemble", "reproduce", self.argument or self.name, *scale])
        return f"{words} {self.changes}".rstrip()


def papers_folder() -> Path:
    """Returns the folder of the files that come with the package."""
    return Path(str(files("fedensemble") / "papers" / "fed_ensemble"))


def find_paper_table(name: str) -> Path:
    """Returns the path of a packaged file by its name; a name that ends in .toml is a path."""
    if name.endswith(".toml"):
        return Path(name)
    path = papers_folder() / f"{name}.toml"
    if not path.is_file():
        known = [other.stem for other in sorted(papers_folder().glob("*.toml"))]
        raise InputError(unknown("experiment", name, [*known, "all"]))
    return path


def read_reproduction(
    path: Path,
    scale: str = "full",
    settings: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    device: str | None = None,
    trains: bool = True,
) -> Reproduction:
    """Reads the file of a table or figure at a scale.

    A cell is the base config with overrides, in this order: the scale, `settings`, `device`, the
    row, the column, what the row and then the scale set for the column.

    Args:
        path: of the file.
        scale: one of the scales in the file.
        settings: overrides "key=value".
        seeds: replace those of the file.
        device: replaces that of the config.
        trains: whether runs may be trained here. If not, the device need not exist: runs that
            were trained on a GPU can be collected on a machine without one.
    """
    try:
        table = ReproductionTable.model_validate(read_toml(path))
    except ValidationError as error:
        raise InputError(
            f"{path} is not a valid file of a table or figure: "
            f"{format_problems(error, ReproductionTable)}"
        ) from None
    # A file without scales, such as a comparison file with columns, is run as it is.
    scales = table.scale or {"full": ScaleTable()}
    if scale not in scales:
        raise InputError(f"{path.name}: {unknown('scale', scale, scales)}")
    size = scales[scale]
    if table.of:
        cells = _cells_of_others(path, table, size, scale, settings, seeds, device, trains)
    else:
        base = with_settings(
            merge(read_toml(path.parent / table.base), changes_of(size.set)), settings
        )
        if device:
            base = with_settings(base, [f"engine.device={device}"])
        cells = _cells(table, size, base, seeds, trains)
    argument = path.stem if path.parent == papers_folder() else str(path)
    changes = [word for setting in settings for word in ("--set", setting)]
    changes += ["--seeds", ",".join(map(str, seeds))] if seeds else []
    return Reproduction(table, scale, size.note, tuple(cells), argument, join(changes))


def _cells(
    table: ReproductionTable,
    size: ScaleTable,
    base: Values,
    seeds: Sequence[int] | None,
    trains: bool,
) -> list[Cell]:
    """Returns the cells of a table with its own rows and columns."""
    cells = []
    labels = {column.label: column for column in table.column}
    rows = _select(table.row, size.rows, "row")
    for label in size.shift:
        if label not in {row.label for row in table.row}:
            raise InputError(f"shift: {unknown('row', label, [r.label for r in table.row])}")
    for overrides in (size.by_column, *(row.by_column for row in rows)):
        for label in overrides:
            if label not in labels:
                raise InputError(f"by_column: {unknown('column', label, labels)}")
    for row in rows:
        for column in _select(table.column, size.columns, "column"):
            if row.columns is not None and column.label not in row.columns:
                continue
            values = merge(merge(base, changes_of(row.set)), changes_of(column.set))
            for overrides in (row.by_column, size.by_column):
                values = merge(values, changes_of(overrides.get(column.label, {})))
            # The most specific seeds win: of the command, the row, the column, the scale, the file.
            cell_seeds = (
                seeds
                or row.seeds
                or size.column_seeds.get(column.label)
                or size.seeds
                or table.seeds
            )
            cell = _cell(row.label, column.label, values, cell_seeds, trains)
            shift = size.shift.get(row.label, row.shift)
            cells.append(replace(cell, way=column.way or "test", shift=shift))
    return cells


def _cell(row: str, column: str, values: Values, seeds: Sequence[int], trains: bool) -> Cell:
    algorithm = values.get("algorithm", {}).get("name", "fedavg")
    if algorithm not in algorithms:
        return Cell(row, column, skipped=f"algorithm '{algorithm}' is not installed")
    resolved = [resolve(merge(values, {"seed": seed}), f"'{row} / {column}'") for seed in seeds]
    if trains or resolved[0].engine.device == "auto":
        resolved = [resolve_device(config) for config in resolved]
    return Cell(row, column, tuple(resolved))


def _cells_of_others(
    path: Path,
    table: ReproductionTable,
    size: ScaleTable,
    scale: str,
    settings: Sequence[str],
    seeds: Sequence[int] | None,
    device: str | None,
    trains: bool,
) -> list[Cell]:
    """Returns the cells of the other files that a table refers to (`of`)."""
    cells = [
        cell
        for name in table.of
        for cell in read_reproduction(
            path.parent / f"{name}.toml", scale, settings, seeds, device, trains
        ).cells
    ]
    rows, columns = size.rows, size.columns or table.columns
    return [
        cell
        for cell in cells
        if (rows is None or cell.row in rows) and (columns is None or cell.column in columns)
    ]


def _select(
    tables: Sequence[CellsTable], labels: Sequence[str] | None, what: str
) -> list[CellsTable]:
    """Returns the rows or columns with these labels, or all of them if `labels` is None."""
    known = {table.label: table for table in tables}
    for label in labels or ():
        if label not in known:
            raise InputError(unknown(what, label, known))
    return [table for table in tables if labels is None or table.label in labels]
