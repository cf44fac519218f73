"""Reads a comparison's folder, or that of a reproduced table: its table, the paper's numbers, and
the runs it lists.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import StoreError
from ..figures.paper_grid import FULL
from ..tables import TITLES, TextTable
from .run_data import RunData, optional, read_run


@dataclass(frozen=True)
class RowData:
    """A row of a comparison: its runs that are still there, one a seed."""

    label: str
    listed: int  # runs it had
    runs: tuple[RunData, ...]
    group: str = ""  # the table's row, where the label is that of a cell
    name: str = ""  # in its group

    @property
    def short(self) -> str:
        """What it is called beside others of its group."""
        return self.name or self.label


@dataclass(frozen=True)
class ComparisonData:
    """A comparison as its folder has it."""

    name: str
    title: str
    metric: str
    table: TextTable
    rows: tuple[RowData, ...]
    paper: Mapping[str, float] = field(default_factory=dict)  # by row label; at full scale only
    notes: Sequence[str] = ()
    pictures: Sequence[tuple[str, str]] = ()  # names and data addresses


def read_comparison_folder(folder: Path) -> ComparisonData:
    """What a comparison's folder says; runs that are not found any more are left out."""
    numbers = _read_csv(folder / "table.csv")
    text = _read(folder / "table.md")
    table = _from_markdown(text) or numbers
    if table is None:
        raise StoreError(f"The table in {folder} is empty.")
    heading = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("#")), "")
    rows = _rows(folder)
    runs = [run for row in rows for run in row.runs]
    scale = optional(folder / "results.json").get("scale", FULL)
    # beside a small trial they only squeeze the picture
    paper = _paper(numbers or table) if scale == FULL else {}
    name = folder.resolve().name if text else folder.resolve().parent.name
    return ComparisonData(
        name,
        heading,
        _metric(numbers or table, runs),
        table,
        tuple(rows),
        paper,
        _notes(text or _failed(folder)),
        _pictures(folder, text),
    )


def _rows(folder: Path) -> list[RowData]:
    cells = optional(folder / "results.json").get("cells", [])
    listed = [
        (f"{c['row']} / {c['column']}", c["folders"], c["row"], c["column"])
        for c in cells
        if c.get("folders")
    ]
    whole = [
        (str(label), places, "", "") for label, places in optional(folder / "runs.json").items()
    ]
    rows = []
    for label, places, group, name in listed or whole:
        found = [_find(folder, Path(place)) for place in places]
        runs = tuple(read_run(place) for place in found if place is not None)
        rows.append(RowData(label, len(places), runs, group, name))
    return rows


def _find(folder: Path, place: Path) -> Path | None:
    """A run's folder: where it was, or, if everything has been moved together, beside the
    comparison.
    """
    beside = folder.resolve().parent
    for candidate in (place, beside / place.name, beside.parent / Path(*place.parts[-2:])):
        if (candidate / "config.toml").exists() and (candidate / "metrics.jsonl").exists():
            return candidate
    return None


def _metric(table: TextTable, runs: Sequence[RunData]) -> str:
    """What the table is about."""
    if "metric" in table.header and table.rows:
        return table.rows[0][table.header.index("metric")]
    titles = {title: name for name, title in TITLES.items()}
    known = [titles[title] for title in table.header if title in titles]
    return known[0] if known else runs[0].metric if runs else "accuracy"


def _paper(table: TextTable) -> dict[str, float]:
    """The paper's numbers by row label, from the first column that names the paper."""
    column = next((at for at, title in enumerate(table.header) if "paper" in title.lower()), None)
    if column is None:
        return {}
    found: dict[str, float] = {}
    for row in table.rows:
        label = f"{row[0]} / {row[1]}" if table.header[:2] == ("row", "column") else row[0]
        match = re.match(r"\s*(-?\d+(?:\.\d+)?)", row[column])
        if match and label not in found:
            found[label] = float(match[1])
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8") if file.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{file} cannot be read: {error}.") from None


def _read_csv(file: Path) -> TextTable | None:
    return _table([tuple(line) for line in csv.reader(io.StringIO(_read(file))) if line])


def _from_markdown(text: str) -> TextTable | None:
    """The first table of a Markdown text."""
    lines = [line.strip() for line in text.splitlines()]
    cells = [
        tuple(c.strip().strip("*") for c in line.strip("|").split("|"))
        for line in lines
        if line.startswith("|")
    ]
    return _table(
        [line for line in cells if not all(cell and set(cell) <= set("-: ") for cell in line)]
    )


def _table(lines: list[tuple[str, ...]]) -> TextTable | None:
    if not lines:
        return None
    width = len(lines[0])
    return TextTable("", lines[0], tuple((*line, *[""] * width)[:width] for line in lines[1:]))


def _notes(text: str) -> list[str]:
    """The paragraphs of a Markdown text that are neither table, heading nor picture."""
    lines = [line.strip() for line in text.splitlines()]
    return [
        line.lstrip("- ").strip("`")
        for line in lines
        if line and not line.startswith(("|", "#", "!["))
    ]


def _failed(folder: Path) -> str:
    """The lines of a comparison's report.md that say which runs have diverged."""
    return "\n".join(
        line for line in _read(folder / "report.md").splitlines() if line.startswith("- ")
    )


def _pictures(folder: Path, text: str) -> list[tuple[str, str]]:
    """The pictures of a Markdown text, as addresses that hold them."""
    found = []
    for name, place in re.findall(r"!\[([^\]]*)\]\(([\w.-]+\.png)\)", text):
        file = folder / place
        if file.is_file():
            found.append(
                (name, f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}")
            )
    return found
