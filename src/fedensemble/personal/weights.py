"""The weights with which clients use K modes: by choice, as a mixture, or as a posterior.

A client without rows gives all modes equal weights, with every method: it predicts with the
ensemble.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .simplex import Expansion, Minimum, Objective, minimise


def select_weights(loss: Tensor, owner: Tensor, clients: int) -> Tensor:
    """Weight 1 for the mode with the lowest sum of losses; the first of several, [N, K].

    Args:
        loss: of each mode for each row, float64 [n, K].
        owner: client of each row, [n].
        clients: number of clients, N.

    >>> loss = torch.tensor([[1.0, 2.0], [3.0, 0.5]], dtype=torch.float64)
    >>> select_weights(loss, torch.tensor([0, 2]), 3).tolist()
    [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
    """
    best = torch.nn.functional.one_hot(sum_by(loss, owner, clients).argmin(1), loss.shape[1])
    return _equal_without_rows(best.to(loss.dtype), owner)


def posterior_weights(loss: Tensor, owner: Tensor, clients: int) -> Tensor:
    """Weights proportional to exp(-sum of losses), [N, K]; the arguments are as above.

    If losses are negative log-likelihoods, they are the probabilities that the client's rows come
    from each mode, when all modes are equally probable before.
    """
    return torch.softmax(-sum_by(loss, owner, clients), 1)


def mixture_weights(
    loss: Tensor, owner: Tensor, clients: int, *, prior: float = 1.0, tolerance: float = 1e-9
) -> Minimum:
    """The weights that minimise the NLL of the mixture of the modes on each client's rows.

    With m rows, they minimise -(sum_i log sum_k w_k p_ik + prior/K sum_k log w_k) / (m + prior).

    Args:
        loss: negative log-likelihood of each mode for each row, [n, K].
        owner, clients: as above.
        prior: number of imagined rows that speak for equal weights. With 0, a client with one row
            gives all weight to one mode.
        tolerance: distance to the minimum.
    """
    modes = loss.shape[1]
    # Only ratios of likelihoods matter, and the largest of a row becomes 1: nothing underflows.
    likelihood = (loss.min(1, keepdim=True).values - loss).exp()
    total = torch.bincount(owner, minlength=clients).to(loss.dtype) + prior
    total = torch.where(total > 0, total, 1.0)

    def expand(weights: Tensor) -> Expansion:
        ratio = likelihood / (likelihood * weights[owner]).sum(1, keepdim=True)
        mixed = -(likelihood * weights[owner]).sum(1).log()
        pull = prior / modes
        value = sum_by(mixed, owner, clients) - pull * weights.log().sum(1)
        gradient = -sum_by(ratio, owner, clients) - pull / weights
        outer = (ratio.unsqueeze(2) * ratio.unsqueeze(1)).flatten(1)
        hessian = sum_by(outer, owner, clients).reshape(clients, modes, modes)
        hessian = hessian + torch.diag_embed(pull / weights**2)
        return Expansion(
            value / total, gradient / total.unsqueeze(1), hessian / total.reshape(-1, 1, 1)
        )

    return _minimise(expand, owner, clients, modes, prior, tolerance)


def regression_weights(
    outputs: Tensor,
    target: Tensor,
    owner: Tensor,
    clients: int,
    *,
    prior: float = 1.0,
    tolerance: float = 1e-9,
) -> Minimum:
    """The weights that minimise the squared error of the modes' weighted mean on each client.

    The prior is that of `mixture_weights`, in units of the error with equal weights.

    Args:
        outputs: of each mode for each row, float64 [n, K, D].
        target: [n, D].
    """
    modes = outputs.shape[1]
    count = torch.bincount(owner, minlength=clients).to(outputs.dtype)
    total = torch.where(count + prior > 0, count + prior, 1.0)
    residual = outputs - target.unsqueeze(1)  # the weights sum to 1
    product = torch.einsum("nkd,nld->nkl", residual, residual) / outputs.shape[2]
    matrix = sum_by(product.flatten(1), owner, clients).reshape(clients, modes, modes)
    equal = matrix.mean((1, 2)) / count.clamp(min=1)  # mean squared error with equal weights
    scale = torch.where(equal > 0, equal, 1.0)
    matrix = matrix / (total * scale).reshape(-1, 1, 1)
    pull = (prior / modes / total).unsqueeze(1)

    def expand(weights: Tensor) -> Expansion:
        product = (matrix @ weights.unsqueeze(2)).squeeze(2)
        return Expansion(
            (weights * product).sum(1) - (pull * weights.log()).sum(1),
            2 * product - pull / weights,
            2 * matrix + torch.diag_embed(pull / weights**2),
        )

    return _minimise(expand, owner, clients, modes, prior, tolerance)


def sum_by(values: Tensor, owner: Tensor, clients: int) -> Tensor:
    """The sum of the values of each client, [N, ...]."""
    return values.new_zeros(clients, *values.shape[1:]).index_add_(0, owner, values)


def _minimise(
    expand: Objective, owner: Tensor, clients: int, modes: int, prior: float, tolerance: float
) -> Minimum:
    weights, gap = minimise(expand, clients, modes, tolerance)
    return Minimum(_equal_without_rows(weights, owner), gap)


def _equal_without_rows(weights: Tensor, owner: Tensor) -> Tensor:
    """The weights, equal for clients that have no row."""
    has_rows = (torch.bincount(owner, minlength=len(weights)) > 0).unsqueeze(1)
    return torch.where(has_rows, weights, 1 / weights.shape[1])
