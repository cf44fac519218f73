"""Prediction intervals of an ensemble in regression, and their quality."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import require_fraction
from ..errors import InputError
from .regression import as_noise, check_target

_BISECTIONS = 100  # each halves the interval: more than the digits of a float64
_EM_STEPS, _EM_TOLERANCE = 10_000, 1e-10  # at most; relative change of the variance


def gaussian_mixture_noise(members: Tensor, target: Tensor) -> Tensor:
    """Standard deviation of the noise that fits targets best, one per output, [...].

    It maximizes the likelihood of a mixture of Gaussians around the members, by EM from the
    members' root mean squared error. Use data that the modes were not trained on: training errors
    are smaller.

    Args:
        members: prediction of each member, [K, B, ...].
        target: [B, ...].
    """
    check_target(members, target)
    squared = (members - target).double() ** 2
    variance = squared.mean((0, 1))
    if not bool((squared.amin(0).mean(0) > 0).all()):
        raise InputError(
            "The noise cannot be estimated: each target is exactly the prediction of a member. Use "
            "targets that were measured, and that the modes were not trained on."
        )
    for _ in range(_EM_STEPS):
        weight = torch.softmax(-0.5 * squared / variance, 0)  # of each member for each target
        before, variance = variance, (weight * squared).sum(0).mean(0)
        if bool(((before - variance).abs() <= _EM_TOLERANCE * variance).all()):
            break
    return variance.sqrt()


def gaussian_mixture_interval(members: Tensor, noise: Any, level: float) -> tuple[Tensor, Tensor]:
    """Lower and upper ends of the central interval of a mixture of Gaussians, [B, ...] each.

    Args:
        members: prediction of each member, [K, B, ...].
        noise: standard deviation of the targets around a member; see `gaussian_mixture_nll`.
        level: probability of the interval, such as 0.9.
    """
    level = require_level(level)
    deviation, members = as_noise(noise, members).double(), members.double()

    def quantile(probability: float) -> Tensor:
        # The quantile of the mixture is between the lowest and highest quantile of its parts.
        standard = torch.special.ndtri(torch.tensor(probability, dtype=torch.double))
        offset = deviation * float(standard)
        low, high = members.amin(0) + offset, members.amax(0) + offset
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            below: Tensor = torch.special.ndtr((middle - members) / deviation).mean(0)
            above = below < probability  # the quantile is above the middle
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return (low + high) / 2

    return quantile((1 - level) / 2), quantile((1 + level) / 2)


def interval_coverage(lower: Tensor, upper: Tensor, target: Tensor) -> float:
    """Share of targets inside their interval, ends included (PICP)."""
    _check_interval(lower, upper, target)
    return float(((lower <= target) & (target <= upper)).double().mean())


def interval_width(lower: Tensor, upper: Tensor) -> float:
    """Mean width of the intervals (MPIW)."""
    _check_interval(lower, upper, lower)
    return float((upper - lower).double().mean())


def interval_score(lower: Tensor, upper: Tensor, target: Tensor, level: float) -> float:
    """Mean interval score (Winkler): the width, plus a penalty for targets outside.

    The penalty is 2 / (1 - level) times the distance to the interval. Lower is better.

    >>> interval_score(torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([1.5]), level=0.5)
    3.0
    """
    _check_interval(lower, upper, target)
    outside = (lower - target).clamp(min=0) + (target - upper).clamp(min=0)
    return float((upper - lower + 2 / (1 - require_level(level)) * outside).double().mean())


def require_level(level: Any) -> float:
    """The probability of an interval; raises unless it is above 0 and below 1."""
    value = require_fraction("An interval", "level", level)
    if value == 0:
        raise InputError("An interval needs level to be above 0 and below 1; got level=0.")
    return value


def _check_interval(lower: Tensor, upper: Tensor, target: Tensor) -> None:
    if not lower.shape == upper.shape == target.shape or not lower.numel():
        raise InputError(
            "Intervals need lower ends, upper ends and targets of one shape; got "
            f"{tuple(lower.shape)}, {tuple(upper.shape)} and {tuple(target.shape)}."
        )
    if bool((lower > upper).any()):
        raise InputError("The lower end of an interval is above its upper end. Exchange them.")
