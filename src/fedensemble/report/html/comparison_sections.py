"""The sections of a comparison's page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...experiment.studies.compare import mean_and_std
from ..downsample import caption, grouped
from ..seed_curves import curve_over_seeds, rounds_with_tests
from ..tables.client_tables import CLIENTS_TITLE, ON_CLIENTS
from ..tables.result_table import (
    BATCH,
    EXPLAIN_LAST_MODES,
    LAST_MODES,
    PERCENT,
    SHARED_TIME,
    TITLES,
    TextTable,
    batch_size,
    fewest_tests,
    last_tests,
    mean_of_last,
    scaled,
)
from .best_cells import best_cells, is_paper_table
from .charts import COLORS, Chart, Line, line_chart, line_style
from .comparison_data import ComparisonData, RowData
from .dot_plot import DotRow, dot_chart
from .run_data import RunData
from .summary_sections import Section, megabytes, metric_format
from .svg import Format


def comparison_sections(comparison: ComparisonData, out: Path) -> list[Section]:
    """Table, curves, last results, communication, runs and config, as far as there are runs."""
    # A line of published results is called "paper" in the column of evaluations. A method may have
    # the word in its name, as in "the paper's schedule".
    paper = comparison.paper or any("paper" in row[:2] for row in comparison.table.rows)
    title = "Results against the paper" if paper else "Results"
    table = replace(comparison.table, title=comparison.title or title)
    sections = [
        Section(
            "results",
            title,
            _introduction(comparison),
            tables=[table],
            best=best_cells(table, comparison.metric),
            notes=comparison.notes,
            pictures=comparison.pictures,
        )
    ]
    if comparison.clients is not None:
        sections.append(
            Section("per-client", CLIENTS_TITLE, ON_CLIENTS, tables=[comparison.clients])
        )
    rows = [
        row for row in comparison.rows if any(_tested(run, comparison.metric) for run in row.runs)
    ]
    if rows:
        lines, dots = [], []
        # One chart of each kind per row of a reproduced table; a comparison has one group.
        for at, group in enumerate(dict.fromkeys(row.group for row in rows)):
            members = [row for row in rows if row.group == group]
            suffixes = (f"-{at + 1}" if at else "", f": {group}" if group else "")
            lines += _curves(members, comparison.metric, *suffixes)
            dots.append(_last_results(members, comparison, *suffixes))
        sections.append(Section("curves", "Curves", "", [*lines, *dots]))
    if any(row.runs for row in comparison.rows):
        sections.append(_ledger(comparison))
    if comparison.rows:
        sections.append(_runs(comparison, out))
    first = next((run for row in comparison.rows for run in row.runs), None)
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


def _introduction(comparison: ComparisonData) -> str:
    missing = sum(row.listed - len(row.runs) for row in comparison.rows)
    text = (
        "Mean ± standard deviation over seeds on the test set."
        if "±" in comparison.table.csv() and not comparison.notes
        else ""
    )
    if best_cells(comparison.table, comparison.metric):
        line = "row" if is_paper_table(comparison.table) else "column"
        text += f" A star marks the best number of its {line}."
    if any(title.endswith(f", {LAST_MODES}") for title in comparison.table.header):
        text += f" {EXPLAIN_LAST_MODES.capitalize()}."
    if BATCH in comparison.table.header:
        text += f" {SHARED_TIME.capitalize()}."
    return f"{text} {missing} of the runs are not found.".strip() if missing else text.strip()


def _tested(run: RunData, metric: str) -> bool:
    return any(metric in record["test"] for record in run.tested)


def _curves(rows: Sequence[RowData], metric: str, ident: str, of: str) -> list[Chart]:
    """The metric of every row over rounds: mean over seeds, with bands of one standard deviation.

    With a single test there is no curve.
    """
    rounds = rounds_with_tests([run.records for row in rows for run in row.runs])
    groups = grouped(rounds)
    if len(groups) < 2:
        return []
    lines = []
    for index, row in enumerate(rows):
        mean, spread = curve_over_seeds([run.records for run in row.runs], metric, groups)
        low, high = (
            [m + sign * s for m, s in zip(mean, spread, strict=True)] if len(row.runs) > 1 else []
            for sign in (-1, 1)
        )
        lines.append(Line(row.short, mean, line_style(index), low, high))
    name = TITLES.get(metric, metric)
    bands = any(line.low for line in lines)
    note = "Line: mean over seeds; band: one standard deviation up and down." if bands else ""
    return [
        line_chart(
            f"curve{ident}",
            f"Test {name} over rounds{of}",
            [float(group[-1]) for group in groups],
            lines,
            xlabel="round",
            ylabel=f"test {name}",
            format_value=_precise_format(metric),
            note=f"{note} {caption(len(rounds))}".strip(),
        )
    ]


def _precise_format(metric: str) -> Format:
    return (lambda value: f"{value:.2f}") if metric in PERCENT else metric_format(metric)


def _last_results(
    rows: Sequence[RowData], comparison: ComparisonData, ident: str, of: str
) -> Chart:
    """The last result of every run by row, with the paper's value if there is one."""
    metric, form = comparison.metric, _precise_format(comparison.metric)
    drawn, table = [], []
    tests = fewest_tests(
        [run.records for row in rows for run in row.runs if _tested(run, metric)], metric
    )
    for at, row in enumerate(rows):
        values = [
            scaled(metric, run.tested[-1]["test"][metric])
            for run in row.runs
            if _tested(run, metric)
        ]
        paper = comparison.paper.get(row.label)
        mean, spread = mean_and_std(values)
        text = f"{row.label}\nmean {form(mean)}" + (f" ± {form(spread)}" if len(values) > 1 else "")
        text += f"\npaper {form(paper)}" if paper is not None else ""
        points = [(value, f"{text}\nthis run {form(value)}") for value in values]
        drawn.append(DotRow(row.short, points, mean, f"c{at % COLORS}", paper))
        means = [
            scaled(metric, mean_of_last(run.records, metric, tests))
            for run in row.runs
            if _tested(run, metric)
        ]
        table.append(
            (
                row.short,
                *(_over_seeds(form, each) for each in (values, means)[: min(tests, 2)]),
                *[form(paper) if paper is not None else "–"] * bool(comparison.paper),
            )
        )
    legend = [("a run (a seed)", "dot c0"), ("mean", "line c0")]
    if any(row.cross is not None for row in drawn):
        legend.append(("the paper", "cross"))
    return dot_chart(
        f"last{ident}",
        f"Last test of every run{of}",
        drawn,
        xlabel=f"test {TITLES.get(metric, metric)}",
        legend=legend,
        header=(
            "method",
            "last test",
            *[last_tests(tests)] * (tests > 1),
            *["paper"] * bool(comparison.paper),
        ),
        rows=table,
    )


