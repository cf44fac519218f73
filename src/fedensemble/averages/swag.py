"""MultiSWAG: samples from a Gaussian fitted to the models of each mode.

Of n collected models theta_i, with the running means mean_i:
    mean      = 1/n sum_i theta_i
    variance  = 1/n sum_i (theta_i - mean)^2             (diagonal)
    D         = [theta_i - mean_i for the last m <= rank models]
A sample, with standard normal z1 [P] and z2 [m]:
    mean + scale (sqrt(variance / 2) z1 + D z2 / sqrt(2 (m - 1)))

References: Maddox, Garipov, Izmailov, Vetrov, Wilson, "A simple baseline for Bayesian uncertainty
in deep learning", NeurIPS 2019 (SWAG); Wilson, Izmailov, "Bayesian deep learning and a
probabilistic perspective of generalization", NeurIPS 2020 (MultiSWAG).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import prng
from ..core.average import Predictors, averages
from ..errors import InputError
from ..flat_params import Tree
from .periodic import PeriodicMean

_MAX_MODELS = 10_000  # samples and deviations of a mode are all in memory at the same time


@averages.register("swag")
@dataclass(frozen=True, kw_only=True)
class SWAG(PeriodicMean):
    """MultiSWAG: models sampled from a Gaussian that is fitted to each mode's trajectory.

    The samples follow from the seed: the same state always gives the same samples. All samples of a
    mode use the mean of its running statistics. `Ensemble.module` returns the mean, which is that
    of SWA. Until two models are collected, a mode has no spread.

    Args:
        start: number of rounds at the beginning whose models are not collected. The default is half
            of the default number of rounds.
        rank: number of last deviations from the mean, which give the covariance between
            parameters; 0 samples from the diagonal Gaussian only.
        samples: number of models that are drawn for each mode, S.
        scale: factor of the Gaussian's standard deviation.
    """

    start: int = 50
    rank: int = 20
    samples: int = 10
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank == 1 or not 0 <= self.rank <= _MAX_MODELS:
            raise InputError(f"SWAG needs rank 0 or from 2 to {_MAX_MODELS}; got {self.rank}.")
        if not 1 <= self.samples <= _MAX_MODELS:
            raise InputError(f"SWAG needs samples from 1 to {_MAX_MODELS}; got {self.samples}.")
        if not self.scale >= 0:
            raise InputError(f"SWAG needs scale >= 0; got {self.scale}.")

    def init_models(self, theta: Tensor, buffers: Tensor) -> Tree:
        return {
            **super().init_models(theta, buffers),
            "variance": torch.zeros_like(theta),
            "deviations": theta.new_zeros(len(theta), self.rank, theta.shape[1]),
        }

    def add_models(self, state: Tree, theta: Tensor, buffers: Tensor, count: Tensor) -> Tree:
        means = super().add_models(state, theta, buffers, count)
        before, after = theta - state["mean"], theta - means["mean"]
        # Welford's update, which is never negative. The difference of two second moments would
        # cancel in float32, and the root of a negative variance is nan.
        variance = state["variance"] + (before * after - state["variance"]) / count
        deviations = torch.cat([state["deviations"], after.unsqueeze(1)], 1)[:, 1:]
        return {**means, "variance": variance, "deviations": deviations}

    def predictors(self, state: Tree, theta: Tensor, buffers: Tensor, seed: int) -> Predictors:
        center, statistics = self.center(state, theta, buffers)
        columns = state["collected"].clamp(max=self.rank).to(theta.dtype)  # [K, 1]
        # Both parts have half of the variance each; without deviations the diagonal has all of it.
        half = 0.5 if self.rank else 1.0
        diagonal = (half * state["variance"]).sqrt()
        low_rank = self.scale / (2 * (columns - 1).clamp(min=1)).sqrt()
        samples = []
        for mode in range(len(theta)):
            key = prng.key(seed, "swag", mode)
            for sample in range(self.samples):
                z = prng.normal(prng.fold_in(key, sample, 0), theta.shape[1], theta.device)
                change = self.scale * diagonal[mode] * z.to(theta.dtype)
                if self.rank:
                    z = prng.normal(prng.fold_in(key, sample, 1), self.rank, theta.device)
                    change += low_rank[mode] * (z.to(theta.dtype) @ state["deviations"][mode])
                samples.append(center[mode] + change)
        stacked = torch.stack(samples).reshape(len(theta), self.samples, -1)
        return Predictors(stacked, statistics.unsqueeze(1))
