"""Implements `fedensemble predict`: reads inputs from an .npz file, writes predictions."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint_file import write_bytes
from ..data.sources.npz import open_archive, read_array
from ..errors import DataError, InputError
from ..experiment.storage.ensemble_file import load_ensemble
from ..predict import Prediction


def predict_file(run: Path, inputs: Path, output: Path, *, members: bool, device: str) -> int:
    """Writes the predictions of a finished run for `inputs`; returns the number of inputs."""
    if output.suffix not in (".npz", ".csv"):
        raise InputError(
            f"Predictions are written as .npz or .csv; got '{output}'. Use a name for -o that ends "
            "in one of them."
        )
    if members and output.suffix == ".csv":
        raise InputError("--members needs an .npz file, because a table has no place for them.")
    if not output.parent.is_dir():
        raise InputError(
            f"There is no folder {output.parent} to write {output.name} to. "
            "Create it, or change -o."
        )
    ensemble = load_ensemble(run, device)
    x = read_inputs(inputs)
    prediction = ensemble.predict(x)
    if output.suffix == ".csv":
        write_bytes(output, to_csv(prediction).encode())
        return len(x)
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
    values: dict[str, NDArray[Any]] = {name: tensor.numpy() for name, tensor in arrays.items()}
    if prediction.class_names is not None:
        values |= {
            "label_name": prediction.label_names,
            "class_names": np.array(prediction.class_names),
        }
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **values)
    write_bytes(output, content.getvalue())
    return len(x)


def to_csv(prediction: Prediction) -> str:
    """Returns a table with one row per input.

    For classification its columns are label, label_name (if the classes have names), entropy,
    mutual_information and the probability of each class; for regression the mean and the variance
    of each output.
    """
    mean = prediction.mean.reshape(len(prediction.mean), -1)
    if prediction.task == "classification":
        if prediction.mean.dim() != 2:
            raise InputError(
                "A .csv has one label per row, and these predictions have one per position of a "
                "sequence. Use a name for -o that ends in .npz."
            )
        columns: dict[str, list[Any]] = {"label": prediction.label.tolist()}
        if prediction.class_names is not None:
            columns["label_name"] = prediction.label_names.tolist()
        columns |= {
            "entropy": prediction.entropy.tolist(),
            "mutual_information": prediction.mutual_information.tolist(),
        }
        names = prediction.class_names or [str(number) for number in range(mean.shape[1])]
        columns |= {f"p({name})": mean[:, c].tolist() for c, name in enumerate(names)}
    else:
        variance = prediction.variance.reshape(len(mean), -1)
        one = mean.shape[1] == 1
        columns = {}
        for output in range(mean.shape[1]):
            columns["mean" if one else f"mean_{output}"] = mean[:, output].tolist()
            columns["variance" if one else f"variance_{output}"] = variance[:, output].tolist()
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        [f"{value:.6g}" if isinstance(value, float) else value for value in row]
        for row in zip(*columns.values(), strict=True)
    )
    return table.getvalue()


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
