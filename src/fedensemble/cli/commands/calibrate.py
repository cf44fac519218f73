"""Implements `fedensemble calibrate`: calibrates the ensemble of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...experiment.calibrated_run import calibrate_run
from ...report.tables.calibration_tables import calibration_table
from ...report.tables.client_tables import clients_table
from ...report.tables.result_table import TextTable
from ...uncertainty.calibration_settings import CalibrationSettings
from .report import write_and_warn


def calibrate(
    run: Path, rows: Path | None, device: str, settings: dict[str, Any]
) -> list[TextTable]:
    """Calibrates a finished run and writes its report again; returns tables of the result.

    Args:
        rows: an .npz file with rows to use instead of the clients' calibration rows.
        settings: arguments of `CalibrationSettings`; those that are None have their defaults.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    summary = calibrate_run(run, CalibrationSettings(**given), rows, device)
    table, _ = write_and_warn(run, None)
    found = [table, calibration_table(summary), clients_table(summary)]
    return [table for table in found if table is not None]
