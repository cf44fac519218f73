"""Exponential moving average of the parameters.

In the t-th round in which a mode is trained (t from 0):
    d_t = min(decay, t / (t + 1))
    average <- d_t average + (1 - d_t) theta

While t / (t + 1) < decay this is the plain mean of the models so far, and d_0 = 0 replaces the
initial parameters: the random start never enters.

Reference: Polyak, Juditsky, "Acceleration of stochastic approximation by averaging", SIAM Journal
on Control and Optimization 1992 (the plain mean).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.average import Average, averages
from ..errors import InputError
from ..flat_params import Tree


@averages.register("ema")
@dataclass(frozen=True, kw_only=True)
class EMA(Average):
    """Exponential moving average over the rounds in which a mode is trained.

    Args:
        decay: weight of the previous average; it reaches back about 1 / (1 - decay) rounds. The
            first rounds use smaller weights, so that the average starts as a plain mean.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise InputError(f"EMA needs 0 <= decay < 1; got {self.decay}.")

    def init(self, theta: Tensor, buffers: Tensor) -> Tree:
        return {
            "ema": theta.clone(),
            "ema_buffers": buffers.clone(),
            "trained_rounds": torch.zeros(len(theta), 1, dtype=torch.int64, device=theta.device),
        }

    def update(
        self, state: Tree, theta: Tensor, buffers: Tensor, trained: Tensor, round: int, lr: float
    ) -> Tree:
        rounds, moves = state["trained_rounds"], trained.unsqueeze(1)
        # In float64: the quotient of integers would be float32, which is too coarse for float64.
        decay = (rounds.double() / (rounds + 1)).clamp(max=self.decay).to(theta.dtype)
        models = {"ema": theta, "ema_buffers": buffers}
        averaged = {
            name: torch.where(moves, decay * state[name] + (1 - decay) * value, state[name])
            for name, value in models.items()
        }
        return {**averaged, "trained_rounds": rounds + moves}

    def center(self, state: Tree, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        return state["ema"], state["ema_buffers"]
