"""A paper's table: rows and columns of a metric over seeds, our results above the paper's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ...experiment.studies.compare import RowResult, mean_and_std
from ...experiment.studies.paper_table import Reproduction
from ...experiment.studies.reproduce import CellResult
from ..palette import LIGHT as COLORS
from ..tables.best import best_places
from ..tables.result_table import NONE, TITLES, UPLOADED, TextTable, scaled, show
from .plots import STYLE, escape_label, one_legend

WAYS = {"test": "standard", "test_last": "last modes", "test_dropout": "the paper's way"}
PAPER, GAP, FULL = "paper", "gap", "full"
LONG = 6  # characters of the longest label that fits below its dot without rotation
HEADER = ("row", "column", "metric", "evaluation", "mean", "standard deviation", "seeds", "paper")


class GridEntry(NamedTuple):
    """One result over seeds: one row of table.csv."""

    row: str
    column: str
    metric: str
    way: str
    values: tuple[float, ...]
    paper: str


@dataclass(frozen=True)
class PaperReport:
    """The content of a report: a table to read, a table for programs, figures and notes.

    `best` has (row, column) of the best cells of the table to read, and `values` the result of each
    seed, for values.json.
    """

    table: TextTable
    numbers: TextTable
    figures: Mapping[str, Figure]
    notes: Sequence[str] = ()
    best: Collection[tuple[int, int]] = ()
    values: Mapping[str, object] = field(default_factory=dict)


def grid(reproduction: Reproduction, results: Sequence[CellResult]) -> PaperReport:
    """The table of rows by columns, its unrounded values and its figure."""
    entries = list_entries(reproduction, results)
    notes = describe_best_columns(reproduction, entries) if reproduction.table.choose else []
    figures = (
        {"table.png": grid_figure(reproduction, entries)} if any(e.values for e in entries) else {}
    )
    table, best = grid_table(reproduction, results, entries)
    return PaperReport(table, numbers_table(entries), figures, notes, best)


def list_entries(reproduction: Reproduction, results: Sequence[CellResult]) -> list[GridEntry]:
    """All results of the table, ordered by row, metric, kind of evaluation and column."""
    table = reproduction.table
    metrics = table.shown or [table.metric]
    entries = []
    for row in dict.fromkeys(result.cell.row for result in results):
        for metric in metrics:
            printed = table.paper.get(row if len(metrics) == 1 else metric, {})
            for way in table.ways:
                for result in results:
                    if result.cell.row == row:
                        column = result.cell.column
                        values = over_seeds(result.runs, metric, way)
                        entries.append(
                            GridEntry(row, column, metric, way, values, printed.get(column, ""))
                        )
    return entries


def over_seeds(runs: RowResult | None, metric: str, way: str) -> tuple[float, ...]:
    """A metric under one kind of evaluation, one value per seed; empty if there is none."""
    summaries = runs.summaries if runs is not None else ()
    return tuple(summary[way][metric] for summary in summaries if metric in summary.get(way, {}))


def numbers_table(entries: Sequence[GridEntry]) -> TextTable:
    """All results without rounding, one per row."""
    rows = []
    for entry in entries:
        mean, spread = mean_and_std(entry.values) if entry.values else (float("nan"), float("nan"))
        ours = (f"{mean:.6g}", f"{spread:.6g}") if entry.values else ("", "")
        count = str(len(entry.values))
        rows.append(
            (entry.row, entry.column, entry.metric, WAYS[entry.way], *ours, count, entry.paper)
        )
    return TextTable("numbers", HEADER, tuple(rows))


def grid_table(
    reproduction: Reproduction, results: Sequence[CellResult], entries: Sequence[GridEntry]
) -> tuple[TextTable, set[tuple[int, int]]]:
    """One line per row, metric and kind of evaluation, with the paper's line below them.

    Rows that were not run are left out.

    Returns:
        the table, and (line, column) of our best result in each line.
    """
    table = reproduction.table
    columns = list(dict.fromkeys(result.cell.column for result in results))
    several, one_row = len(table.shown) > 1, len({entry.row for entry in entries}) == 1
    lines: list[tuple[str, ...]] = []
    best_cells = set()
    ran = [(entry.row, entry.metric) for entry in entries if entry.values]
    for row, metric in dict.fromkeys(ran or [(entry.row, entry.metric) for entry in entries]):
        name = row if not several else TITLES[metric] if one_row else f"{row}, {TITLES[metric]}"
        own = [entry for entry in entries if (entry.row, entry.metric) == (row, metric)]
        best = _best_column(own) if table.choose else None
        for way in table.ways:
            values = {entry.column: entry.values for entry in own if entry.way == way}
            cells = [
                _text(metric, values.get(column, ()), bold=column == best) for column in columns
            ]
            best_cells |= {(len(lines), 2 + place) for place in best_places(metric, cells)}
            lines.append((name, WAYS[way], *cells, *_gap(table.gap, metric, values)))
        paper = table.paper.get(row if not several else metric)
        if paper is not None:
            printed = [paper.get(column, NONE) for column in columns]
            lines.append((name, PAPER, *printed, *([paper.get(GAP, NONE)] if table.gap else [])))
        if not several:
            uploaded = [_uploaded(results, row, column) for column in columns]
            lines.append((name, UPLOADED, *uploaded, *([NONE] if table.gap else [])))
    metric_title = TITLES.get(table.metric, table.metric)
    title = headline(reproduction) if several else f"{headline(reproduction)}; {metric_title}"
    header = ("", "evaluation", *columns, *([GAP] if table.gap else []))
    return TextTable(title, header, tuple(lines)), best_cells


def _text(metric: str, values: Sequence[float], *, bold: bool) -> str:
    if not values:
        return NONE
    mean, spread = mean_and_std(values)
    text = show(metric, mean, spread) if len(values) > 1 else show(metric, mean)
    return f"**{text}**" if bold else text


def _gap(columns: Sequence[str], metric: str, values: Mapping[str, Sequence[float]]) -> list[str]:
    """The difference of the means of two columns, as one cell; no cell if none are named."""
    if not columns:
        return []
    ours = [values.get(column, ()) for column in columns]
    return [
        show(metric, mean_and_std(ours[0])[0] - mean_and_std(ours[1])[0]) if all(ours) else NONE
    ]


def _uploaded(results: Sequence[CellResult], row: str, column: str) -> str:
    """Megabytes that all clients together uploaded, mean over seeds."""
    for result in results:
        if (result.cell.row, result.cell.column) == (row, column) and result.runs is not None:
            megabytes = [summary["bytes_up"] / 1e6 for summary in result.runs.summaries]
            return f"{mean_and_std(megabytes)[0]:.1f}"
    return NONE


def _best_column(entries: Sequence[GridEntry]) -> str | None:
    means = {
        entry.column: mean_and_std(entry.values)[0]
        for entry in entries
        if entry.way == "test" and entry.values
    }
    return max(means, key=lambda column: means[column]) if means else None


def describe_best_columns(reproduction: Reproduction, entries: Sequence[GridEntry]) -> list[str]:
    """One sentence per row that names its best column."""
    sentences = []
    for row in dict.fromkeys(entry.row for entry in entries):
        best = _best_column([entry for entry in entries if entry.row == row])
        if best is not None:
            sentences.append(f"Best for {row}: {best}.")
    return sentences


def paper_number(text: str) -> tuple[float, float] | None:
    """Mean and standard deviation of a value as the paper prints it; None for an empty text.

    >>> paper_number("95.08 ± 0.3"), paper_number("66.19"), paper_number("")
    ((95.08, 0.3), (66.19, 0.0), None)
    """
    if not text:
        return None
    mean, _, spread = text.partition("±")
    return float(mean), float(spread or 0)


def grid_figure(reproduction: Reproduction, entries: Sequence[GridEntry]) -> Figure:
    """One panel per row and metric: our results and, at full scale, the paper's."""
    ways = reproduction.table.ways
    panels = list(dict.fromkeys((entry.row, entry.metric) for entry in entries if entry.values))
    several = len(reproduction.table.shown) > 1
    columns = min(len(panels), 3 if len(panels) in (3, 5, 6) else 2)
    rows = -(-len(panels) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * columns, 3.9 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis, (row, metric) in zip(axes, panels, strict=False):
            own = [entry for entry in entries if (entry.row, entry.metric) == (row, metric)]
            names = list(dict.fromkeys(entry.column for entry in own))
            scale = scaled(metric, 1.0)
            for place, (way, marker) in enumerate(zip(ways, ("o", "s"), strict=False)):
                points = [
                    (names.index(e.column), *mean_and_std(e.values))
                    for e in own
                    if e.way == way and e.values
                ]
                _draw_dots(
                    axis,
                    points,
                    scale,
                    marker,
                    COLORS[place],
                    f"ours, {WAYS[way]}",
                    0.16 * (place - 0.5),
                )
            printed = [
                (names.index(e.column), paper_number(e.paper)) for e in own if e.way == ways[0]
            ]
            papers = [
                (x, *number)
                for x, number in printed
                if number is not None and shows_paper(reproduction)
            ]
            _draw_dots(axis, papers, 1, "D", "black", "paper", 0.24, hollow=True)
            long = max(map(len, names)) > LONG
            axis.set_xticks(
                range(len(names)),
                list(map(escape_label, names)),
                rotation=30 if long else 0,
                ha="right" if long else "center",
            )
            axis.set(
                ylabel=TITLES.get(metric, metric),
                title=TITLES.get(metric, metric) if several else escape_label(row),
            )
            axis.set_xlim(-0.5, len(names) - 0.5)
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        one_legend(figure, axes)
        figure.suptitle(escape_label(headline(reproduction)))
        return figure


def _draw_dots(
    axis: mpl.axes.Axes,
    points: Sequence[tuple[int, float, float]],
    scale: float,
    marker: str,
    color: str,
    label: str,
    shift: float,
    *,
    hollow: bool = False,
) -> None:
    if not points:
        return
    x, mean, spread = (np.array(values, float) for values in zip(*points, strict=True))
    axis.errorbar(
        x + shift,
        scale * mean,
        scale * spread,
        fmt=marker,
        color=color,
        capsize=3,
        markersize=6,
        markerfacecolor="white" if hollow else color,
        label=label,
    )


def shows_paper(reproduction: Reproduction) -> bool:
    """Whether a figure shows the paper's results, which would dwarf those of a smaller scale."""
    return reproduction.scale == FULL


def headline(reproduction: Reproduction) -> str:
    """The title, with the scale unless it is full, and a warning if the data are synthetic."""
    sources = {config.data["source"] for cell in reproduction.cells for config in cell.configs}
    synthetic = ": made-up data" if any(source.startswith("stand-in") for source in sources) else ""
    return (reproduction.table.title or reproduction.name) + (
        f" ({reproduction.scale}{synthetic})" if reproduction.scale != FULL else ""
    )
