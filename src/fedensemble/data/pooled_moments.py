"""Mean and standard deviation of each column, from one message per client.

A client sends its number of rows, and the mean and the sum of squared deviations of each column.
The server merges them exactly (Chan, Golub and LeVeque, 1983). Nobody sees the rows of others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DataError
from .normalize import Standardise


def pooled_standardise(x: Tensor, size: Tensor) -> Standardise:
    """Returns the normalization of all clients' inputs to mean 0 and standard deviation 1.

    Columns that are constant are only centred.

    Args:
        x: inputs of all clients in their order, [n, columns].
        size: rows of each client, [N].

    >>> pooled_standardise(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([1, 1]))
    Standardise(mean=(2.0, 5.0), std=(1.0, 1.0))
    """
    if x.dim() != 2:
        raise DataError(
            f"Inputs of shape {tuple(x.shape[1:])} have no columns to standardise; give tables."
        )
    x, count = x.double(), size.to(torch.float64).unsqueeze(1)
    owner = torch.repeat_interleave(torch.arange(len(size)), size)
    zeros = torch.zeros(len(size), x.shape[1], dtype=torch.float64)
    means = zeros.index_add(0, owner, x) / count  # [N, columns]
    squares = zeros.index_add(0, owner, (x - means[owner]).square())
    mean = (count * means).sum(0) / count.sum()
    variance = (squares + count * (means - mean).square()).sum(0) / count.sum()
    # Rounding leaves a tiny variance in a constant column, and dividing by it would blow up noise.
    noise = 10 * torch.finfo(torch.float64).eps * mean.abs().clamp(min=1e-300)
    std = torch.where(variance.sqrt() > noise, variance.sqrt(), 1.0)
    return Standardise(tuple(mean.tolist()), tuple(std.tolist()))
