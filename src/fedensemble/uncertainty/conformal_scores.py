"""Conformity scores of split-conformal prediction: the lower, the better a target fits.

A prediction set has all classes, and an interval all values, whose score is at most a threshold.
Scores are functions of one row alone, also the randomized ones, so that every client computes those
of its own rows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .. import prng

Method = Literal["lac", "aps", "raps", "absolute", "cqr"]
CLASS_METHODS: tuple[Method, ...] = ("lac", "aps", "raps")
INTERVAL_METHODS: tuple[Method, ...] = ("absolute", "cqr")
# Log-probabilities are rounded to multiples of this before they seed a random draw, so that the
# last bits, in which machines differ, rarely change it.
_RESOLUTION = 2.0**-8


def class_scores(
    probabilities: Tensor,
    method: Method = "lac",
    *,
    randomized: bool = True,
    penalty: float = 0.01,
    free_classes: int = 1,
) -> Tensor:
    """The score of each class, [n, C] float64.

    "lac" is 1 - p. "aps" is the sum of all probabilities down to that of the class, with
    `randomized` less a random part of the class's own. "raps" adds `penalty` for each class beyond
    the `free_classes` most probable ones, which keeps sets small. They are those of MAPIE.

    Args:
        probabilities: of each class, [n, C].
        method: "lac", "aps" or "raps".
        randomized: for "aps" and "raps": without it, sets are larger and cover more than asked for.
        penalty, free_classes: of "raps".

    >>> p = torch.tensor([[0.5, 0.25, 0.25]])
    >>> class_scores(p, "aps", randomized=False).tolist()
    [[0.5, 0.75, 1.0]]
    """
    probabilities = probabilities.double()
    if method == "lac":
        return 1 - probabilities
    ordered, order = _sort(probabilities)
    # Rounding can make the sum of all probabilities exceed 1, which is the end of the range.
    sums = ordered.cumsum(-1).clamp(max=1)
    if randomized:
        sums = (sums - row_uniform(probabilities).unsqueeze(-1) * ordered).clamp(min=0)
    if method == "raps":
        rank = torch.arange(1, ordered.shape[-1] + 1, dtype=sums.dtype, device=sums.device)
        sums = sums + penalty * (rank - free_classes).clamp(min=0)
    return torch.empty_like(sums).scatter_(-1, order, sums)


def _sort(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities in descending order and their classes; equal ones in the order of classes."""
    # ONNX knows one way to sort, which is stable; `stable=True` cannot be translated to it. The
    # CPU, on which a .pt2 file is traced, sorts stably by default, too.
    if torch.compiler.is_compiling():
        ordered, order = probabilities.sort(dim=-1, descending=True)
    else:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    return ordered, order


def largest_class_score(
    method: Method, classes: int, *, penalty: float = 0.01, free_classes: int = 1
) -> float:
    """The upper end of the range of `class_scores`; the lower end is 0."""
    return 1.0 + (penalty * max(classes - free_classes, 0) if method == "raps" else 0.0)


def row_uniform(probabilities: Tensor) -> Tensor:
    """A draw in (0, 1) per row that is a function of the row's probabilities, [n].

    The same input always has the same prediction set, alone or in a batch, and calibration rows are
    treated exactly as new ones. A service that draws by the position in its batch would use one
    and the same draw for every single row.
    """
    smallest = torch.finfo(torch.float32).tiny
    words = (probabilities.double().clamp(min=smallest).log() / _RESOLUTION).round().long()
    # Multiplication by random odd integers, modulo 2**64, gives a hash of the row. Only the upper
    # bits of the products are added: ONNX Runtime adds integers as floating-point numbers, in which
    # larger sums are not exact.
    factors = prng.bits(prng.key(0, "prediction sets"), words.shape[-1], words.device) | 1
    return prng.uniform(((words * factors) >> 20).sum(-1), 1).squeeze(-1)


def interval_scores(outputs: Tensor, target: Tensor, method: Method = "absolute") -> Tensor:
    """The score of each row's target, [n] float64.

    Args:
        outputs: mean prediction, [n] or [n, 1], for "absolute"; for "cqr" quantiles in ascending
            order, [n, Q], of which the first and the last are the interval's ends.
        target: [n] or [n, 1].
        method: "absolute" is the distance from the mean; "cqr" is the distance beyond the nearest
            end, negative inside (Romano et al. 2019).
    """
    outputs, target = outputs.double().reshape(len(outputs), -1), target.double().reshape(-1)
    if method == "absolute":
        return (target - outputs[:, 0]).abs()
    return torch.maximum(outputs[:, 0] - target, target - outputs[:, -1])


def interval_within(outputs: Tensor, threshold: Tensor, method: Method = "absolute") -> Tensor:
    """The values whose score is at most the threshold: lower and upper end of each row, [n, 2].

    Args:
        outputs: as in `interval_scores`.
        threshold: of each row, [n], or of all.
        method: "absolute" or "cqr".
    """
    # Not len(): an export takes it for a constant.
    outputs = outputs.double().reshape(outputs.shape[0], -1)
    lower, upper = outputs[:, 0] - threshold, outputs[:, -1] + threshold
    # A negative threshold can be more than half the width: then only the middle is left.
    middle = (lower + upper) / 2
    return torch.stack([torch.minimum(lower, middle), torch.maximum(upper, middle)], -1)
