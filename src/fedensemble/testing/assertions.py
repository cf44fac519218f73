"""Comparisons whose errors say which contract was broken."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.engine import Engine
from ..flat_params import Tree

# Engines do the same float64 arithmetic in a different order. This costs two or three of sixteen
# digits in a sum, and some tens of local steps on these problems multiply the error by less than a
# thousand. A wrong formula is off by 1e-3 or more.
AGREEMENT = 1e-10


def require(condition: bool, broken: str) -> None:
    """Raises AssertionError with the message `broken` unless the condition holds; even under -O."""
    if not condition:
        raise AssertionError(broken)


def require_equal(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], broken: str) -> None:
    """Raises unless two trees are equal bit for bit."""
    _require_same_forms(got, expected, broken)
    for name, value in expected.items():
        equal = torch.equal(got[name].nan_to_num(nan=-1.0), value.nan_to_num(nan=-1.0))
        require(
            equal,
            f"{broken}: '{name}' differs by up to {_distance(got[name], value):.3g}; "
            "it must be equal bit for bit.",
        )


def require_close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], broken: str) -> None:
    """Raises unless two trees agree to AGREEMENT, relative to entries that are larger than one."""
    _require_same_forms(got, expected, broken)
    for name, value in expected.items():
        distance = _distance(got[name], value)
        require(
            distance <= AGREEMENT,
            f"{broken}: '{name}' differs by up to {distance:.3g}, more than {AGREEMENT:.0e}.",
        )


def _require_same_forms(
    got: Mapping[str, Tensor], expected: Mapping[str, Tensor], broken: str
) -> None:
    """Raises unless two trees have the same names, shapes and dtypes."""
    require(
        set(got) == set(expected),
        f"{broken}: names are {sorted(got)}, expected {sorted(expected)}.",
    )
    for name, value in expected.items():
        require(
            _form(got[name]) == _form(value),
            f"{broken}: '{name}' is {_form(got[name])}, expected {_form(value)}.",
        )


def snapshot(*trees: Mapping[str, Tensor]) -> Tree:
    """Copies of all tensors, to find out later whether they were written to."""
    return {
        f"{index}.{name}": tensor.clone()
        for index, tree in enumerate(trees)
        for name, tensor in tree.items()
    }


def remembered(engine: Engine) -> Tree:
    """Client state by "name of client c, mode m", so that engines can store rows in any order."""
    tensors = engine.client_state_tensors()
    visits = tensors.get("visits")
    if visits is None:
        return {}
    tables = {
        name.removeprefix("row."): table for name, table in tensors.items() if name != "visits"
    }
    return {
        f"{name} of client {client}, mode {mode}": table[row]
        for row, (client, mode) in enumerate(visits.tolist())
        for name, table in tables.items()
    }


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _distance(got: Tensor, expected: Tensor) -> float:
    if not got.numel():
        return 0.0
    difference = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)
    return float(difference.nan_to_num(nan=float("inf")).max())
