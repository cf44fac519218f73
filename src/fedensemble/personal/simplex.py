"""Minimises convex functions over the simplex, for many clients at once.

The weights with which a client mixes K modes minimise a smooth convex function of K numbers that
are not negative and sum to 1. EM and exponentiated gradient need thousands of passes over the rows
when a weight goes to zero. This is Newton's method with a logarithmic barrier instead: about forty
passes, and K times the barrier's last weight bounds the distance to the minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_FIRST_BARRIER, _BARRIER_FACTOR = 0.1, 0.1
_NEWTON_STEPS, _HALVINGS = 30, 40
_TO_BOUNDARY = 0.95  # of the way to the nearest weight of zero


class Expansion(NamedTuple):
    """Value [N], gradient [N, K] and Hessian [N, K, K] of each client's function."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


Objective = Callable[[Tensor], Expansion]


class Minimum(NamedTuple):
    """The weights [N, K], and a bound on the distance of each value to the minimum, [N]."""

    weights: Tensor
    gap: Tensor


def minimise(objective: Objective, clients: int, modes: int, tolerance: float = 1e-9) -> Minimum:
    """The minimum of each client's function over the simplex.

    The functions should have values of the order of 1, as means over rows have.

    Args:
        objective: the functions of all clients at weights float64 [N, K], all above 0.
        tolerance: distance to the minimum at which to stop.
    """
    weights = torch.full((clients, modes), 1 / modes, dtype=torch.float64)
    if modes > 1:
        barrier = _FIRST_BARRIER
        while True:
            weights = _newton(_with_barrier(objective, barrier), weights)
            if modes * barrier <= tolerance / 2:
                break
            barrier *= _BARRIER_FACTOR
    return Minimum(weights, duality_gap(objective(weights), weights))


def duality_gap(expansion: Expansion, weights: Tensor) -> Tensor:
    """An upper bound on the distance of each value to its minimum over the simplex, [N].

    A convex function lies above its tangents, and a tangent is smallest in a corner.
    """
    gradient = expansion.gradient
    return (gradient * weights).sum(1) - gradient.min(1).values


def _with_barrier(objective: Objective, barrier: float) -> Objective:
    """The function minus `barrier` times the sum of the logarithms of the weights."""

    def expand(weights: Tensor) -> Expansion:
        value, gradient, hessian = objective(weights)
        return Expansion(
            value - barrier * weights.log().sum(1),
            gradient - barrier / weights,
            hessian + torch.diag_embed(barrier / weights**2),
        )

    return expand


def _newton(objective: Objective, weights: Tensor) -> Tensor:
    """The minimum over weights that sum to 1, by damped Newton steps."""
    current = objective(weights)
    for _ in range(_NEWTON_STEPS):
        direction = _direction(current, weights)
        descent = (current.gradient * direction).sum(1)  # minus the squared Newton decrement
        # A client whose step promises nothing is done. The others go on.
        moving = descent < -1e-14
        if not bool(moving.any()):
            break
        to_boundary = torch.where(direction < 0, -weights / direction, torch.inf).min(1).values
        size = (_TO_BOUNDARY * to_boundary).clamp(max=1.0)
        for _ in range(_HALVINGS):
            trial = weights + size.unsqueeze(1) * direction
            reached = objective(trial)
            rejected = moving & ~(reached.value <= current.value + 1e-4 * size * descent)
            if not bool(rejected.any()):
                break
            size = torch.where(rejected, size / 2, size)
        # After many halvings, rounding decides. Such a client stays where it is.
        accepted = moving & ~rejected
        if not bool(accepted.any()):
            break
        weights = torch.where(accepted.unsqueeze(1), trial, weights)
        weights = weights / weights.sum(1, keepdim=True)  # rounding adds up over many steps
        current = objective(weights)
    return weights


def _direction(current: Expansion, weights: Tensor) -> Tensor:
    """The Newton step within the weights' plane, [N, K].

    The step solves [[H, 1], [1', 0]]. Near a corner, the entries of H differ by many orders of
    magnitude. In units of the weights, d = w * u, they do not.
    """
    clients, modes = weights.shape
    system = torch.zeros(clients, modes + 1, modes + 1, dtype=weights.dtype)
    scaled = weights.unsqueeze(2) * current.hessian * weights.unsqueeze(1)
    system[:, :modes, :modes] = scaled
    # Without curvature in a direction, as for one row, the barrier alone makes H invertible.
    diagonal = scaled.diagonal(dim1=1, dim2=2).mean(1)
    system[:, range(modes), range(modes)] += 1e-14 * (diagonal + 1e-300).unsqueeze(1)
    system[:, modes, :modes] = system[:, :modes, modes] = weights
    right = torch.zeros(clients, modes + 1, dtype=weights.dtype)
    right[:, :modes] = -current.gradient * weights
    solution, _ = torch.linalg.solve_ex(system, right)
    return torch.nan_to_num(solution[:, :modes] * weights, nan=0.0, posinf=0.0, neginf=0.0)
