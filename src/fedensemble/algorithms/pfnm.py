"""PFNM: probabilistic federated neural matching; the server matches hidden units before it averages
them.

From the last hidden layer to the first: a unit is the vector of its bias and its weights into the
layer above (whose order is known by then), in the first layer also of those from the inputs; units
of clients are matched as in matching.py; w <- the mean over each unit's clients.

Reference: Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, "Bayesian nonparametric federated
learning of neural networks", ICML 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from .matching.matched_averaging import Matched
from .matching.unit_permutation import Units


@algorithms.register("pfnm")
@dataclass(frozen=True, kw_only=True)
class PFNM(Matched):
    """FedAvg that matches hidden units across clients first, from the outputs down.

    The paper matches once, after clients have trained models of their own to the end: one round
    with many epochs and all clients. Here that is the first round of a mode; matching goes on in
    every round after it, from the model of the round before. Units are in the order of the first
    client.

    In a convolution a unit is a channel, in a recurrent layer a cell with its gates. All biases
    and, in the layers above the first, no weights from below are used, as in the paper.
    """

    reference = "Yurochkin et al. 2019"
    sends = "model up, model and a count down"

    def order(self, layers: Sequence[Units]) -> Sequence[Units]:
        return layers[::-1]

    def features(self, units: Units, layers: Sequence[Units]) -> Tensor:
        return torch.cat([units.incoming if units is layers[0] else units.bias, units.outgoing], 1)
