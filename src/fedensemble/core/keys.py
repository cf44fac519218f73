"""The keys of a visit's random numbers: every engine, and the server, must find the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import prng


def visit_key(purpose: str, seed: int, round: int, client: Tensor, mode: Tensor) -> Tensor:
    """The key of visits (client, mode) in a round for a purpose: "batches", "model" or "algorithm";
    [...].
    """
    return torch.as_tensor(prng.key(seed, purpose, round, client, mode))


def shared_uniform(seed: int, round: int, mode: Tensor) -> Tensor:
    """A number in (0, 1) that the server and all clients of a mode share in a round, float64, [...,
    1].
    """
    return prng.uniform(prng.key(seed, "coin", round, mode), 1)
