"""Checks of the fields of `FederatedData` other than examples: types, client sizes and names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..arguments import require_integer
from ..errors import DataError, InputError
from .convert import as_tensor
from .labels.label_names import check_class_names
from .normalize import Standardise

if TYPE_CHECKING:
    from .federated import FederatedData


def check_field_types(data: FederatedData) -> None:
    """Raises unless every field has its documented type."""
    for name in ("x", "y", "start", "size"):
        _check_tensor(name, getattr(data, name))
    for name in ("x_test", "y_test", "x_server"):
        if getattr(data, name) is not None:
            _check_tensor(name, getattr(data, name))
    if data.new_clients is not None and not isinstance(data.new_clients, type(data)):
        raise DataError(
            f"new_clients must be FederatedData or None; got {type(data.new_clients).__name__}."
        )
    for name in ("start", "size"):
        value = getattr(data, name)
        if value.dtype != torch.int64 or value.dim() != 1:
            raise DataError(
                f"{name} must be an int64 tensor [N]; got {value.dtype} of shape "
                f"{tuple(value.shape)}."
            )
    if len(data.start) != len(data.size) or not len(data.size):
        raise DataError(
            "start and size need one value per client, and at least one client; "
            f"got {len(data.start)} and {len(data.size)} values."
        )
    if data.classes is not None:
        require_integer("FederatedData", "classes", data.classes, minimum=1)
    if data.standardise is not None and not callable(data.standardise):
        raise InputError(
            f"standardise must be a Standardise(mean, std) or None; got {data.standardise!r}."
        )
    if isinstance(data.standardise, Standardise):
        channels = data.x.shape[1] if data.x.dim() > 1 else 1
        for name in ("mean", "std"):
            count = len(getattr(data.standardise, name))
            if count not in (1, channels):
                raise InputError(
                    f"standardise has {count} values as {name}, and inputs of shape "
                    f"{tuple(data.x.shape[1:])} need 1 or {channels}."
                )


def _check_tensor(name: str, value: Any) -> None:
    """Raises unless `value` is a dense tensor with values."""
    if not isinstance(value, Tensor):
        raise DataError(
            f"{name} must be a tensor; got {type(value).__name__}. from_clients and from_arrays "
            "take arrays."
        )
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise DataError(
            f"{name} must be a dense tensor with values; got one of layout {value.layout} on "
            f"{value.device}."
        )


def check_notes(notes: Any) -> tuple[str, ...]:
    """Returns the notes as a tuple; raises unless they are a sequence of texts."""
    if not isinstance(notes, (tuple, list)):
        raise InputError(f"notes must be a tuple of texts; got {notes!r}.")
    return tuple(notes)


def check_class_names_fit(data: FederatedData) -> None:
    """Raises unless there is one name per class, and one per column of the inputs."""
    if data.class_names is not None:
        check_class_names(data.class_names)
        if data.classes is None:
            raise DataError(
                "class_names were given, but the targets are floats, which are not classes. Give "
                "labels as integers or text, or leave class_names out."
            )
        if len(data.class_names) != data.classes:
            raise DataError(
                f"There are {data.classes} classes, but {len(data.class_names)} class_names; give "
                "one each."
            )
    if data.feature_names is not None:
        columns = data.x.shape[1] if data.x.dim() == 2 else None
        if len(data.feature_names) != columns:
            raise DataError(
                f"There are {len(data.feature_names)} feature_names for inputs of shape "
                f"{tuple(data.x.shape[1:])}; give one per column."
            )


def as_sizes(sizes: Any) -> Tensor:
    """Returns the client sizes as int64 [N]; raises unless they are integers."""
    size = as_tensor(sizes)
    if size.is_floating_point() or size.dim() != 1:
        raise DataError(
            f"sizes must be one integer per client, [N]; got {size.dtype} of shape "
            f"{tuple(size.shape)}."
        )
    return size.long()


def check_client_names(names: Any, clients: int) -> None:
    """Raises unless there is one name per client that can be written to a file."""
    if not isinstance(names, (tuple, list)):
        raise DataError(f"names must be a sequence of texts, one per client; got {names!r}.")
    if len(names) != clients:
        raise DataError(f"There are {clients} clients, but {len(names)} names; give one each.")
    for client, name in enumerate(names):
        if not isinstance(name, str):
            raise DataError(f"The name of client {client} must be text; got {name!r}.")
        try:
            name.encode()  # fails for a lone surrogate, which no file can hold
        except UnicodeEncodeError:
            raise DataError(
                f"The name of client {client} is not valid Unicode text: {name!a}. Rename it."
            ) from None
