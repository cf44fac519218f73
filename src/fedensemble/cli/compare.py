"""What `fedensemble compare` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..engines.distributed.launch import refuse_ranks
from ..errors import DivergedError
from ..experiment.compare import compare
from ..report.comparison_report import find_comparison, write_comparison
from ..report.html import write_page
from ..report.html.run_data import expecting_whole_files
from .console import console, print_line, print_table
from .progress import Live


def compare_rows(
    file: Path | None,
    settings: Sequence[str],
    algorithms: str | None,
    modes: str | None,
    schedules: str | None,
    seeds: str | None,
    runs: Path,
) -> None:
    """Trains the rows of a comparison and reports on it, and on each of its runs."""
    refuse_ranks("compare")
    wanted = find_comparison(file, settings, algorithms, modes, schedules, seeds)
    with Live(console, runs=len(wanted.rows) * len(wanted.seeds)) as live:
        results = compare(
            wanted, runs, lambda label, seed: live.watcher(f"{label}, seed {seed}"), live.finished
        )
    failed = [f"{result.label}, seed {seed}" for result in results for seed in result.failed]
    if not all(result.failed for result in results):
        folder = wanted.folder(runs)
        # runs that were finished before are read from their folders
        with expecting_whole_files(folder):
            table = write_comparison(folder, wanted, results)
        print_table(table)
        for run in (run for result in results for run in result.folders):
            write_page(run)  # the comparison's page links to them
        print_line(f"Picture: {folder / 'curves.png'}")
        print_line(f"Report: {write_page(folder)}")
    if failed:
        raise DivergedError(f"diverged, and without numbers: {'; '.join(failed)}.")
