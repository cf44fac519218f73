"""Scores of an ensemble's predictive distribution in regression: CRPS and NLL."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError


def crps(members: Tensor, target: Tensor) -> Tensor:
    """Continuous ranked probability score of each value, [B, ...]; lower is better.

    The members are the predictive distribution, with equal weights: E|X - y| - E|X - X'| / 2. For
    one member it is the absolute error.

    Args:
        members: prediction of each member, [K, B, ...].
        target: [B, ...].

    >>> crps(torch.tensor([[0.0], [2.0]]), torch.tensor([1.0])).tolist()
    [0.5]
    """
    check_target(members, target)
    count = len(members)
    # E|X - X'| from the sorted members instead of all pairs: member i is the larger one of i pairs
    # and the smaller one of K - 1 - i.
    weight = 2 * torch.arange(count, device=members.device) - count + 1
    ordered = members.sort(0).values
    half_spread = (ordered * _on_first_axis(weight, ordered)).sum(0) / count**2
    return (members - target).abs().mean(0) - half_spread


def gaussian_mixture_nll(members: Tensor, target: Tensor, noise: Any) -> Tensor:
    """Negative log-likelihood of each value under a mixture of Gaussians, [B, ...].

    The members are the means, with equal weights; all have the same standard deviation.

    Args:
        members: prediction of each member, [K, B, ...].
        target: [B, ...].
        noise: standard deviation of the targets around a member: a number, or a tensor that
            broadcasts to [B, ...], such as one per output. The spread of the members does not
            contain it; `gaussian_mixture_noise` estimates it from other data.
    """
    check_target(members, target)
    deviation = as_noise(noise, members)
    log_density = -0.5 * ((target - members) / deviation) ** 2 - deviation.log()
    log_members = math.log(len(members) * math.sqrt(2 * math.pi))
    return log_members - log_density.logsumexp(0)


def check_target(members: Tensor, target: Tensor) -> None:
    """Raises unless the targets have the shape of one member's prediction."""
    if not len(members) or members.shape[1:] != target.shape:
        raise InputError(
            "Members [K, ...] and targets [...] must have the same shape behind the first "
            f"dimension; got {tuple(members.shape)} and {tuple(target.shape)}."
        )


def as_noise(noise: Any, members: Tensor) -> Tensor:
    """A standard deviation as a tensor; raises unless it is finite and above 0."""
    value = torch.as_tensor(noise, dtype=members.dtype, device=members.device)
    if not bool(((value > 0) & value.isfinite()).all()):
        raise InputError(
            "noise is the standard deviation of the targets, a finite number above 0; got "
            f"{value.min():g}."
        )
    return value


def _on_first_axis(vector: Tensor, like: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (like.dim() - 1)).to(like.dtype)
