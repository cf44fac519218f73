"""Predictions from a file to a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import write_bytes
from ..data.npz import open_archive, read_array
from ..errors import DataError, InputError
from ..experiment.ensemble_file import load_ensemble


def predict_file(run: Path, inputs: Path, output: Path, *, members: bool, device: str) -> int:
    """Predicts the rows of `inputs` with a finished run, writes them to `output`; returns how
    many.
    """
    if output.suffix != ".npz":
        raise InputError(
            f"Predictions are written as .npz; got '{output}'. Give -o a name that ends in .npz."
        )
    if not output.parent.is_dir():
        raise InputError(
            f"There is no folder {output.parent} to write {output.name} to. Make it, or change -o."
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
    """The array `x` of an .npz file, or its only array; nothing is unpickled."""
    if not path.is_file():
        raise DataError(f"There is no file {path}.")
    with path.open("rb") as opened:
        archive = open_archive(path, opened)
        name = (
            "x" if "x" in archive.files else archive.files[0] if len(archive.files) == 1 else None
        )
        if name is None:
            there = ", ".join(archive.files) or "none"
            raise DataError(f"{path} needs an array named x, or one array only; it has {there}.")
        return read_array(path, archive, name)
