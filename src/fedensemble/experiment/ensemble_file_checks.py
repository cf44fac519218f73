"""Whether a file of modes is one: its description, and every tensor's name, shape, type and
finiteness.

The file's checksum finds damage, not forgery: anybody can compute it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.schedule import MOST_MODES
from ..errors import StoreError
from ..modeling.functional_model import FunctionalModel

PREDICTORS = "predictors"


def check_facts(path: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a file of modes: "model" (shape and outputs), "modes", "standardise" and
    "tokens".
    """
    model, modes, rule = (facts.get(name) for name in ("model", "modes", "standardise"))
    problem = None
    if (
        not isinstance(model, dict)
        or not _sides(model.get("shape"))
        or not _whole(model.get("outputs"), 1)
    ):
        problem = f"the facts of its model are {model!r}"
    elif not isinstance(modes, int) or not _whole(modes, 1) or modes > MOST_MODES:
        problem = f"its number of modes is {modes!r}"
    elif rule is not None and not _is_rule(rule):
        problem = f"its rule for standardising inputs is {rule!r}"
    elif facts.get("tokens") not in (None, True, False):
        problem = f"its entry 'tokens' is {facts['tokens']!r}"
    if problem is not None:
        raise StoreError(f"{path} is damaged or no file of modes: {problem[:200]}.")
    return {"model": model, "modes": modes, "standardise": rule, "tokens": facts.get("tokens")}


def check_modes(
    path: Path, tensors: Mapping[str, Tensor], learner: FunctionalModel, modes: int, model: str
) -> list[dict[str, Tensor]]:
    """The named tensors of each mode; raises StoreError unless all are those of the model, and
    finite.
    """
    shapes = dict(zip(learner.theta_layout.names, learner.theta_layout.shapes, strict=True))
    shapes |= dict(zip(learner.buffer_layout.names, learner.buffer_layout.shapes, strict=True))
    expected = {f"{mode}/{name}": (mode, name) for mode in range(modes) for name in shapes}
    samples = {f"{mode}/{PREDICTORS}": mode for mode in range(modes)}
    fits = f"{path} does not fit model '{model}'"
    for name in tensors:
        if name not in expected and name not in samples:
            raise StoreError(f"{fits}: it has a tensor '{name[:80]}', which the model has not.")
    rows: list[dict[str, Tensor]] = [{} for _ in range(modes)]
    for full, (mode, name) in expected.items():
        if full not in tensors:
            raise StoreError(f"{fits}: it has no tensor '{full}'.")
        _check_tensor(fits, full, tensors[full], tuple(shapes[name]), learner.dtype)
        rows[mode][name] = tensors[full]
    present = [name for name in samples if name in tensors]
    if present and len(present) != modes:
        raise StoreError(f"{fits}: it has '{PREDICTORS}' of {len(present)} of {modes} modes.")
    for name in present:
        first = tensors[present[0]]
        count = first.shape[0] if first.dim() == 2 else 0
        _check_tensor(
            fits, name, tensors[name], (max(count, 1), learner.theta_layout.total), learner.dtype
        )
    return rows


def _check_tensor(
    fits: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise StoreError(
            f"{fits}: '{name}' has shape {tuple(tensor.shape)} of {_name(tensor.dtype)}, and {shape} of {_name(dtype)} "
            "is expected."
        )
    if not bool(tensor.isfinite().all()):
        raise StoreError(f"{fits}: '{name}' holds nan or infinity, so that it predicts nothing.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _sides(shape: Any) -> bool:
    return isinstance(shape, list) and all(_whole(side, 1) for side in shape)


def _is_rule(rule: Any) -> bool:
    """Whether it is means and standard deviations, as many of both, finite, and the latter above
    0.
    """
    if (
        not isinstance(rule, list)
        or len(rule) != 2
        or not all(isinstance(part, list) and part for part in rule)
    ):
        return False
    numbers = [value for part in rule for value in part]
    finite = all(type(value) in (int, float) and math.isfinite(value) for value in numbers)
    return finite and all(value > 0 for value in rule[1]) and len(rule[0]) == len(rule[1])
