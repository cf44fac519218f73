"""Averages: which models predict, given the modes of all rounds so far.

Training never reads an average: clients receive the current modes. The server computes the average
from the modes that it has anyway, so that it costs no communication.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree
from ..registry import Registry
from .algorithm import Algorithm, algorithms
from .hyperparameters import check_hyperparameters
from .types import EnsembleState

averages: Registry[type[Average]] = Registry("average", lambda: Average, "averages")


class Predictors(NamedTuple):
    """The S models of each mode whose predictions are averaged."""

    theta: Tensor  # [K, S, P]
    buffers: Tensor  # [K, S, R] running statistics; [K, 1, R] if the S models share them


@dataclass(frozen=True, kw_only=True)
class Average(ABC):
    """A rule that replaces the current modes by averages over rounds, for prediction only.

    It treats each mode separately. Its state is a tree of tensors [K, ...], one row per mode.
    Arguments must not be written to. For most rules S = 1, and `center` is all that predicts; a
    rule with several models per mode overrides `predictors`.
    """

    def __post_init__(self) -> None:
        check_hyperparameters(self)

    @abstractmethod
    def init(self, theta: Tensor, buffers: Tensor) -> Tree:
        """The state before the first round.

        Args:
            theta: initial parameters of the modes, [K, P].
            buffers: their running statistics, [K, R].
        """

    @abstractmethod
    def update(
        self, state: Tree, theta: Tensor, buffers: Tensor, trained: Tensor, round: int, lr: float
    ) -> Tree:
        """The state after a round, called after every round.

        Args:
            state: before the round.
            theta, buffers: of the modes after the server's step, [K, P] and [K, R].
            trained: whether the mode had clients in this round, bool [K]. A mode without clients
                has not changed, and must not count. If modes share parameters or interact, every
                mode has changed, and all are True.
            round: counted from 0.
            lr: the clients' learning rate in this round.
        """

    @abstractmethod
    def center(self, state: Tree, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """One model for each mode, [K, P] and [K, R]: what `Ensemble.module` returns.

        A mode that the average has no model of yet is represented by its current parameters.

        Args:
            state: of the average.
            theta, buffers: of the current modes, [K, P] and [K, R].
        """

    def note(self, rounds: int) -> str:
        """A note for the user if the average has no effect in a run of `rounds` rounds."""
        return ""

    def predictors(self, state: Tree, theta: Tensor, buffers: Tensor, seed: int) -> Predictors:
        """The models that predict; by default one for each mode, `center`.

        Args:
            state: of the average.
            theta, buffers: of the current modes, [K, P] and [K, R].
            seed: of random samples.
        """
        center, statistics = self.center(state, theta, buffers)
        return Predictors(center.unsqueeze(1), statistics.unsqueeze(1))


@averages.register("none")
@dataclass(frozen=True, kw_only=True)
class NoAverage(Average):
    """The current modes predict, the default."""

    def init(self, theta: Tensor, buffers: Tensor) -> Tree:
        return {}

    def update(
        self, state: Tree, theta: Tensor, buffers: Tensor, trained: Tensor, round: int, lr: float
    ) -> Tree:
        return state

    def center(self, state: Tree, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        return theta, buffers


NO_AVERAGE = NoAverage()


class PredictionModels(NamedTuple):
    """The arguments of an `Ensemble` that depend on the state."""

    theta: Tensor  # [K, P]
    buffers: Tensor  # [K, R]
    predictors: Tensor  # [K, S, P]
    predictor_buffers: Tensor | None = None  # [K, S, R] or [K, 1, R]; None: those of the mode


def prediction_models(
    state: EnsembleState, algorithm: Algorithm, average: Average, seed: int
) -> PredictionModels:
    """The models that predict in the current state: those of the average, or of the algorithm."""
    theta, buffers = state.modes["theta"], state.buffers
    if isinstance(average, NoAverage):
        modes, statistics = algorithm.deployed_modes(state.modes, buffers)
        return PredictionModels(modes["theta"], statistics, algorithm.predictors(modes))
    models = average.predictors(state.average, theta, buffers, seed)
    # An algorithm that deploys one of its modes, or their mean, does so with the averages: the s-th
    # model of what it deploys is made of the s-th models of the modes.
    own_statistics = models.buffers.shape[1] > 1
    deployed = [
        _deploy(algorithm, state, models.theta[:, s], models.buffers[:, s if own_statistics else 0])
        for s in range(models.theta.shape[1])
    ]
    predictors = torch.stack([theta for theta, _ in deployed], 1)
    # A mode with one model is that model, in files and in `Ensemble.module`, too.
    if len(deployed) == 1:
        return PredictionModels(*deployed[0], predictors)
    statistics = torch.stack([s for _, s in deployed[: models.buffers.shape[1]]], 1)
    center = _deploy(algorithm, state, *average.center(state.average, theta, buffers))
    return PredictionModels(*center, predictors, statistics)


def _deploy(
    algorithm: Algorithm, state: EnsembleState, theta: Tensor, buffers: Tensor
) -> tuple[Tensor, Tensor]:
    """The models that the algorithm deploys if its modes are `theta`, [K, P]."""
    modes, statistics = algorithm.deployed_modes({**state.modes, "theta": theta}, buffers)
    return modes["theta"], statistics


def check_average(average: Average, algorithm: Algorithm) -> None:
    """Raises if the algorithm has models of its own for prediction and there is an average."""
    if isinstance(average, NoAverage) or type(algorithm).predictors is Algorithm.predictors:
        return
    rule = averages.name_of(type(average)) or type(average).__name__
    name = algorithms.name_of(type(algorithm)) or type(algorithm).__name__
    raise InputError(
        f"Average '{rule}' cannot be used with algorithm '{name}', which predicts with models of "
        "its own and not with its modes. Use average 'none', or another algorithm."
    )


def update_average(
    average: Average, state: EnsembleState, trained: tuple[int, ...], lr: float
) -> Tree:
    """The average's state after the round that led to `state`.

    Args:
        trained: modes that the round has changed.
        lr: the clients' learning rate in the round.
    """
    if isinstance(average, NoAverage):
        return state.average
    theta = state.modes["theta"]
    has_clients = torch.zeros(len(theta), dtype=torch.bool, device=theta.device)
    has_clients[list(trained)] = True
    return average.update(state.average, theta, state.buffers, has_clients, state.round - 1, lr)
