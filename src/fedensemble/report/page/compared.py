"""The sections of a comparison's report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...experiment.compare import summarise
from ..tables import PERCENT, TITLES, TextTable
from .charts import Chart, Line, Point, line_chart, look, point_chart, thin
from .data import RunData
from .sections import Section, megabytes, reader, scaled
from .svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Format, Scale, scale, tag
from .tables import ComparisonData, RowData

FEW_ROWS = 7  # each with a band


def comparison_sections(found: ComparisonData, out: Path) -> list[Section]:
    """Table, curves, last results, communication, runs and config; what needs runs is left out without them."""
    paper = found.paper or any("paper" in cell.lower() for row in found.table.rows for cell in row[:2])
    title = "Results against the paper" if paper else "Results"
    table = replace(found.table, title=found.title or title)
    sections = [Section("results", title, _said(found), tables=[table], notes=found.notes, pictures=found.pictures)]
    rows = [row for row in found.rows if any(_tested(run, found.metric) for run in row.runs)]
    if rows:
        sections.append(Section("curves", "Curves", "", [*_curves(rows, found.metric), _last(rows, found)]))
    if any(row.runs for row in found.rows):
        sections.append(_ledger(found))
    if found.rows:
        sections.append(_runs(found, out))
    first = next((run for row in found.rows for run in row.runs), None)
    if first is not None:
        sections.append(
            Section("config", "Resolved config", f"Of the first run, {first.path.name}.", code=first.config)
        )
    return sections


def _said(found: ComparisonData) -> str:
    missing = sum(row.listed - len(row.runs) for row in found.rows)
    text = (
        "Mean ± standard deviation over seeds on the test set." if "±" in found.table.csv() and not found.notes else ""
    )
    return f"{text} {missing} of the runs are not found any more.".strip() if missing else text


def _tested(run: RunData, metric: str) -> bool:
    return any(metric in record["test"] for record in run.tested)


def _curves(rows: Sequence[RowData], metric: str) -> list[Chart]:
    """The metric of every row: mean over seeds, with a band of one standard deviation if rows are few.

    Where there was only one test there is no curve.
    """
    by_round: list[dict[int, list[float]]] = []
    for row in rows:
        held: dict[int, list[float]] = {}
        for run in row.runs:
            for record in run.tested:
                held.setdefault(record["round"], []).append(scaled(metric, record["test"].get(metric, float("nan"))))
        by_round.append(held)
    everywhere = sorted({number for held in by_round for number in held})
    rounds = [everywhere[at] for at in thin(len(everywhere))]
    if len(rounds) < 2:
        return []
    lines = []
    for index, (row, held) in enumerate(zip(rows, by_round, strict=True)):
        pairs = [summarise(held[number]) if number in held else (float("nan"), 0.0) for number in rounds]
        mean = [pair[0] for pair in pairs]
        bands: dict[str, list[float]] = {}
        if len(rows) <= FEW_ROWS and len(row.runs) > 1:
            bands = {"low": [m - s for m, s in pairs], "high": [m + s for m, s in pairs]}
        lines.append(Line(row.label, mean, look(index), **bands))
    name = TITLES.get(metric, metric)
    return [line_chart("curve", f"Test {name} over rounds", [float(r) for r in rounds], lines, xlabel="round",
                       ylabel=f"test {name}", shown=_precise(metric))]  # fmt: skip


def _precise(metric: str) -> Format:
    return (lambda value: f"{value:.2f}") if metric in PERCENT else reader(metric)


def _last(rows: Sequence[RowData], found: ComparisonData) -> Chart:
    """Every run's last result by row, with the paper's number where the table has one."""
    metric, form = found.metric, _precise(found.metric)
    values = [
        [scaled(metric, run.tested[-1]["test"][metric]) for run in row.runs if _tested(run, metric)] for row in rows
    ]
    said = [found.paper.get(row.label) for row in rows]
    across = Scale(0.0, len(rows) + 1.0, LEFT, WIDTH - RIGHT)
    up = scale(
        [v for each in values for v in each] + [p for p in said if p is not None], HEIGHT - BOTTOM, TOP, room=0.1
    )
    points, over, table = [], [], []
    for at, (row, each, paper) in enumerate(zip(rows, values, said, strict=True)):
        mean, spread = summarise(each)
        text = f"{row.label}\nmean {form(mean)}" + (f" ± {form(spread)}" if len(each) > 1 else "")
        text += f"\npaper {form(paper)}" if paper is not None else ""
        points += [Point(at + 1.0, value, f"{text}\nthis run {form(value)}", f"c{at % 7}") for value in each]
        x, y = across(at + 1.0), up(mean)
        over.append(tag("line", x1=x - 8, x2=x + 8, y1=y, y2=y, class_=f"line c{at % 7}"))
        if paper is not None:
            y = up(paper)
            over.append(tag("path", d=f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", class_="cross"))
        table.append((f"{at + 1}", row.label, form(mean), form(paper) if paper is not None else "–"))
    legend = [("a run (a seed)", "dot c0"), ("mean", "line c0")]
    if any(paper is not None for paper in said):
        legend.append(("the paper", "cross"))
    return point_chart(
        "last", "Last test of every run, by row of the table", points, xlabel="row of the table",
        ylabel=f"test {TITLES.get(metric, metric)}", across=across, up=up, over=over, legend=legend,
        header=("row", "method", "mean", "paper"), rows=table,
        xformat=lambda v: f"{v:.0f}" if v == int(v) and 1 <= v <= len(rows) else "",
    )  # fmt: skip


def _ledger(found: ComparisonData) -> Section:
    rows = []
    for row in found.rows:
        if row.runs:
            up, down = (sum(run.summary[key] for run in row.runs) / len(row.runs) for key in ("bytes_up", "bytes_down"))
            visits = sum(record["visits"] for run in row.runs for record in run.records) / len(row.runs)
            seconds = [run.summary["seconds"] for run in row.runs if "seconds" in run.summary]
            time = f"{sum(seconds) / len(seconds):,.1f}" if seconds else "–"
            rows.append((row.label, f"{visits:,.0f}", megabytes(up), megabytes(down), time))
    header = ("method", "visits", "sent up", "sent down", "time, s")
    return Section("communication", "Communication", "Of one run, the mean over seeds.",
                   tables=[TextTable("Communication ledger", header, tuple(rows))])  # fmt: skip


def _runs(found: ComparisonData, out: Path) -> Section:
    """The runs by row, linked to their own pages where they have one."""
    links = []
    for row in found.rows:
        held: list[tuple[str, str | None]] = []
        for run in row.runs:
            state = "" if run.done else " (not finished)"
            page = run.path.resolve() / "report.html"
            address = Path(os.path.relpath(page, out.resolve().parent)).as_posix() if page.exists() else None
            held.append((f"seed {run.settings.get('seed', '?')}: {run.path.name}{state}", address))
        links.append((row.label, held))
    return Section("runs", "Runs", "", links=links)
