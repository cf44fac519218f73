"""Implements `fedensemble predict`: reads inputs from an .npz file and writes predictions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint_file import write_bytes
from ..data.npz import open_archive, read_array
from ..errors import DataError, InputError
from ..experiment.ensemble_file import load_ensemble


def predict_file(run: Path, inputs: Path, output: Path, *, members: bool, device: str) -> int:
    """Writes the predictions of a finished run for `inputs`; returns the number of inputs."""
    if output.suffix != ".npz":
        raise InputError(
            f"Predictions are written as .npz; got '{output}'. Use a name for -o that ends in .npz."
        )
    if not output.parent.is_dir():
        raise InputError(
            f"There is no folder {output.parent} to write {output.name} to. "
            "Create it, or change -o."
        )
    ensemble = load_ensemble(run, device)
    x = read_inputs(inputs)
    prediction = ensemble.predict(x)
    arrays = {"mean": prediction.mean}
    if prediction.task == "classification":
        arrays |= {
            "label": prediction.label,
            "entropy": prediction.entropy,
            "mutual_information": prediction.mutual_information,
        }
    else:
        arrays["variance"] = prediction.variance
    if members:
        arrays |= {"members": prediction.members, "mode_index": prediction.mode_index}
    content = io.BytesIO()
    np.savez(
        content, allow_pickle=False, **{name: tensor.numpy() for name, tensor in arrays.items()}
    )
    write_bytes(output, content.getvalue())
    return len(x)


def read_inputs(path: Path) -> NDArray[Any]:
    """Returns the array `x` of an .npz file, or its only array; pickled arrays are rejected."""
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    with path.open("rb") as opened:
        archive = open_archive(path, opened)
        if "x" in archive.files:
            return read_array(path, archive, "x")
        if len(archive.files) == 1:
            return read_array(path, archive, archive.files[0])
        names = ", ".join(archive.files) or "none"
        raise DataError(f"{path} needs an array named x, or a single array; it has {names}.")
