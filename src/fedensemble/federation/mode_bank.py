"""The K modes as each client has them: the same for all, or versions of its own."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..predict import Ensemble
from ..prediction import Prediction

if TYPE_CHECKING:
    from .federation import Federation


@dataclass(frozen=True, eq=False)
class ModeBank:
    """K models for each of N clients.

    Args:
        ensemble: the modes, and how they predict.
        theta, buffers: of each client's own versions, [N, K, P] and [N, K, R]; None if all clients
            have the modes themselves.
    """

    ensemble: Ensemble
    theta: Tensor | None = None
    buffers: Tensor | None = None

    def __len__(self) -> int:
        """Number of modes, K."""
        return len(self.ensemble)

    def of_client(self, client: int) -> Ensemble:
        """The K models of one client; the modes themselves for client -1."""
        if self.theta is None or self.buffers is None or client < 0:
            return self.ensemble
        return with_models(self.ensemble, self.theta[client], self.buffers[client])

    def outputs(self, x: Tensor, owner: Tensor, batch_size: int = 1024) -> Tensor:
        """The outputs of the owners' models for rows [n, ...]: [K, S, n, ..., C] on the CPU.

        Args:
            owner: client of each row, [n]; -1 is a client without models of its own.
        """
        if self.theta is None:
            return self.ensemble.outputs(x, batch_size=batch_size)
        parts, places = [], []
        for client in sorted(set(owner.tolist())):
            place = torch.nonzero(owner == client).flatten()
            parts.append(self.of_client(client).outputs(x[place], batch_size=batch_size))
            places.append(place)
        order = torch.cat(places).argsort()
        return torch.cat(parts, 2)[:, :, order]

    def predict(self, x: Tensor, owner: Tensor, batch_size: int = 1024) -> Prediction:
        """The predictions of the owners' ensembles of K models; the arguments are as above."""
        return self.ensemble._combine_outputs(self.outputs(x, owner, batch_size))

    def start(self, choice: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Models [M, P], statistics [M, R], and the row of each client's chosen mode in them, [N].

        Args:
            choice: mode of each client, [N].
        """
        if self.theta is None or self.buffers is None:
            return self.ensemble.theta, self.ensemble.buffers, choice
        clients = torch.arange(len(choice))
        device = self.theta.device
        chosen = (clients.to(device), choice.to(device))
        return self.theta[chosen], self.buffers[chosen], clients


def own_models(federation: Federation) -> ModeBank:
    """The K modes as each client has them now.

    The models are kept until the next round. With torchrun, making them is a collective call.
    """
    if federation._own is not None and federation._own[0] is federation.state:
        return federation._own[1]
    ensemble = federation.uncalibrated
    bank = ModeBank(ensemble)
    if federation.algorithm.personal:
        bank = ModeBank(ensemble, *federation.personal_models(range(len(federation.data))))
    federation._own = (federation.state, bank)
    return bank


def with_models(ensemble: Ensemble, theta: Tensor, buffers: Tensor) -> Ensemble:
    """An ensemble of other models, [K, P] and [K, R], that predicts as this one does."""
    other = copy(ensemble)
    other.theta, other.buffers = theta, buffers
    other.predictors, other.predictor_buffers = theta.unsqueeze(1), buffers.unsqueeze(1)
    # Parameters that were equal in all modes need not be so in these.
    other.shared = other.calibration = None
    return other
