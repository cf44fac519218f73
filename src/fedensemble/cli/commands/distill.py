"""Implements `fedensemble distill`: one model from the ensemble of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...distillation.distill import DistillSettings
from ...experiment.distilled_run import distill_run
from ...federation.resolve import select_device
from ...report.html import write_page
from ...report.run_report import write_report
from ...report.tables.distillation_tables import distillation_tables
from ..console import print_line, print_table, working
from ..inputs import read_inputs
from ..progress import EpochBar


def distill_and_report(
    run: Path,
    out: Path | None,
    inputs: Path | None,
    ood: Path | None,
    settings: Sequence[str],
    device: str,
    **options: Any,
) -> None:
    """Distils the ensemble of a run, and writes and prints the report.

    Args:
        run: folder of a finished run.
        out: folder to write; None for one beside the run.
        inputs: file of unlabelled inputs; None for those of the server in the run's data.
        ood: file of inputs unlike the training data; None to make them from the test inputs.
        settings: of the model, "model.hidden=[32]".
        device: to train on.
        options: of `DistillSettings`.
    """
    chosen = DistillSettings(**options)
    with EpochBar("distillation", chosen.epochs) as bar:
        path, facts = distill_run(
            run,
            out,
            chosen,
            inputs=None if inputs is None else read_inputs(inputs),
            ood=None if ood is None else (str(ood), read_inputs(ood)),
            model_settings=settings,
            device=str(select_device(device)),
            on_epoch=bar.advance,
        )
    with working("Writing the report"):
        write_report(path)
        page = write_page(path)
    for table in distillation_tables(facts):
        print_table(table)
    print_line(f"Distilled model: {path}")
    print_line(f"Report: {page}")
