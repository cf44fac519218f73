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
from itertools import accumulate

from torch import nn

# Blocks are multiples of a quarter of the largest one. Each size is captured as a CUDA graph of its
# own, so there must be few sizes, and they must be the same in each round.
_PIECES = 4
# Blocks are only divided if that saves a tenth of the time, because `step_overhead` is an estimate.
_WORTH = 0.9
# What the launch of a layer costs in FLOPs of a forward pass. An estimate from the throughput on an
# H200 with 10 visits and with 60 or 100 (docs/performance.md): steps of ResNet-18 (62 layers) and
# of the MNIST CNN have about 1.35 and 0.24 ms that do not grow with the visits. That is 25 us per
# layer, in which the GPU could do 0.8 GFLOP of a forward pass.
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
    if overhead is None or most <= 1 or counts[0] == counts[-1]:
        return whole
    piece = -(-most // _PIECES)
    sizes = [most, *range(most - most % piece, 0, -piece)]

    # Dynamic programming over the places where a block may begin. Not recursive: with a large model
    # a round has more blocks than Python allows nested calls.
    places = {0}
    for first in range(visits):
        if first in places:
            places |= {min(first + size, visits) for size in sizes}
    # The least time of the visits from each place on, and the size of the block that begins there.
    best: dict[int, tuple[float, int]] = {visits: (0.0, 0)}
    for first in sorted(places - {visits}, reverse=True):
        fitting = [min(size, visits - first) for size in sizes]
        best[first] = min(
            ((counts[first] * (overhead + size) + best[first + size][0], size) for size in fitting),
            key=lambda option: option[0],
        )
    firsts = accumulate(whole[:-1], initial=0)
    undivided = sum(
        counts[first] * (overhead + size) for first, size in zip(firsts, whole, strict=True)
    )
    if best[0][0] >= _WORTH * undivided:
        return whole
    divided, first = list[int](), 0
    while first < visits:
        divided.append(best[first][1])
        first += divided[-1]
    return divided


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
