"""PRNG keys of visits, which all engines and the server compute in the same way."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import prng


def visit_key(purpose: str, seed: int, round: int, client: Tensor, mode: Tensor) -> Tensor:
    """The PRNG key of visits (client, mode) in a round, [...].

    Args:
        purpose: such as "batches", "model" or "algorithm"; different purposes are independent.
    """
    return torch.as_tensor(prng.key(seed, purpose, round, client, mode))


def shared_uniform(seed: int, round: int, mode: Tensor) -> Tensor:
    """A random draw in (0, 1) that the server shares with a mode's clients, float64, [..., 1]."""
    # The purpose is hashed into the key: renaming "coin" would change all results.
    return prng.uniform(prng.key(seed, "coin", round, mode), 1)
