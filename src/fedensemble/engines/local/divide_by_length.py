"""Divides the visits of a round into blocks, so that short visits do not wait for long ones.

A block takes as many local steps as its longest visit. The other visits compute gradients of
padding until then, which is wasted time: if one of 20 clients has 2,000 examples and the others
have 200, a block of all of them computes seven times what is needed. More blocks waste less, but
each step of a block also costs time that does not depend on its visits: kernels have to be
launched, and small ones do not fill a GPU. So the time of a block is taken as

    local steps of its longest visit * (overhead + number of its visits),

with the overhead of a step in units of visits, and `block_sizes` minimizes the sum over blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import nn

# Blocks are multiples of a quarter of the largest one. Each size is captured as a CUDA graph of its
# own, so there must be few sizes, and they must be the same in each round.
_PIECES = 4
# Blocks are only divided if that saves a tenth of the time, because `step_overhead` is an estimate.
_WORTH = 0.9
# What the launch of a layer costs in FLOPs of a forward pass. On an H200, a step of ResNet-18
# (62 layers) and one of the MNIST CNN take 1.35 and 0.24 ms in addition to what grows with the
# visits: about 25 us per layer, in which the GPU could do 0.8 GFLOP of a forward pass.
_LAUNCH = 800_000_000


def block_sizes(counts: Sequence[int], most: int, overhead: float | None) -> list[int]:
    """The numbers of visits of successive blocks, of visits in descending order of their steps.

    Args:
        counts: local steps of each visit, in descending order.
        most: the largest number of visits of a block.
        overhead: of a step, in units of visits; None does not divide more than `most` requires.

    >>> block_sizes([9, 9, 9, 9], most=4, overhead=1)  # equal visits stay together
    [4]
    >>> block_sizes([9, 1, 1, 1], most=4, overhead=1)
    [1, 3]
    >>> block_sizes([9, 1, 1, 1], most=4, overhead=100)
    [4]
    """
    visits, most = len(counts), min(most, len(counts))
    whole = [min(most, visits - first) for first in range(0, visits, most or 1)]
    if overhead is None or not visits or counts[0] == counts[-1]:
        return whole
    piece = -(-most // _PIECES)
    sizes = [most, *range(most - most % piece, 0, -piece)]

    @cache
    def best(first: int) -> tuple[float, tuple[int, ...]]:
        """The least time of the visits from `first` on, and the sizes of their blocks."""
        if first == visits:
            return 0.0, ()
        options = []
        for largest in sizes:
            size = min(largest, visits - first)
            rest, later = best(first + size)
            options.append((counts[first] * (overhead + size) + rest, (size, *later)))
        return min(options, key=lambda option: option[0])

    time, divided = best(0)
    undivided = sum(
        counts[sum(whole[:index])] * (overhead + size) for index, size in enumerate(whole)
    )
    return list(divided) if time < _WORTH * undivided else whole


def step_overhead(model: nn.Module, sequence: int, flops: int) -> float:
    """The overhead of a step on a GPU, in units of visits.

    Args:
        model: a single model.
        sequence: length of the inputs, if they are sequences: recurrent layers launch kernels for
            each element.
        flops: of a forward pass of a visit's batch.
    """
    launches = sum(
        sequence if isinstance(module, nn.RNNBase) else 1
        for module in model.modules()
        if not any(True for _ in module.children())
    )
    return launches * _LAUNCH / max(flops, 1)
