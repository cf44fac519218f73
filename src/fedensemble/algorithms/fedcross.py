"""FedCross: K models are trained side by side, and each is mixed a little with another one.

Client:  w_i = local SGD from its mode's model.
Server:  v_k = sum_i p_i w_i / sum_i p_i over the clients of mode k;
         w_k <- alpha v_k + (1 - alpha) v_co(k),   the partner co(k) being
           in order:  co(k) = (k + (round mod (K - 1)) + 1) mod K,
           lowest, highest:  the mode with the lowest or highest cosine similarity to v_k.
Deployed: the mean of the K models.

Reference: Hu, Zhou, Yue, Ling, Huang, Li, Liu, Lian, Chen, "FedCross: towards accurate federated
learning via multi-model cross-aggregation", ICDE 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.types import Cohort
from ..errors import InputError
from ..flat_params import Tree
from .fedavg import FedAvg

_CHUNK = 1 << 20  # parameters that are converted to float64 at a time


@algorithms.register("fedcross")
@dataclass(frozen=True, kw_only=True)
class FedCross(FedAvg):
    """FedAvg of K models that the server mixes in pairs; their mean is the global model.

    In the paper, one client trains each model in each round. Here a mode may have several clients,
    whose models are averaged, or none: an idle mode takes part with the model that it has, as the
    one that is mixed and as a partner. Running statistics are mixed like the parameters. With one
    mode, FedCross is FedAvg.

    Args:
        alpha: weight of a mode's own model; 1 never mixes.
        partner: the mode that a mode is mixed with: "in-order" changes it in every round, so that
            every mode meets all others in K - 1 rounds; "lowest" and "highest" take the one with
            the lowest or highest cosine similarity of the parameters.
        same_start: whether all modes start from one model, as in the paper. Models with different
            starts have their hidden units in different orders, and their mean predicts badly.
        deploy: what predicts: the "mean" of the K models, which is a single model, or their
            "ensemble".
    """

    reference = "Hu et al. 2024"

    alpha: float = 0.99
    partner: Literal["in-order", "lowest", "highest"] = "in-order"
    same_start: bool = True
    deploy: Literal["mean", "ensemble"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise InputError(f"FedCross needs alpha from 0 to 1; got {self.alpha}.")
        if self.partner not in ("in-order", "lowest", "highest"):
            raise InputError(
                f"FedCross needs partner 'in-order', 'lowest' or 'highest'; got {self.partner!r}."
            )
        if self.deploy not in ("mean", "ensemble"):
            raise InputError(f"FedCross needs deploy 'mean' or 'ensemble'; got {self.deploy!r}.")

    def start_modes(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        if not self.same_start:
            return theta, buffers
        return theta[:1].repeat(len(theta), 1), buffers[:1].repeat(len(buffers), 1)

    def couple(self, modes: Tree, buffers: Tensor, cohort: Cohort) -> tuple[Tree, Tensor]:
        theta = modes["theta"]
        if len(theta) == 1:
            return modes, buffers
        partner = self.partners(theta, cohort.round)
        return {**modes, "theta": self._mix(theta, partner)}, self._mix(buffers, partner)

    def partners(self, theta: Tensor, round: int) -> Tensor:
        """The partner of each of K >= 2 modes in a round (counted from 0), [K] int64."""
        modes = len(theta)
        if self.partner == "in-order":
            return (torch.arange(modes, device=theta.device) + round % (modes - 1) + 1) % modes
        similarity = cosine_similarity(theta)
        worst = float("inf") if self.partner == "lowest" else -float("inf")
        similarity.fill_diagonal_(worst)  # no mode is its own partner
        return similarity.argmin(1) if self.partner == "lowest" else similarity.argmax(1)

    def _mix(self, value: Tensor, partner: Tensor) -> Tensor:
        # As a change, not as a sum of two products: equal rows then stay equal bit for bit, and so
        # do all rows with alpha = 1.
        return value + (1 - self.alpha) * (value[partner] - value)

    def deployed_modes(self, modes: Tree, buffers: Tensor) -> tuple[Tree, Tensor]:
        if self.deploy == "ensemble":
            return modes, buffers
        mean = {name: value.mean(0, keepdim=True) for name, value in modes.items()}
        return mean, buffers.mean(0, keepdim=True)


def cosine_similarity(theta: Tensor) -> Tensor:
    """The cosine similarity of each pair of models [K, P], in float64, [K, K].

    Float64, because models that have one start differ in few digits of float32.

    >>> cosine_similarity(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 4.0]]))
    tensor([[1.0000, 0.0000, 0.6000],
            [0.0000, 1.0000, 0.8000],
            [0.6000, 0.8000, 1.0000]], dtype=torch.float64)
    """
    gram = torch.zeros(len(theta), len(theta), dtype=torch.float64, device=theta.device)
    for part in torch.split(theta, _CHUNK, 1):
        gram += part.double() @ part.double().T
    norm = gram.diagonal().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return gram / (norm * norm.unsqueeze(1))
