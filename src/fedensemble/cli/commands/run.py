"""Implements `fedensemble run`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ...engines.distributed.launch import job
from ...errors import DivergedError
from ...experiment.extension import find_extendable
from ...experiment.profile import profiling
from ...experiment.run import run
from ...experiment.studies.compare import run_folder
from ...experiment.worker import follow_rank0
from ...report.html import write_page
from ...report.run_report import write_report
from ...report.tables.profile_tables import profile_tables
from ..config import load_config
from ..console import console, print_line, print_table, working
from ..progress import ProgressDisplay


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
    """Trains an ensemble and writes its report; under torchrun, only rank 0 writes files."""
    # The folder of a run stands for its config, and training continues in it.
    out = file if out is None and file is not None and file.is_dir() else out
    with job(rank_timeout) as ranks:
        config, _ = ranks.together(lambda: load_config(file, settings, device))
        folder = out or run_folder(config, runs)
        if ranks.rank:
            return follow_rank0(config, ranks)
        with (
            profiling() if profile else nullcontext() as timings,
            ProgressDisplay(console) as display,
        ):
            summary = run(
                config,
                folder,
                display.callbacks(config.name),
                checkpoint_seconds=checkpoint_seconds,
                ranks=ranks,
                extendable=() if out else find_extendable(config, folder.parent),
            )
    if timings is not None and timings.rounds:
        for table in profile_tables(timings.write(folder)):
            print_table(table)
    elif timings is not None:
        print_line(
            f"There was nothing to profile: all {config.rounds} rounds of {folder} were trained "
            "before. To profile more rounds, raise rounds; to train it again, choose another --out."
        )
    with working("Writing the report"):
        table, page = write_report(folder, summary), write_page(folder)
    print_table(table)
    print_line(f"Run: {folder}")
    print_line(f"Report: {page}")
    if "diverged" in summary:
        raise DivergedError(
            f"{folder} has diverged: {summary['diverged']} The run is finished, and its files are "
            "complete."
        )
