"""Reads the folder of a comparison or of a reproduced table: table, paper's values and runs."""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from ...errors import StoreError
from ..figures.paper_grid import FULL
from ..tables.client_tables import CLIENTS_FILE, CLIENTS_TITLE
from ..tables.result_table import TITLES, TextTable
from .run_data import RunData, optional, read_run


@dataclass(frozen=True)
class RowData:
    """A row of a comparison: those of its runs that still exist, one per seed."""

    label: str
    listed: int  # number of runs that the folder lists
    runs: tuple[RunData, ...]
    group: str = ""  # the row of the table if this is one cell of it
    name: str = ""  # the column of the table if this is one cell of it

    @property
    def short(self) -> str:
        """The name within its group."""
        return self.name or self.label


@dataclass(frozen=True)
class ComparisonData:
    """The contents of a comparison's folder."""

    name: str
    title: str
    metric: str
    table: TextTable
    rows: tuple[RowData, ...]
    paper: Mapping[str, float] = field(default_factory=dict)  # by row label; at full scale only
    notes: Sequence[str] = ()
    pictures: Sequence[tuple[str, str]] = ()  # names and data URLs
    clients: TextTable | None = None  # metrics of clients


def read_comparison_folder(folder: Path) -> ComparisonData:
    """The contents of a comparison's folder, without runs that no longer exist."""
    numbers = _read_csv(folder / "table.csv")
    text = _read(folder / "table.md")
    # A comparison has its table for people in report.md; table.csv is for programs.
    table = _from_markdown(text or _read(folder / "report.md")) or numbers
    if table is None:
        raise StoreError(f"The table in {folder} is empty.")
    heading = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")
    rows = _rows(folder)
    runs = [run for row in rows for run in row.runs]
    scale = optional(folder / "results.json").get("scale", FULL)
    # Next to results of a smaller scale, the paper's values would only stretch the axis.
    paper = _paper(numbers or table) if scale == FULL else {}
    by_client = _read_csv(folder / CLIENTS_FILE)
    name = folder.resolve().name if text else folder.resolve().parent.name
    return ComparisonData(
        name,
        heading,
        _metric(numbers if text and numbers else table, runs),
        table,
        tuple(rows),
        paper,
        _notes(text or _failure_lines(folder)),
        _pictures(folder, text),
        None if by_client is None else replace(by_client, title=CLIENTS_TITLE),
    )


def _rows(folder: Path) -> list[RowData]:
    cells = optional(folder / "results.json").get("cells", [])
    from_cells = [
        (f"{c['row']} / {c['column']}", c["folders"], c["row"], c["column"])
        for c in cells
        if c.get("folders")
    ]
    from_runs = [
        (str(label), places, "", "") for label, places in optional(folder / "runs.json").items()
    ]
    rows = []
    for label, places, group, name in from_cells or from_runs:
        folders = [_find_run(folder, Path(place)) for place in places]
        runs = tuple(read_run(path) for path in folders if path is not None)
        rows.append(RowData(label, len(places), runs, group, name))
    return rows


def _find_run(folder: Path, place: Path) -> Path | None:
    """The folder of a run: as listed, or next to the comparison if both have been moved."""
    parent = folder.resolve().parent
    for candidate in (place, parent / place.name, parent.parent / Path(*place.parts[-2:])):
        if (candidate / "config.toml").exists() and (candidate / "metrics.jsonl").exists():
            return candidate
    return None


def _metric(table: TextTable, runs: Sequence[RunData]) -> str:
    """The metric that the table shows first."""
    if "metric" in table.header and table.rows:
        return table.rows[0][table.header.index("metric")]
    titles = {title: name for name, title in TITLES.items()}
    known = [titles[title] for title in table.header if title in titles]
    return known[0] if known else runs[0].metric if runs else "accuracy"


def _paper(table: TextTable) -> dict[str, float]:
    """The paper's values by row label, from the first column whose title names the paper."""
    column = next((at for at, title in enumerate(table.header) if "paper" in title.lower()), None)
    if column is None:
        return {}
    values: dict[str, float] = {}
    for row in table.rows:
        label = f"{row[0]} / {row[1]}" if table.header[:2] == ("row", "column") else row[0]
        match = re.match(r"\s*(-?\d+(?:\.\d+)?)", row[column])
        if match and label not in values:
            values[label] = float(match[1])
    return values


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} cannot be read: {error}.") from None


def _read_csv(file: Path) -> TextTable | None:
    return _table([tuple(line) for line in csv.reader(io.StringIO(_read(file))) if line])


def _from_markdown(text: str) -> TextTable | None:
    """The first table of a Markdown text, or None."""
    lines = [line.strip() for line in text.splitlines()]
    lines = lines[next((at for at, line in enumerate(lines) if line.startswith("|")), 0) :]
    lines = list(takewhile(lambda line: line.startswith("|"), lines))
    cells = [tuple(c.strip().strip("*") for c in line.strip("|").split("|")) for line in lines]
    return _table(
        [line for line in cells if not all(cell and set(cell) <= set("-: ") for cell in line)]
    )


def _table(lines: list[tuple[str, ...]]) -> TextTable | None:
    if not lines:
        return None
    width = len(lines[0])
    return TextTable("", lines[0], tuple((*line, *[""] * width)[:width] for line in lines[1:]))


def _notes(text: str) -> list[str]:
    """The lines of a Markdown text that are neither table, heading nor figure."""
    lines = [line.strip() for line in text.splitlines()]
    return [
        line.lstrip("- ").strip("`")
        for line in lines
        if line and not line.startswith(("|", "#", "!["))
    ]


def _failure_lines(folder: Path) -> str:
    """The lines of a comparison's report.md that name runs that have diverged."""
    return "\n".join(
        line for line in _read(folder / "report.md").splitlines() if line.startswith("- ")
    )


def _pictures(folder: Path, text: str) -> list[tuple[str, str]]:
    """The figures of a Markdown text as pairs of a name and a data URL."""
    pictures = []
    for name, place in re.findall(r"!\[([^\]]*)\]\(([\w.-]+\.png)\)", text):
        file = folder / place
        if file.is_file():
            pictures.append(
                (name, f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}")
            )
    return pictures
