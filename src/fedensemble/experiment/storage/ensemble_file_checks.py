"""Checks modes.safetensors: its metadata, and each tensor's name, shape, dtype and finiteness.

The file's checksum detects damage, but not forgery: anyone can compute it. Therefore no value of
the file is used before it is checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.schedule import MOST_MODES
from ...errors import StoreError
from ...modeling.frozen import is_earlier, read_earlier
from ...modeling.functional_model import FunctionalModel
from ...uncertainty.calibration import Calibration

PREDICTORS = "predictors"
PREDICTOR_BUFFERS = "predictor_buffers"
FROZEN = "frozen"  # first part of the names of parameters that all modes have in common


def check_facts(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checked metadata: facts about the model and its inputs, and the calibration.

    Args:
        path: named in the error.
        facts: the metadata of the file.
    """
    model, modes, mean_std = (facts.get(name) for name in ("model", "modes", "standardise"))
    problem = None
    if (
        not isinstance(model, dict)
        or not _is_shape(model.get("shape"))
        or not _is_positive_int(model.get("outputs"))
    ):
        problem = f"its entry 'model' is {model!r}"
    elif not isinstance(modes, int) or not _is_positive_int(modes) or modes > MOST_MODES:
        problem = f"its number of modes is {modes!r}"
    elif mean_std is not None and not _is_mean_std(mean_std):
        problem = f"its means and standard deviations of inputs are {mean_std!r}"
    elif facts.get("tokens") not in (None, True, False):
        problem = f"its entry 'tokens' is {facts['tokens']!r}"
    elif facts.get("dirichlet") not in (None, True, False):
        problem = f"its entry 'dirichlet' is {facts['dirichlet']!r}"
    for entry, is_valid in _NAMES.items():
        if not is_valid(facts.get(entry)):
            problem = problem or f"its entry '{entry}' is {facts[entry]!r}"
    calibration: Calibration | None = None
    if problem is None and facts.get("calibration") is not None:
        try:
            calibration = Calibration.from_record(facts["calibration"])
        except ValueError as error:
            problem = f"its calibration cannot be used ({error})"
        else:
            if calibration.modes != modes:
                problem = f"its calibration is one of {calibration.modes} modes"
    if problem is not None:
        raise StoreError(f"{path} is damaged or not a file of modes: {problem[:200]}.")
    names = ("tokens", "class_names", "feature_names")
    return {
        "model": model,
        "modes": modes,
        "standardise": mean_std,
        "dirichlet": bool(facts.get("dirichlet")),  # only files of distilled models have it
        "calibration": calibration,
        "categories": facts.get("categories") or {},
        **{name: facts.get(name) for name in names},
    }


def check_frozen(
    path: Path,
    tensors: Mapping[str, Tensor],
    functional_model: FunctionalModel,
    modes: int,
    model: str,
) -> dict[str, Tensor]:
    """Returns the frozen parameters by name; raises StoreError unless they fit the model.

    Files of earlier versions have a copy in each mode; those must be equal.

    Args:
        path: named in errors.
        tensors: of the file.
        functional_model: the model that they must fit.
        modes: number of modes.
        model: the model in words, for errors.
    """
    problem, frozen = f"{path} does not fit {model}", {}
    for name, expected in functional_model.frozen.items():
        full_name = f"{FROZEN}/{name}" if f"{FROZEN}/{name}" in tensors else f"0/{name}"
        if full_name not in tensors and not expected.is_floating_point():
            continue  # earlier versions did not save it; the model's own is as good
        if full_name not in tensors:
            raise StoreError(f"{problem}: it has no tensor '{FROZEN}/{name}'.")
        value = frozen[name] = tensors[full_name]
        _check_tensor(problem, full_name, value, tuple(expected.shape), expected.dtype)
        copies = [tensors.get(f"{mode}/{name}", value) for mode in range(modes)]
        if not all(torch.equal(copy, value) for copy in copies):
            raise StoreError(
                f"{problem}: its modes have parameters '{name}' of their own, and with "
                "requires_grad=False and the same values in each call of model() there is one "
                "for all modes."
            )
    return frozen


def with_current_names(
    tensors: Mapping[str, Tensor], functional_model: FunctionalModel, modes: int
) -> dict[str, Tensor]:
    """Returns the tensors of each mode as `check_modes` expects them, without frozen parameters.

    A parameter that was frozen when the file was written may be a buffer of this model, because
    model() now draws it at random: each mode then gets the one that the file has. In files of
    earlier versions the frozen parameters were among the buffers.
    """
    frozen, named = functional_model.frozen, dict(tensors)
    for mode in range(modes):
        for name in frozen:
            named.pop(f"{mode}/{name}", None)
        for name in functional_model.buffer_layout.names:
            if f"{FROZEN}/{name}" in tensors:
                named[f"{mode}/{name}"] = tensors[f"{FROZEN}/{name}"]
        if is_earlier(tensors, functional_model, buffers := f"{mode}/{PREDICTOR_BUFFERS}"):
            named[buffers] = read_earlier({buffers: tensors[buffers]}, functional_model, buffers)[
                buffers
            ]
    known = {f"{FROZEN}/{name}" for name in (*frozen, *functional_model.buffer_layout.names)}
    return {name: value for name, value in named.items() if name not in known}


