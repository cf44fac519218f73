"""Secret random values, for clients that hide something from the server."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

SecretSource = Callable[[int], Tensor]  # returns `count` values in (0, 1), float64, on the CPU


def system_uniform(count: int) -> Tensor:
    """New values in (0, 1) from the operating system's cryptographic source, float64, [count].

    All 53 bits of each value come from the system. Expanding one random 64-bit key with `prng`
    would not be secret: from one of its values the key, and so all other values, can be computed.

    >>> bool((system_uniform(3) == system_uniform(3)).any())
    False
    """
    if not count:
        return torch.empty(0, dtype=torch.float64)
    bits = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    return ((bits & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
