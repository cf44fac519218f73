"""The Section class, and the sections of a run that are mostly tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..tables.calibration_tables import calibration_table
from ..tables.client_tables import clients_table, fleet_personal_table
from ..tables.result_table import PERCENT, TITLES, TextTable, run_table, show
from .charts import Chart, Line, downsample_indices, line_chart
from .run_data import RunData
from .svg import Format, format_number


@dataclass(frozen=True)
class Section:
    """A heading with charts and tables below it."""

    ident: str
    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[TextTable] = ()
    best: Collection[tuple[int, int]] = ()  # row and column of the best cells of the first table
    code: str = ""
    notes: Sequence[str] = ()
    pictures: Sequence[tuple[str, str]] = ()  # names and data URLs
    # small pictures: data URLs, and lines of text below each
    gallery: Sequence[tuple[str, Sequence[str]]] = ()
    # per row of a comparison: its label, and the names and addresses of its runs
    links: Sequence[tuple[str, Sequence[tuple[str, str | None]]]] = ()


def metric_format(metric: str) -> Format:
    """The function that formats values of a metric."""
    return (lambda value: f"{value:.1f}") if metric in PERCENT else (lambda value: f"{value:.3g}")


def figures(run: RunData) -> list[tuple[str, str]]:
    """The names and values of the most important results."""
    tested, summary = run.summary.get("test", {}), run.summary
    shown = [
        (TITLES[m], show(m, tested[m])) for m in ("accuracy", "mse", "nll", "ece") if m in tested
    ]
    low, high = (f"mode_{run.metric}_{end}" for end in ("min", "max"))
    if low in tested and int(summary["modes"]) > 1:
        text = f"{show(run.metric, tested[low])} – {show(run.metric, tested[high])}"
        shown.insert(1, (f"modes, {TITLES[run.metric]}", text))
    shown.append(("uploaded", megabytes(summary["bytes_up"])))
    if "seconds" in summary:
        together = summary.get("trained_together", 1)
        name = (
            f"training time, share of a batch of {together} runs"
            if together > 1
            else "training time"
        )
        shown.append((name, f"{summary['seconds']:,.1f} s"))
    return shown


def megabytes(count: float) -> str:
    """A number of bytes as text with a unit.

    >>> megabytes(48400), megabytes(24_200_000)
    ('48.4 kB', '24.2 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def ledger(run: RunData) -> Section:
    """The communication section: bytes over rounds and in total."""
    up, down, total_up, total_down = [], [], 0.0, 0.0
    for record in run.records:
        total_up, total_down = total_up + record["bytes_up"], total_down + record["bytes_down"]
        up.append(total_up)
        down.append(total_down)
    indices = downsample_indices(len(run.records))
    unit, size = next(
        (u, s)
        for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
        if max(up[-1], down[-1]) >= s or s < 1e4
    )
    x = [float(run.records[at]["round"]) for at in indices]
    lines = [
        Line("uploaded, to the server", [up[at] / size for at in indices], "c1"),
        Line("downloaded, to clients", [down[at] / size for at in indices], "c0 d1"),
    ]
    chart = line_chart(
        "ledger",
        "Bytes since the first round",
        x,
        lines,
        xlabel="round",
        ylabel=f"sum, {unit}",
        from_zero=True,
        format_value=lambda v: f"{v:,.4g}",
    )
    visits = sum(record["visits"] for record in run.records)
    size_of_block = math.ceil(len(run.records) / 10)
    starts = range(0, len(run.records), size_of_block)
    blocks = [run.records[at : at + size_of_block] for at in starts]
    rows = [
        (
            _from_to(block[0]["round"], block[-1]["round"]),
            f"{sum(r['visits'] for r in block):,}",
            megabytes(sum(r["bytes_up"] for r in block)),
            megabytes(sum(r["bytes_down"] for r in block)),
        )
        for block in blocks
    ]
    all_up, all_down = total_up, total_down
    for key, name in (("calibration", "calibration"), ("personalize", "personal models")):
        if after := run.summary.get(key):
            rows.append((name, "–", megabytes(after["bytes_up"]), megabytes(after["bytes_down"])))
            all_up, all_down = all_up + after["bytes_up"], all_down + after["bytes_down"]
    rows.append(("all", f"{visits:,}", megabytes(all_up), megabytes(all_down)))
    if visits:
        rows.append(
            ("per visit, mean", "1", megabytes(total_up / visits), megabytes(total_down / visits))
        )
    table = TextTable(
        "Communication ledger", ("rounds", "visits", "uploaded", "downloaded"), tuple(rows)
    )
    return Section(
        "communication",
        "Communication",
        "A visit is one client training one mode; the bytes that it sends and "
        "receives do not depend on the number of modes.",
        [chart],
        [table],
    )


def _from_to(first: int, last: int) -> str:
    return f"{first} to {last}" if last > first else f"{first}"


def results(run: RunData) -> Section:
    """The section with all metrics."""
    text = "" if run.done else "The run is not finished: these are the results of its latest test."
    tables = [run_table(run.summary, run.records)]
    tables += [
        table
        for table in (
            calibration_table(run.summary),
            clients_table(run.summary),
            fleet_personal_table(run.summary),
        )
        if table is not None
    ]
    return Section("results", "Results", text, tables=tables)


def settings(run: RunData) -> Section:
    """The section with the resolved config and the environment of the run."""
    rows = tuple(
        (
            str(key),
            " ".join(map(str, value))
            if isinstance(value, list)
            else format_number(value)
            if isinstance(value, float)
            else str(value),
        )
        for key, value in run.environment.items()
    )
    tables = [TextTable("Environment", ("what", "value"), rows)] if rows else []
    return Section("config", "Resolved config", "", tables=tables, code=run.config)
