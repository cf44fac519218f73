"""The sections of a comparison's report."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...experiment.compare import summarise
from ..downsample import caption, grouped
from ..tables import PERCENT, TITLES, TextTable
from .charts import COLOURS, Chart, Line, line_chart, look
from .comparison_data import ComparisonData, RowData
from .dot_plot import DotRow, dot_chart
from .run_data import RunData
from .summary_sections import Section, megabytes, reader, scaled
from .svg import Format

FEW_ROWS = 7  # each with a band


def comparison_sections(found: ComparisonData, out: Path) -> list[Section]:
    """Table, curves, last results, communication, runs and config; what needs runs is left out
    without them.
    """
    paper = found.paper or any(
        "paper" in cell.lower() for row in found.table.rows for cell in row[:2]
    )
    title = "Results against the paper" if paper else "Results"
    table = replace(found.table, title=found.title or title)
    sections = [
        Section(
            "results",
            title,
            _said(found),
            tables=[table],
            notes=found.notes,
            pictures=found.pictures,
        )
    ]
    rows = [row for row in found.rows if any(_tested(run, found.metric) for run in row.runs)]
    if rows:
        lines, dots = [], []
        # a table's row, or all
        for at, group in enumerate(dict.fromkeys(row.group for row in rows)):
            mine = [row for row in rows if row.group == group]
            ends = (f"-{at + 1}" if at else "", f": {group}" if group else "")
            lines += _curves(mine, found.metric, *ends)
            dots.append(_last(mine, found, *ends))
        sections.append(Section("curves", "Curves", "", [*lines, *dots]))
    if any(row.runs for row in found.rows):
        sections.append(_ledger(found))
    if found.rows:
        sections.append(_runs(found, out))
    first = next((run for row in found.rows for run in row.runs), None)
    if first is not None:
        sections.append(
            Section(
                "config",
                "Resolved config",
                f"Of the first run, {first.path.name}.",
                code=first.config,
            )
        )
    return sections


def _said(found: ComparisonData) -> str:
    missing = sum(row.listed - len(row.runs) for row in found.rows)
    text = (
        "Mean ± standard deviation over seeds on the test set."
        if "±" in found.table.csv() and not found.notes
        else ""
    )
    return f"{text} {missing} of the runs are not found any more.".strip() if missing else text


def _tested(run: RunData, metric: str) -> bool:
    return any(metric in record["test"] for record in run.tested)


def _curves(rows: Sequence[RowData], metric: str, ident: str, of: str) -> list[Chart]:
    """The metric of every row: mean over seeds, with a band of one standard deviation if rows are
    few.

    Where there was only one test there is no curve.
    """
    found = [
        [
            {r["round"]: scaled(metric, r["test"].get(metric, float("nan"))) for r in run.tested}
            for run in row.runs
        ]
        for row in rows
    ]
    everywhere = sorted({number for runs in found for tests in runs for number in tests})
    groups = grouped(everywhere)
    if len(groups) < 2:
        return []
    lines, bands = [], False
    for index, (row, runs) in enumerate(zip(rows, found, strict=True)):
        pairs = [_mean_of(runs, group) for group in groups]
        edges: dict[str, list[float]] = {}
        if len(rows) <= FEW_ROWS and len(row.runs) > 1:
            edges, bands = (
                {"low": [m - s for m, s in pairs], "high": [m + s for m, s in pairs]},
                True,
            )
        lines.append(Line(row.short, [pair[0] for pair in pairs], look(index), **edges))
    name = TITLES.get(metric, metric)
    note = "Line: mean over seeds; band: one standard deviation up and down." if bands else ""
    return [
        line_chart(
            f"curve{ident}",
            f"Test {name} over rounds{of}",
            [float(group[-1]) for group in groups],
            lines,
            xlabel="round",
            ylabel=f"test {name}",
            shown=_precise(metric),
            note=f"{note} {caption(len(everywhere))}".strip(),
        )
    ]


def _mean_of(runs: Sequence[Mapping[int, float]], rounds: Sequence[int]) -> tuple[float, float]:
    """Mean and spread over seeds, each of them the mean of its tests in these rounds."""
    held = [[tests[number] for number in rounds if number in tests] for tests in runs]
    means = [sum(values) / len(values) for values in held if values]
    return summarise(means) if means else (float("nan"), 0.0)


def _precise(metric: str) -> Format:
    return (lambda value: f"{value:.2f}") if metric in PERCENT else reader(metric)


def _last(rows: Sequence[RowData], found: ComparisonData, ident: str, of: str) -> Chart:
    """Every run's last result by row, with the paper's number where there is one."""
    metric, form = found.metric, _precise(found.metric)
    drawn, table = [], []
    for at, row in enumerate(rows):
        each = [
            scaled(metric, run.tested[-1]["test"][metric])
            for run in row.runs
            if _tested(run, metric)
        ]
        paper = found.paper.get(row.label)
        mean, spread = summarise(each)
        text = f"{row.label}\nmean {form(mean)}" + (f" ± {form(spread)}" if len(each) > 1 else "")
        text += f"\npaper {form(paper)}" if paper is not None else ""
        points = [(value, f"{text}\nthis run {form(value)}") for value in each]
        drawn.append(DotRow(row.short, points, mean, f"c{at % COLOURS}", paper))
        table.append((row.short, form(mean), form(paper) if paper is not None else "–"))
    legend = [("a run (a seed)", "dot c0"), ("mean", "line c0")]
    if any(row.cross is not None for row in drawn):
        legend.append(("the paper", "cross"))
    return dot_chart(
        f"last{ident}",
        f"Last test of every run{of}",
        drawn,
        xlabel=f"test {TITLES.get(metric, metric)}",
        legend=legend,
        header=("method", "mean", "paper"),
        rows=table,
    )


def _ledger(found: ComparisonData) -> Section:
    rows = []
    for row in found.rows:
        if row.runs:
            up, down = (
                sum(run.summary[key] for run in row.runs) / len(row.runs)
                for key in ("bytes_up", "bytes_down")
            )
            visits = sum(record["visits"] for run in row.runs for record in run.records) / len(
                row.runs
            )
            seconds = [run.summary["seconds"] for run in row.runs if "seconds" in run.summary]
            time = f"{sum(seconds) / len(seconds):,.1f}" if seconds else "–"
            held = [
                run.summary["prediction_bytes"]
                for run in row.runs
                if "prediction_bytes" in run.summary
            ]
            size = megabytes(held[0]) if held else "–"
            rows.append((row.label, f"{visits:,.0f}", megabytes(up), megabytes(down), size, time))
    header = ("method", "visits", "sent up", "sent down", "models to predict with", "time, s")
    return Section(
        "communication",
        "Communication",
        "Of one run, the mean over seeds.",
        tables=[TextTable("Communication ledger", header, tuple(rows))],
    )


def _runs(found: ComparisonData, out: Path) -> Section:
    """The runs by row, linked to their own pages where they have one."""
    links = []
    for row in (row for row in found.rows if row.listed):
        held: list[tuple[str, str | None]] = []
        for run in row.runs:
            state = "" if run.done else " (not finished)"
            page = run.path.resolve() / "report.html"
            address = (
                Path(os.path.relpath(page, out.resolve().parent)).as_posix()
                if page.exists()
                else None
            )
            held.append((f"seed {run.settings.get('seed', '?')}: {run.path.name}{state}", address))
        links.append((row.label, held))
    return Section("runs", "Runs", "", links=links)
