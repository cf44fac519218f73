"""PFNM: probabilistic federated neural matching; hidden units are matched, then averaged.

Layers are matched from the last hidden layer to the first. A unit is described by the vector of its
bias and its weights into the layer above (whose order is already known); in the first layer also by
its weights from the inputs. The units of all clients are matched as in matching/assignment.py, and
w is the mean over the clients that have a unit.

Reference: Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni, "Bayesian nonparametric federated
learning of neural networks", ICML 2019.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.algorithm import algorithms
from .matched_averaging import Matched
from .unit_permutation import Units


@algorithms.register("pfnm")
@dataclass(frozen=True, kw_only=True)
class PFNM(Matched):
    """FedAvg that first matches the hidden units of the clients, from the output to the input.

    In the paper units are matched once, after clients have trained their own models to the end: one
    round with many epochs and all clients. Here that is the first round of a mode. Every later
    round matches again, starting from the model of the previous round. Units are in the order of
    the first client.

    In a convolution a unit is a channel, in a recurrent layer a cell with its gates. As in the
    paper, units are matched by their biases and, except in the first layer, not by their input
    weights.
    """

    reference = "Yurochkin et al. 2019"
    sends = "model up, model and a count down"

    def order(self, layers: Sequence[Units]) -> Sequence[Units]:
        return layers[::-1]

    def features(self, units: Units, layers: Sequence[Units]) -> Tensor:
        return torch.cat([units.incoming if units is layers[0] else units.bias, units.outgoing], 1)
