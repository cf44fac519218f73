"""What is to be reproduced: the file of a table or figure of the paper, read at a scale, as cells
of runs.

It is a comparison file with columns, scales and the paper's own numbers beside ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from shlex import join
from typing import Any

from pydantic import Field, NonNegativeInt, ValidationError

from ..config.build import resolve_device
from ..config.plugin_tables import Table
from ..config.schema import Config, resolve
from ..config.toml import Values, merge, read_toml, with_settings
from ..core.algorithm import algorithms
from ..errors import InputError, unknown
from .compare import ComparisonTable, RowTable, changes_of, problems_of

# In the order of the paper; `all` goes through them in this order.
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
)


class CellsTable(RowTable):
    """A row or a column: a label, what it changes, and, for a row, perhaps seeds of its own and
    only a few columns.
    """

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
    """A comparison file with columns: a cell is a row's and a column's changes of the base, with
    every seed.
    """

    title: str
    base: str = ""
    report: str = "grid"
    row: list[CellsTable] = Field(default_factory=list)  # type: ignore[assignment]
    column: list[CellsTable] = Field(default_factory=list)
    of: list[str] = Field(default_factory=list, description="other files, whose cells are taken")
    columns: list[str] | None = Field(default=None, description="only these of their columns")
    shown: list[str] = Field(default_factory=list, description="metrics; left out, `metric` alone")
    ways: list[str] = Field(
        default_factory=lambda: ["test"], description="of testing: test, test_dropout"
    )
    gap: list[str] = Field(
        default_factory=list, description="two columns, whose difference is shown"
    )
    choose: bool = Field(default=False, description="mark each row's best column")
    options: dict[str, Any] = Field(default_factory=dict, description="of the report")
    paper: dict[str, dict[str, str]] = Field(
        default_factory=dict, description="the paper's numbers, by row and column"
    )
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
    """A table or figure at a scale, perhaps with changes: what `--set` and `--seeds` say."""

    table: ReproductionTable
    scale: str
    note: str
    cells: tuple[Cell, ...]
    given: str = ""
    changes: str = ""

    @property
    def name(self) -> str:
        """The name of its file."""
        return self.table.name

    @property
    def folder(self) -> str:
        """Where it goes: by its name and, lest it takes the place of the table without changes, a
        hash of them.
        """
        return (
            f"{self.name}-{sha256(self.changes.encode()).hexdigest()[:8]}"
            if self.changes
            else self.name
        )

    @property
    def command(self) -> str:
        """What makes it."""
        scale = [] if self.scale == "full" else ["--scale", self.scale]
        return f"{join(['fedensemble', 'reproduce', self.given or self.name, *scale])} {self.changes}".rstrip()


def experiments_folder() -> Path:
    """Where the files that come with the package are."""
    return Path(str(files("fedensemble") / "papers" / "fed_ensemble"))


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
    path: Path,
    scale: str = "full",
    settings: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    device: str | None = None,
) -> Reproduction:
    """The table or figure a file describes, at a scale.

    A cell's settings are the base's, then the scale's, then `settings`, then the row's, then the
    column's.
    """
    try:
        table = ReproductionTable.model_validate(read_toml(path))
    except ValidationError as error:
        raise InputError(
            f"{path} is no file of a table or figure: {problems_of(error, ReproductionTable)}"
        ) from None
    if scale not in table.scale:
        raise InputError(f"{path.name}: {unknown('scale', scale, table.scale)}")
    size = table.scale[scale]
    if table.of:
        cells = _cells_of_others(path, table, size, scale, settings, seeds, device)
    else:
        base = with_settings(
            merge(read_toml(path.parent / table.base), changes_of(size.set)), settings
        )
        cells = _cells(
            table, size, with_settings(base, [f"engine.device={device}"] if device else []), seeds
        )
    given = path.stem if path.parent == experiments_folder() else str(path)
    said = [word for setting in settings for word in ("--set", setting)]
    said += ["--seeds", ",".join(map(str, seeds))] if seeds else []
    return Reproduction(table, scale, size.note, tuple(cells), given, join(said))


def _cells(
    table: ReproductionTable, size: ScaleTable, base: Values, seeds: Sequence[int] | None
) -> list[Cell]:
    cells = []
    for row in _chosen(table.row, size.rows, "row"):
        for column in _chosen(table.column, size.columns, "column"):
            if row.columns is not None and column.label not in row.columns:
                continue
            values = merge(merge(base, changes_of(row.set)), changes_of(column.set))
            chosen = (
                seeds
                or row.seeds
                or size.column_seeds.get(column.label)
                or size.seeds
                or table.seeds
            )
            cells.append(_cell(row.label, column.label, values, chosen))
    return cells


def _cell(row: str, column: str, values: Values, seeds: Sequence[int]) -> Cell:
    method = values.get("algorithm", {}).get("name", "fedavg")
    if method not in algorithms:
        return Cell(row, column, skipped=f"algorithm '{method}' is not there")
    resolved = [resolve(merge(values, {"seed": seed}), f"'{row} / {column}'") for seed in seeds]
    return Cell(row, column, tuple(resolve_device(config) for config in resolved))


def _cells_of_others(
    path: Path,
    table: ReproductionTable,
    size: ScaleTable,
    scale: str,
    settings: Sequence[str],
    seeds: Sequence[int] | None,
    device: str | None,
) -> list[Cell]:
    cells = [
        cell
        for name in table.of
        for cell in read_reproduction(
            path.parent / f"{name}.toml", scale, settings, seeds, device
        ).cells
    ]
    rows, columns = size.rows, size.columns or table.columns
    return [
        c
        for c in cells
        if (rows is None or c.row in rows) and (columns is None or c.column in columns)
    ]


def _chosen(
    tables: Sequence[CellsTable], labels: Sequence[str] | None, what: str
) -> list[CellsTable]:
    known = {table.label: table for table in tables}
    for label in labels or ():
        if label not in known:
            raise InputError(unknown(what, label, known))
    return [table for table in tables if labels is None or table.label in labels]
