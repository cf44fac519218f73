"""What the clients of a fleet have agreed on, in place of data: shapes, classes, normalization.

Data of a fleet stay at its sites. `[data] source = "schema"` describes one example, which is all
that the server needs to build the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import DataError, InputError
from .convert import as_inputs, as_targets, as_tensor
from .data_frame import from_frame
from .dataset import Dataset, datasets
from .federated import FederatedData
from .labels.label_names import BOOLEANS, check_class_names, encode_labels, read_named_labels
from .normalize import Standardise

DType = Literal["float32", "float64", "uint8", "int64"]


@datasets.register("schema")
def schema(
    *,
    shape: list[int] | None = None,
    columns: list[str] | None = None,
    target: str | None = None,
    dtype: DType = "float32",
    classes: int | None = None,
    class_names: list[str] | None = None,
    outputs: int | None = None,
    mean: list[float] | None = None,
    std: list[float] | None = None,
) -> Dataset:
    """No data: describes the examples that only the sites of a fleet have; for `deploy`.

    Args:
        shape: shape of one input; by default one value per entry of `columns`.
        columns: names of the input columns in the sites' CSV files, in the model's order; by
            default all columns but the target.
        target: name of the target column in the sites' CSV files; by default the last column.
        dtype: type of the inputs: float32, float64, uint8 (images) or int64 (tokens).
        classes: number of classes; by default the number of class names.
        class_names: names of the classes, in the order of their numbers. Targets may then be names.
        outputs: for regression, the number of targets per example; by default 1.
        mean, std: normalization (x - mean) / std of the inputs: one value, or one per channel.
    """
    raise DataError(
        "data.source = 'schema' describes examples that only the sites of a fleet have, so there "
        "is nothing to train on here. 'fedensemble deploy' writes the app for the fleet; to "
        "simulate, choose a dataset: --set data.source=npz --set data.path=FILE."
    )


@dataclass(frozen=True)
class Schema:
    """One example of a fleet's data. The fields are those of the dataset "schema".

    Args:
        shape: shape of one input.
        dtype: type of the inputs.
        classes: number of classes (or tokens); None for regression.
        class_names: names of the classes, or None.
        outputs: number of targets per example; for regression only.
        columns, target: columns of CSV files, or None.
        standardise: normalization of the inputs, or None.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    outputs: int = 1
    columns: tuple[str, ...] | None = None
    target: str | None = None
    standardise: Standardise | None = None

    @classmethod
    def from_options(cls, table: Mapping[str, Any]) -> Schema:
        """Returns the schema of a table `[data]`; raises InputError if its values do not fit."""
        given = {key: value for key, value in table.items() if value is not None}
        columns, names, shape = (given.get(key) for key in ("columns", "class_names", "shape"))
        _check_options(given)
        classes = given.get("classes", None if names is None else len(names))
        dtype = given.get("dtype", "float32")
        standardise = None
        if "mean" in given:
            standardise = Standardise(tuple(given["mean"]), tuple(given["std"]))
        elif dtype == "uint8":
            standardise = Standardise((0.0,), (255.0,))  # images, as in FederatedData.from_arrays
        built = cls(
            shape=tuple(shape) if shape is not None else (len(columns or ()),),
            dtype=dtype,
            classes=classes,
            class_names=None if names is None else tuple(names),
            outputs=given.get("outputs", 1),
            columns=None if columns is None else tuple(columns),
            target=given.get("target"),
            standardise=standardise,
        )
        if standardise is not None:
            channels = built.shape[0] if built.shape else 1
            if {len(standardise.mean), len(standardise.std)} - {1, channels}:
                raise InputError(
                    f"mean and std need 1 or {channels} values for inputs of shape "
                    f"{list(built.shape)}; got {len(standardise.mean)} and {len(standardise.std)}."
                )
        return built

    @classmethod
    def from_data(cls, data: FederatedData) -> Schema:
        """Returns the schema of data that are here."""
        return cls(
            shape=tuple(data.x.shape[1:]),
            dtype=str(data.x.dtype).removeprefix("torch."),
            classes=data.classes,
            class_names=data.class_names,
            columns=data.feature_names,
            outputs=1 if data.classes is not None else int(data.y[0].numel()),
            standardise=data.standardise,
        )

    def to_options(self) -> dict[str, Any]:
        """Returns the table `[data]` for this schema, without its number of clients."""
        values: dict[str, Any] = {
            "source": "schema",
            "shape": list(self.shape),
            "dtype": self.dtype,
            "classes": self.classes,
            "class_names": None if self.class_names is None else list(self.class_names),
            "outputs": self.outputs if self.classes is None else None,
            "columns": None if self.columns is None else list(self.columns),
            "target": self.target,
        }
        if self.standardise is not None:
            values |= {"mean": list(self.standardise.mean), "std": list(self.standardise.std)}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def tokens(self) -> bool:
        """Whether inputs are integers that stay integers."""
        return self.dtype == "int64" and self.standardise is None

    def convert_inputs(self, values: Any, where: str) -> Tensor:
        """Returns inputs of this schema; raises InputError if they are others.

        Args:
            where: where the inputs come from, for messages.
        """
        wanted = getattr(torch, self.dtype)
        # An image of one channel and one row has fewer axes, and is an image all the same.
        values = from_frame(values, self.columns, where)
        x = as_tensor(values) if wanted == torch.uint8 else as_inputs(values)
        if tuple(x.shape[1:]) != self.shape:
            raise InputError(
                f"{where}: the inputs have shape {tuple(x.shape[1:])}, and the schema says "
                f"{self.shape}. Change the data, or data.shape in the app's config.toml."
            )
        if wanted.is_floating_point:
            x = x.to(wanted)
        elif x.dtype != wanted:
            raise InputError(
                f"{where}: the inputs have type {str(x.dtype).removeprefix('torch.')}, and the "
                f"schema says {self.dtype}."
            )
        return x

    def convert_targets(self, values: Any, where: str) -> Tensor:
        """Returns targets of this schema: numbers of classes in place of their names."""
        if self.classes is None:
            y = as_tensor(values)
            return y if y.is_floating_point() else y.float()
        named, names = read_named_labels(values, where), self.class_names
        if named is None:
            return as_targets(values)
        if names is None and named.declared == BOOLEANS and self.classes == len(BOOLEANS):
            names = tuple(map(str, BOOLEANS))
        if names is None:
            raise InputError(
                f"{where}: the targets are names of classes, such as {named.values[0]!r}. Give "
                "data.class_names, or numbers from 0."
            )
        numbers, _, _ = encode_labels([(where, values)], None, names)
        return as_targets(numbers[0])


