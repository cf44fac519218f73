"""Implements `fedensemble export`: writes the ensemble of a run as .onnx or .pt2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...config.build import build_data
from ...config.python_parts import python_parts
from ...config.schema import resolve
from ...data.sources.npz import find_npz, read_arrays
from ...errors import InputError
from ...experiment.storage.ensemble_file import load_ensemble
from ...experiment.storage.run_folder import RunFolder
from ...export.mode_ranking import parse_modes
from ...export.write import ExportedFile, check_path
from ...report.tables.result_table import TextTable
from .predict import as_client

_GIVE_ROWS = "Give labelled rows that no mode was trained on: --rows rows.npz with arrays x and y."


def export_file(
    run: Path,
    output: Path,
    modes: str | None,
    rows: Path | None,
    client: str | None = None,
    risk: float | None = None,
) -> ExportedFile:
    """Writes the ensemble of a finished run; returns facts about the file.

    Args:
        modes: "best:3", or the numbers of modes; None for all.
        rows: file of labelled rows to choose the best modes by; None for those of the run.
        client, risk: see `Ensemble.export`.
    """
    check_path(output)
    by_rank = modes is not None and isinstance(parse_modes(modes), int)
    if rows is not None and not by_rank:
        raise InputError("--rows is for choosing the best modes; give --modes best:3 with it.")
    ensemble = load_ensemble(run)
    validation = None
    if by_rank:
        validation = rows_of_run(run) if rows is None else read_rows(rows)
    return ensemble.export(
        output, modes=modes, validation=validation, client=as_client(client), risk=risk
    )


def read_rows(file: Path) -> tuple[Any, Any]:
    """Returns the arrays x and y of an .npz file."""
    arrays = read_arrays(find_npz(file, None), {"x": "x", "y": "y"})
    return arrays["x"], arrays["y"]


def rows_of_run(run: Path) -> tuple[Any, Any]:
    """Returns the rows of a run's data that are meant for choices; raises if it has none.

    They are the clients' rows for calibration (`data.calibration`), or the split that is held out
    from training (`data.validation`). Test rows are not used: a test of modes that it has
    chosen would be too good.
    """
    values = RunFolder(run).read_config()
    table = values.get("data", {})
    if "data" in python_parts(values) or not ({"calibration", "validation"} & set(table)):
        raise InputError(
            f"The data of {run} have no rows to choose the best modes by: neither data.calibration "
            f"nor data.validation is set, and test rows are not used for choices. {_GIVE_ROWS}"
        )
    data = build_data(resolve(values, str(run / "config.toml")))
    if data.calibration is not None:
        return data.calibration.x, data.calibration.y
    return data.x_test, data.y_test


def ranking_table(file: ExportedFile) -> TextTable | None:
    """Returns a table of all prefixes of the ranking; None if the modes were not ranked."""
    if file.ranking is None:
        return None
    chosen = file.ranking
    return TextTable(f"Modes in greedy order, on {chosen.rows:,} rows", *chosen.table())
