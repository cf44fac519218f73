"""Implements `fedensemble compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...engines.distributed.launch import refuse_ranks
from ...errors import DivergedError
from ...experiment.studies.compare import compare, exploded
from ...report.comparison_report import find_comparison, write_comparison
from ...report.html import write_page
from ...report.html.run_data import raise_on_damaged_files
from ..config import run_config_file
from ..console import console, print_line, print_table, working
from ..progress import ProgressDisplay


def compare_rows(
    file: Path | None,
    settings: Sequence[str],
    algorithms: str | None,
    modes: str | None,
    schedules: str | None,
    seeds: str | None,
    runs: Path,
) -> None:
    """Trains the rows of a comparison, and writes reports of the comparison and of each run."""
    refuse_ranks("compare")
    if file is not None and file.is_dir():
        file = run_config_file(file)
    comparison = find_comparison(file, settings, algorithms, modes, schedules, seeds)
    with ProgressDisplay(console, runs=len(comparison.rows) * len(comparison.seeds)) as display:
        results = compare(
            comparison,
            runs,
            lambda label, seed: display.callbacks(f"{label}, seed {seed}"),
            display.finished,
        )
    diverged = [f"{result.label}, seed {seed}" for result in results for seed in result.failed]
    if not all(result.failed for result in results):
        folder = comparison.folder(runs)
        # Summaries of runs that were finished earlier are read from their folders, which may be
        # damaged.
        with working("Writing the reports"):
            with raise_on_damaged_files(folder):
                table = write_comparison(folder, comparison, results, runs)
            # The comparison's page links to the page of each run.
            for run in (run for result in results for run in result.folders):
                write_page(run)
            page = write_page(folder)
        print_table(table)
        print_line(f"Figure: {folder / 'curves.png'}")
        print_line(f"For a paper: {folder / 'table.tex'}, runs.csv, curves.pdf, references.bib")
        print_line(f"Report: {page}")
    problems = [f"These runs diverged and have no results: {'; '.join(diverged)}."] * bool(diverged)
    if lines := exploded(results):
        problems.append("\n  - ".join(["These runs diverged; their results mean nothing:", *lines]))
    if problems:
        raise DivergedError("\n".join(problems))