def check_modes(
    path: Path,
    tensors: Mapping[str, Tensor],
    functional_model: FunctionalModel,
    modes: int,
    model: str,
) -> list[dict[str, Tensor]]:
    """Returns the named tensors of each mode; raises StoreError unless they fit the model.

    Args:
        path: named in errors.
        tensors: of the file, by "<mode>/<name>".
        functional_model: the model that they must fit.
        modes: number of modes.
        model: the model in words, for errors.
    """
    shapes = dict(
        zip(functional_model.theta_layout.names, functional_model.theta_layout.shapes, strict=True)
    )
    shapes |= dict(
        zip(
            functional_model.buffer_layout.names, functional_model.buffer_layout.shapes, strict=True
        )
    )
    expected = {f"{mode}/{name}": (mode, name) for mode in range(modes) for name in shapes}
    predictor_names = {
        f"{mode}/{name}" for mode in range(modes) for name in (PREDICTORS, PREDICTOR_BUFFERS)
    }
    problem = f"{path} does not fit {model}"
    for name in tensors:
        if name not in expected and name not in predictor_names:
            raise StoreError(f"{problem}: the model has no tensor '{name[:80]}'.")
    modes_tensors: list[dict[str, Tensor]] = [{} for _ in range(modes)]
    for full_name, (mode, name) in expected.items():
        if full_name not in tensors:
            raise StoreError(f"{problem}: it has no tensor '{full_name}'.")
        tensor = tensors[full_name]
        _check_tensor(problem, full_name, tensor, tuple(shapes[name]), functional_model.dtype)
        modes_tensors[mode][name] = tensor
    if f"0/{PREDICTOR_BUFFERS}" in tensors and f"0/{PREDICTORS}" not in tensors:
        raise StoreError(f"{problem}: it has '{PREDICTOR_BUFFERS}' without '{PREDICTORS}'.")
    # [S, P] and [S, R], with the same S in all modes.
    first = tensors.get(f"0/{PREDICTORS}", torch.empty(0))
    samples = max(first.shape[0], 1) if first.dim() == 2 else 1
    for name, layout in (
        (PREDICTORS, functional_model.theta_layout),
        (PREDICTOR_BUFFERS, functional_model.buffer_layout),
    ):
        _check_of_all_modes(
            problem, name, tensors, modes, (samples, layout.total), functional_model.dtype
        )
    return modes_tensors


def _check_of_all_modes(
    problem: str,
    name: str,
    tensors: Mapping[str, Tensor],
    modes: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Raises if only some modes have the tensor "<mode>/<name>", or one of them does not fit."""
    present = [f"{mode}/{name}" for mode in range(modes) if f"{mode}/{name}" in tensors]
    if present and len(present) != modes:
        raise StoreError(f"{problem}: only {len(present)} of {modes} modes have '{name}'.")
    for full_name in present:
        _check_tensor(problem, full_name, tensors[full_name], shape, dtype)


def _check_tensor(
    problem: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise StoreError(
            f"{problem}: '{name}' has shape {tuple(tensor.shape)} and dtype {_name(tensor.dtype)}; "
            f"expected shape {shape} and dtype {_name(dtype)}."
        )
    if not bool(tensor.isfinite().all()):
        raise StoreError(f"{problem}: '{name}' holds nan or infinity.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_positive_int(value: Any) -> bool:
    # `type`, not `isinstance`: True is an int. torch's sizes are 64-bit integers.
    return type(value) is int and 1 <= value < 2**63


def _is_lists_of_texts(by_name: Any) -> bool:
    return by_name is None or (
        isinstance(by_name, dict)
        and all(names is not None and _is_list_of_texts(names) for names in by_name.values())
    )


def _is_list_of_texts(names: Any) -> bool:
    return names is None or (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and len(set(names)) == len(names)
    )


# Files of earlier versions have none of these entries. "categories" are those of columns that hold
# the number of a category, by column.
_NAMES = {
    "class_names": _is_list_of_texts,
    "feature_names": _is_list_of_texts,
    "categories": _is_lists_of_texts,
}


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(_is_positive_int(size) for size in shape)


def _is_mean_std(mean_std: Any) -> bool:
    """Returns whether it is [means, standard deviations] of equal length, finite, and std > 0."""
    if (
        not isinstance(mean_std, list)
        or len(mean_std) != 2
        or not all(isinstance(part, list) and part for part in mean_std)
    ):
        return False
    mean, std = mean_std
    finite = all(type(value) in (int, float) and math.isfinite(value) for value in mean + std)
    return finite and all(value > 0 for value in std) and len(mean) == len(std)
