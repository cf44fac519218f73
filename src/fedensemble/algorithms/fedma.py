"""FedMA: federated matched averaging; units are matched layer by layer, and matched layers are
frozen.

Layer n, from the inputs up: a unit is the vector of its weights from the layer below (whose order
is known by then) and its bias; units of clients are matched as in matching.py; w <- the mean over
each unit's clients. In round r of a cycle of as many rounds as there are layers, clients train only
what comes after the first r layers, r = 0, 1, ... In the first cycle they may do so with models of
their own, whose units they put into the order of the frozen layers.

Reference: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated learning with matched
averaging", ICLR 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.problem import Gradient, LocalProblem
from ..core.types import Cohort
from ..flat_params import Tree
from .matching.assignment import nearest_units
from .matching.matched_averaging import Matched
from .matching.unit_permutation import Units


@algorithms.register("fedma")
@dataclass(frozen=True, kw_only=True)
class FedMA(Matched):
    """Matched averaging, layer by layer, for linear, convolution and recurrent layers.

    The paper's clients keep their own upper layers while those below are matched. That is
    `own_rounds` = the number of
    layers: in round r a client takes the r layers that are frozen from the server, puts its own
    upper layers into their order (each of its units goes to the frozen unit nearest to it) and
    trains these; the server matches the next layer. One that has no model yet starts with a random
    one above the frozen layers. Between its rounds the server has a whole model, in which the upper
    layers are matched as well.

    After `own_rounds` a client keeps nothing: it gets the whole model, trains the layers that are
    not frozen, and all of them are matched; when a cycle is over the next one starts from its
    model, which is the paper's FedMA with communication. Recurrent layers are matched by their
    weights from below, and their connections among themselves follow.

    Args:
        freeze: freeze layers once they are matched; without, all layers train in all rounds.
    """

    reference = "Wang et al. 2020"
    sends = "model up, model and two counts down"

    freeze: bool = True

    def init_mode(self, theta: Tensor) -> Tree:
        # layers, counted from below
        return {**super().init_mode(theta), "frozen": torch.zeros_like(theta[..., :1])}

    def upload_bytes(self, uploads: Tree, coin: Tensor, sent: Tree | None = None) -> int | Tensor:
        """Frozen layers are what the server sent, and need not travel."""
        if sent is None or self.structure is None:
            return super().upload_bytes(uploads, coin)
        trained = (self.structure.stage >= sent["frozen"]).sum(-1, keepdim=True)
        return trained * sent["theta"].element_size()

    def train(self, start: Tensor, sent: Tree, problem: LocalProblem) -> Tensor:
        if self.structure is None:
            return problem.descend(start)
        trained = self.structure.stage >= sent["frozen"]

        def step(state: Tree, gradient: Gradient) -> Tree:
            theta, slots = (
                state["theta"],
                {name: slot for name, slot in state.items() if name != "theta"},
            )
            new, slots = problem.optimizer.step(theta, gradient(theta) * trained, slots, problem.lr)
            # weight decay moves what has no gradient
            return {"theta": torch.where(trained, new, theta), **slots}

        return problem.iterate({"theta": start, **problem.optimizer.slots(start)}, step)["theta"]

    def aligned(self, own: Tensor, sent: Tree) -> Tensor:
        """The client's own upper layers above the frozen ones, with units in the order of these."""
        structure, length = self.structure, own.shape[-1]
        if structure is None or not self.freeze:
            return own
        nets, theirs = own.reshape(-1, length), sent["theta"].reshape(-1, length)
        frozen = sent["frozen"].reshape(-1, 1)
        for place, units in enumerate(structure.layers):
            found = nearest_units(
                nets[:, units.incoming],
                theirs[:, units.incoming],
                structure.alive(nets)[:, units.all],
                structure.alive(theirs)[:, units.all],
            )
            slot = torch.arange(structure.units, device=nets.device).repeat(len(nets), 1)
            moved = torch.cat(
                [slot[:, : units.first], units.first + found, slot[:, units.first + units.width :]],
                1,
            )
            nets = structure.reorder(nets, torch.where(frozen > place, moved, slot))
            nets = torch.where((frozen > place) & (structure.stage == place), theirs, nets)
        return nets.reshape(own.shape)

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        matched = super().server_update(mode, uploads, cohort)
        layers = len(self.structure.layers) + 1 if self.structure is not None and self.freeze else 1
        return {**matched, "frozen": (mode["frozen"] + 1) % layers}

    def order(self, layers: Sequence[Units]) -> Sequence[Units]:
        return layers

    def features(self, units: Units, layers: Sequence[Units]) -> Tensor:
        return units.incoming
