"""FedMA: federated matched averaging; units are matched layer by layer, and matched layers are frozen.

Layer n, from the inputs up: a unit is the vector of its weights from the layer below (whose order is known by then) and
its bias; units of clients are matched as in matching.py; w <- the mean over each unit's clients. In round r of a cycle
of as many rounds as there are layers, clients train only what comes after the first r layers, r = 0, 1, ...

Reference: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated learning with matched averaging", ICLR 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.algorithm import algorithms
from ..core.problem import Gradient, LocalProblem
from ..core.structure import Units
from ..core.types import Cohort
from ..vectors import Tree
from .matched import Matched


@algorithms.register("fedma")
@dataclass(frozen=True, kw_only=True)
class FedMA(Matched):
    """Matched averaging, layer by layer, for linear, convolution and recurrent layers.

    The paper's clients keep their own upper layers while those below are matched. Here anybody may take part in any
    round, and keeps nothing: a client gets the whole model, trains the layers that are not frozen yet, and all of them
    are matched; when a cycle is over the next one starts from its model, which is the paper's FedMA with communication.
    Recurrent layers are matched by their weights from below, and their connections among themselves follow.

    Args:
        freeze: freeze layers once they are matched; without, all layers train in all rounds.
    """

    reference = "Wang et al. 2020"
    sends = "model up, model and a count down"

    freeze: bool = True

    def init_mode(self, theta: Tensor) -> Tree:
        return {**super().init_mode(theta), "frozen": torch.zeros_like(theta[..., :1])}  # layers, counted from below

    def broadcast(self, mode: Tree) -> Tree:
        return mode

    def upload_bytes(self, uploads: Tree, coin: Tensor, sent: Tree | None = None) -> int | Tensor:
        """Frozen layers are what the server sent, and need not travel."""
        if sent is None or self.structure is None:
            return super().upload_bytes(uploads, coin)
        trained = (self.structure.stage >= sent["frozen"]).sum(-1, keepdim=True)
        return trained * sent["theta"].element_size()

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start = sent["theta"]
        if self.structure is None:
            return {"theta": problem.descend(start)}, memory
        trained = self.structure.stage >= sent["frozen"]

        def step(state: Tree, gradient: Gradient) -> Tree:
            theta, slots = state["theta"], {name: slot for name, slot in state.items() if name != "theta"}
            new, slots = problem.optimizer.step(theta, gradient(theta) * trained, slots, problem.lr)
            return {"theta": torch.where(trained, new, theta), **slots}  # weight decay moves what has no gradient

        state = problem.iterate({"theta": start, **problem.optimizer.slots(start)}, step)
        return {"theta": state["theta"]}, memory

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        matched = super().server_update(mode, uploads, cohort)
        layers = len(self.structure.layers) + 1 if self.structure is not None and self.freeze else 1
        return {**matched, "frozen": (mode["frozen"] + 1) % layers}

    def order(self, layers: Sequence[Units]) -> Sequence[Units]:
        return layers

    def features(self, units: Units, layers: Sequence[Units]) -> Tensor:
        return units.incoming