def _over_seeds(form: Format, values: Sequence[float]) -> str:
    mean, spread = mean_and_std(values)
    return f"{form(mean)} ± {form(spread)}" if len(values) > 1 else form(mean)


def _ledger(comparison: ComparisonData) -> Section:
    """Visits, traffic, model size and time of each row."""
    rows = []
    for row in comparison.rows:
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
            sizes = [
                run.summary["prediction_bytes"]
                for run in row.runs
                if "prediction_bytes" in run.summary
            ]
            size = megabytes(sizes[0]) if sizes else "–"
            traffic = (f"{visits:,.0f}", megabytes(up), megabytes(down))
            batch = batch_size([run.summary for run in row.runs])
            rows.append((row.label, *traffic, size, time, batch))
    header = ("method", "visits", "uploaded", "downloaded", "prediction models", "time, s", BATCH)
    return Section(
        "communication",
        "Communication",
        f"Per run, the mean over seeds; {SHARED_TIME}.",
        tables=[TextTable("Communication ledger", header, tuple(rows))],
    )


def _runs(comparison: ComparisonData, out: Path) -> Section:
    """The runs by row, with links to the pages that exist."""
    links = []
    for row in (row for row in comparison.rows if row.listed):
        row_links: list[tuple[str, str | None]] = []
        for run in row.runs:
            state = "" if run.done else " (not finished)"
            page = run.path.resolve() / "report.html"
            address = (
                Path(os.path.relpath(page, out.resolve().parent)).as_posix()
                if page.exists()
                else None
            )
            row_links.append(
                (f"seed {run.settings.get('seed', '?')}: {run.path.name}{state}", address)
            )
        links.append((row.label, row_links))
    return Section("runs", "Runs", "", links=links)