def _check_options(given: Mapping[str, Any]) -> None:
    """Raises InputError if the values of a table `[data]` do not fit together."""
    columns, names, shape = (given.get(key) for key in ("columns", "class_names", "shape"))
    if shape is None and columns is None:
        raise InputError(
            "The schema needs shape, such as [28, 28], or columns, such as ['age', 'pulse']."
        )
    for key in ("shape", "classes", "outputs"):
        numbers = [*given[key]] if key == "shape" and key in given else [given.get(key, 1)]
        if min(numbers, default=1) < 1:
            raise InputError(f"{key} must be 1 or more; got {given[key]}.")
    if columns is not None and (not columns or len(set(columns)) < len(columns)):
        raise InputError(f"columns must be different names, at least one; got {columns}.")
    if names is not None:
        try:
            check_class_names(names)
        except DataError as error:
            raise InputError(str(error)) from None
    if shape is not None and columns is not None and list(shape) != [len(columns)]:
        raise InputError(f"{len(columns)} columns make the shape [{len(columns)}]; got {shape}.")
    if names is not None and len(names) != given.get("classes", len(names)):
        raise InputError(f"There are {len(names)} class_names for {given['classes']} classes.")
    if ("mean" in given) != ("std" in given):
        raise InputError("mean and std belong together: give both, or neither.")
