"""Calibrates the ensemble of a finished run, and saves the result in its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoint_file import read_checkpoint
from ..config.build import build_data
from ..config.python_parts import python_parts
from ..config.schema import resolve
from ..data import FederatedData
from ..data.client_rows import ClientRows, as_owners
from ..data.convert import as_inputs
from ..data.sources.npz import find_npz, number_clients, read_arrays
from ..errors import InputError, StoreError
from ..federation.calibration import calibrate_ensemble
from ..predict import Ensemble
from ..uncertainty.calibration_settings import CalibrationSettings
from ..uncertainty.targets import check_below, check_targets
from .evaluation import calibration_facts, describe_calibration, write_prediction_summary
from .records import with_calibration
from .setup import fingerprint
from .storage.ensemble_file import load_ensemble, write_modes
from .storage.ensemble_file_checks import check_facts
from .storage.run_folder import RunFolder

_GIVE_ROWS = (
    "Train it again with data.calibration = 0.1, or give rows that no mode was trained on: "
    "--rows rows.npz with arrays x, y and, if there are several clients, client."
)


def calibrate_run(
    folder: Path, settings: CalibrationSettings, rows_file: Path | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Calibrates a finished run by its clients' calibration rows; returns its new summary.

    The calibration replaces one that the run has. It is written into modes.safetensors, so that
    `load_ensemble`, `predict` and `export` apply it, and into the summary and the report.

    Args:
        folder: of the run.
        settings: what is calibrated, and how.
        rows_file: an .npz file with arrays x, y and client to use instead of the run's rows.
        device: that the modes are evaluated on.
    """
    store = RunFolder(folder)
    values = store.read_config()  # raises if the folder holds no run
    summary = store.summary()  # raises if the run is not finished
    ensemble = load_ensemble(folder, device)
    ensemble.calibration = None
    data = None if python_parts(values) else _build_data(store, values, summary, rows_file)
    if rows_file is not None:
        rows, clients, names = _read_rows(rows_file, ensemble)
        # The clients of the file need not be those of the test rows.
        data = None if data is None else replace(data, test_owner=None)
    elif data is None or data.calibration is None:
        raise InputError(
            f"The run in {folder} has no rows to calibrate by: its data have no calibration rows. "
            + _GIVE_ROWS
        )
    else:
        rows, clients, names = data.calibration, len(data), data.names
    made = calibrate_ensemble(ensemble, rows, settings, clients, names, ensemble.seed)
    ensemble.calibration = made
    return _write(store, ensemble, data, summary)


def _build_data(
    store: RunFolder, values: dict[str, Any], summary: dict[str, Any], rows_file: Path | None
) -> FederatedData | None:
    """Returns the data of a run; None for a fleet's, whose data are on its clients.

    Raises StoreError if they have changed, unless they are not needed for the calibration itself.
    """
    config = resolve(values, str(store.config_file))
    if config.data["source"] == "schema":
        return None
    data = build_data(config)
    if fingerprint(data) == summary.get("data"):
        return data
    if rows_file is not None:
        return None
    raise StoreError(
        f"The data of the run in {store.path} have changed since it was trained. Restore them, or "
        "give rows that no mode was trained on: --rows rows.npz."
    )


def _read_rows(file: Path, ensemble: Ensemble) -> tuple[ClientRows, int, tuple[str, ...] | None]:
    """Returns the rows of a file, the number of their clients, and the clients' names."""
    arrays = read_arrays(find_npz(file, None), {"x": "x", "y": "y", "client": None})
    x = as_inputs(arrays["x"])
    regression = ensemble.model.task == "regression"
    probe = ensemble.predict(x[:1]).mean  # raises if the inputs are others than in training
    y = check_targets(
        probe.new_zeros(()).expand(len(x), *probe.shape[1:]),
        arrays["y"],
        regression=regression,
        class_names=ensemble.class_names,
    )
    if not regression:
        check_below(y, probe.shape[-1])
    names: tuple[str, ...] | None = None
    owner = torch.zeros(len(x), dtype=torch.int64)
    if "client" in arrays:
        numbers, names = number_clients(file, arrays["client"])
        owner = as_owners(numbers)
    return ClientRows(x, y, owner), int(owner.max()) + 1, names


def _write(
    store: RunFolder, ensemble: Ensemble, data: FederatedData | None, summary: dict[str, Any]
) -> dict[str, Any]:
    """Writes the calibrated modes, then what follows from them; returns the new summary."""
    with store.locked():
        facts = check_facts(store.modes_file, read_checkpoint(store.modes_file)[1])
        kept = {name: facts[name] for name in ("model", "categories") if facts[name]}
        write_modes(store.modes_file, ensemble, kept)
        if data is None:
            entry: dict[str, Any] = calibration_facts(ensemble.calibration)
        else:
            config = resolve(store.read_config(), str(store.config_file))
            entry, prediction = describe_calibration(config, ensemble, data)
            write_prediction_summary(config, store, ensemble, data, prediction)
        summary = with_calibration(summary, entry)
        store.finish(summary)
    return summary
