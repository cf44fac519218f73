"""Predictions from a file to a file."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from ..checkpoint import write_bytes
from ..errors import DataError, InputError
from ..experiment.config import resolve
from ..experiment.modes import read_ensemble
from ..experiment.store import RunFolder
from ..fitting import find_device


def predict_file(run: Path, inputs: Path, output: Path, *, members: bool, device: str) -> int:
    """Predicts the rows of `inputs` with a finished run, writes them to `output`; returns how many."""
    if output.suffix != ".npz":
        raise InputError(f"Predictions are written as .npz; got '{output}'. Give -o a name that ends in .npz.")
    store = RunFolder(run)
    config = resolve(store.read_config(), str(store.config_file))
    store.summary()  # says so if the run is not finished
    x = read_inputs(inputs)
    ensemble = read_ensemble(store.modes_file, config, find_device(device))
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
        arrays["members"] = prediction.members
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{name: tensor.numpy() for name, tensor in arrays.items()})
    write_bytes(output, content.getvalue())
    return len(x)


def read_inputs(path: Path) -> np.ndarray:
    """The array `x` of an .npz file, or its only array; nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if not hasattr(file, "files"):
                raise DataError(f"{path} is not an .npz file.")
            name = "x" if "x" in file.files else file.files[0] if len(file.files) == 1 else None
            if name is None:
                raise DataError(f"{path} needs an array named x; it has {', '.join(file.files) or 'none'}.")
            return np.asarray(file[name])
    except FileNotFoundError:
        raise DataError(f"There is no file {path}.") from None
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        why = "it holds Python objects" if "allow_pickle" in str(error) else str(error)
        raise DataError(f"{path} cannot be read as .npz: it is no such archive, or damaged ({why}).") from None
