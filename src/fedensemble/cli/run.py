"""What `fedensemble run` does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ..engines.distributed.launch import job
from ..experiment.compare import run_folder
from ..experiment.profile import profiling
from ..experiment.run import run
from ..experiment.worker import follow
from ..report.html import write_page
from ..report.profile_tables import profile_tables
from ..report.run_report import write_report
from .config import load_config
from .console import console, print_line, print_table
from .progress import Live


def run_config(
    file: Path | None,
    settings: Sequence[str] | None,
    device: str | None,
    out: Path | None,
    runs: Path,
    *,
    checkpoint_seconds: float,
    rank_timeout: float,
    profile: bool,
) -> None:
    """Trains an ensemble and reports on it; of several ranks, all train and the first one does the
    rest.
    """
    with job(rank_timeout) as ranks:
        config, _ = ranks.together(lambda: load_config(file, settings, device))
        folder = out or run_folder(config, runs)
        if ranks.rank:
            return follow(config, ranks)
        with profiling() if profile else nullcontext() as timed, Live(console) as live:
            watcher = live.watcher(config.name)
            summary = run(
                config, folder, watcher, checkpoint_seconds=checkpoint_seconds, ranks=ranks
            )
    for table in profile_tables(timed.write(folder)) if timed is not None and timed.rounds else ():
        print_table(table)
    if timed is not None and not timed.rounds:
        nothing = "There was nothing to profile: this run is finished. To train it anew, give another --out."
        print_line(nothing)
    print_table(write_report(folder, summary))
    print_line(f"Run: {folder}")
    print_line(f"Report: {write_page(folder)}")
