"""Random numbers that nobody else can know, for clients that hide something from a server."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

SecretSource = Callable[[int], Tensor]  # so many numbers in (0, 1), float64, on the CPU


def system_uniform(count: int) -> Tensor:
    """Numbers in (0, 1) from the operating system's cryptographic source, float64, [count]; new
    ones at every call.

    All 53 bits of each number come from the system. Expanding a random 64-bit key as in `draws`
    would not do: whoever sees one of its numbers can compute the key, and with it all the others.

    >>> bool((system_uniform(3) == system_uniform(3)).any())
    False
    """
    if not count:
        return torch.empty(0, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    return ((bits & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
