"""Builds a page and writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ...checkpoint_file import write_bytes
from ...version import VERSION
from ..palette import DARK, LIGHT
from ..run_report import read_report, write_report
from ..tables.result_table import TextTable
from .comparison_data import read_comparison_folder
from .comparison_sections import comparison_sections
from .curve_sections import curves, spread
from .distillation_section import distillation, distilled_figures
from .fleet_section import fleet, is_fleet
from .prediction_sections import clients, predictions
from .run_data import RunData, is_run, raise_on_damaged_files, read_run
from .summary_sections import figures, ledger, results, settings
from .uncertainty_sections import uncertainty

FILE = "report.html"
LONG = 28  # characters of a cell that may be broken over lines


def write_page(folder: Path, out: Path | None = None) -> Path:
    """Writes the page of a run or a comparison, by default as report.html; returns its path."""
    file = out or folder / FILE
    with raise_on_damaged_files(folder):
        page = run_page(folder) if is_run(folder) else comparison_page(folder, file)
    write_bytes(file, page.encode("utf-8", "backslashreplace"))
    return file


def write_all(folder: Path, out: Path | None = None) -> tuple[TextTable, Path]:
    """Writes the page and, for a run, report.md and curves.png; returns the table and the page.

    Args:
        out: the file of the page; if given, nothing else is written.
    """
    with raise_on_damaged_files(folder):
        if is_run(folder):
            table = write_report(folder) if out is None else read_report(folder)[0]
        else:
            table = read_comparison_folder(folder).table
    return table, write_page(folder, out)


def run_page(folder: Path, version: str = "") -> str:
    """The page of one run.

    Args:
        version: of the run's files, for a page that follows them (`report.live`).
    """
    run = read_run(folder)
    if run.distillation:
        return _distilled_page(run, version)
    on_clients = fleet(run) if is_fleet(run) and run.clients else clients(run)
    shown = [curves(run), spread(run), *predictions(run), *uncertainty(run), on_clients]
    sections = [*shown, ledger(run), results(run), settings(run)]
    done, rounds = len(run.records), run.settings["rounds"]
    warnings = [f"Diverged: {run.diverged}"] if run.diverged else []
    warnings += [] if run.done else [f"Not finished: {done} of {rounds} rounds."]
    warnings += [run.changes] if run.done and run.changes else []
    return _render(
        title=str(run.settings["name"]),
        subtitle=_subtitle(run),
        warning=" ".join(warnings),
        figures=figures(run),
        sections=sections,
        files_version=version,
    )


def _distilled_page(run: RunData, version: str) -> str:
    """The page of a distilled model: without rounds, there are no curves and no communication."""
    teacher, settings_ = run.distillation["teacher"], run.distillation["settings"]
    parts = [
        f"1 {run.settings['model']['name']}",
        f"distilled from {teacher['modes']} modes",
        f"{settings_['kind']}",
        f"{run.distillation['inputs']:,} inputs",
        f"seed {settings_['seed']}",
    ]
    return _render(
        title=str(run.summary["name"]),
        subtitle=_join(parts),
        warning=run.changes,
        figures=distilled_figures(run),
        sections=[*distillation(run), *predictions(run), clients(run), settings(run)],
        files_version=version,
    )


def message_page(title: str, message: str, version: str) -> str:
    """The page of a run that has nothing to show yet, or whose files are damaged; it follows it."""
    return _render(
        title=title, subtitle="", warning=message, figures=[], sections=[], files_version=version
    )


def comparison_page(folder: Path, file: Path) -> str:
    """The page of a comparison."""
    comparison = read_comparison_folder(folder)
    runs = [run for row in comparison.rows for run in row.runs]
    unfinished = sum(not run.done for run in runs)
    warnings = [f"Not finished: {unfinished} of {len(runs)} runs."] if unfinished else []
    warnings += [f"Diverged: {run.path.name}: {run.diverged}" for run in runs if run.diverged]
    warnings += [run.changes for run in runs if run.changes]
    rows = len(comparison.rows) or len(comparison.table.rows)
    return _render(
        title=comparison.name,
        subtitle=comparison.title or f"Comparison of {rows} rows, {len(runs)} runs",
        warning=" ".join(warnings),
        figures=[],
        sections=comparison_sections(comparison, file),
    )


def _subtitle(run: RunData) -> str:
    values = run.settings
    ensemble, modes = values["ensemble"], int(values["ensemble"]["modes"])
    parts = [
        f"{modes} mode{'s' * (modes > 1)} of {values['model']['name']}",
        f"{values['algorithm']['name']}, {ensemble['schedule']}",
        *([f"average {run.average}"] if run.average else []),
        f"{run.clients.get('source') or values['data']['source']}"
        + (f", {run.clients['clients']} clients" if run.clients else ""),
        f"{ensemble['clients_per_round']} per round",
        f"{values['rounds']} rounds",
        f"seed {values['seed']}",
    ]
    return _join(parts)


def _join(parts: Sequence[str]) -> str:
    """Parts of a subtitle on one line, which breaks between them only."""
    return " · ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _render(**content: Any) -> str:
    values: Mapping[str, Any] = {"files_version": "", **content, "version": VERSION}
    return _environment().get_template("page.html.j2").render(**values)


@cache
def _environment() -> Environment:
    loader = PackageLoader("fedensemble.report.html", "templates")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["css_class"] = _css_class
    environment.globals["colors"] = list(zip(LIGHT, DARK, strict=True))
    return environment


def _css_class(cell: str) -> str:
    """How a cell is set: text to the left, long text on several lines; no class for numbers."""
    if len(cell) > LONG:
        return "words long"
    return "" if cell[:1] in "-–0123456789" else "words"
