"""FedMA: federated matched averaging; units are matched layer by layer, matched layers are frozen.

Layers are matched from the input to the output. A unit is described by the vector of its weights
from the layer below (whose order is already known) and its bias. The units of all clients are
matched as in matching/assignment.py, and w is the mean over the clients that have a unit. A cycle
has one round per layer. In round r = 0, 1, ... of a cycle, clients train only the layers after the
first r. In the first cycle clients may train models of their own, whose units they bring into the
order of the frozen layers.

Reference: Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni, "Federated learning with matched
averaging", ICLR 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.problem import Gradient, LocalProblem
from ...core.types import Cohort
from ...flat_params import Tree
from .assignment import nearest_units
from .matched_averaging import Matched
from .unit_permutation import Units


@algorithms.register("fedma")
@dataclass(frozen=True, kw_only=True)
class FedMA(Matched):
    """Matched averaging, layer by layer, for linear, convolution and recurrent layers.

    In the paper, clients keep their own upper layers while the layers below are matched. To get
    this, set `own_rounds` to the number of layers: in round r a client takes the r frozen layers
    from the server, brings its own upper layers into their order (each of its units goes to the
    nearest frozen unit) and trains the upper layers; the server matches the next layer. A client
    that has no model yet starts with a random one above the frozen layers. Between rounds the
    server has a complete model, in which the upper layers are matched as well.

    After `own_rounds` clients keep no state: a client gets the whole model, trains the layers that
    are not frozen, and all of them are matched. At the end of a cycle the next one starts from the
    matched model, which is the paper's FedMA with communication. Recurrent layers are matched by
    their input weights; their recurrent weights follow.

    Args:
        freeze: freeze layers after they are matched; if false, all layers train in all rounds.
    """

    reference = "Wang et al. 2020"
    sends = "model up, model and two counts down"

    freeze: bool = True

    def init_mode(self, theta: Tensor) -> Tree:
        # number of frozen layers, counted from the input
        return {**super().init_mode(theta), "frozen": torch.zeros_like(theta[..., :1])}

    def upload_bytes(
        self, uploads: Tree, shared_draw: Tensor, sent: Tree | None = None
    ) -> int | Tensor:
        """Bytes of the trained layers; the server knows the frozen ones."""
        if sent is None or self.structure is None:
            return super().upload_bytes(uploads, shared_draw)
        trained = (self.structure.stage >= sent["frozen"]).sum(-1, keepdim=True)
        return trained * sent["theta"].element_size()

    def train(self, start: Tensor, sent: Tree, problem: LocalProblem) -> Tensor:
        if self.structure is None:
            return problem.descend(start)
        trained = self.structure.stage >= sent["frozen"]

        def step(state: Tree, gradient: Gradient) -> Tree:
            theta = state["theta"]
            optimizer_state = {name: slot for name, slot in state.items() if name != "theta"}
            new, optimizer_state = problem.optimizer.step(
                theta, gradient(theta) * trained, optimizer_state, problem.lr
            )
            # A zero gradient is not enough to freeze a weight, because weight decay changes it.
            return {"theta": torch.where(trained, new, theta), **optimizer_state}

        return problem.iterate({"theta": start, **problem.optimizer.init_state(start)}, step)[
            "theta"
        ]

    def aligned(self, own: Tensor, sent: Tree) -> Tensor:
        """The frozen layers with the client's own upper layers, whose units are put in order."""
        structure, length = self.structure, own.shape[-1]
        if structure is None or not self.freeze:
            return own
        models, server_models = own.reshape(-1, length), sent["theta"].reshape(-1, length)
        num_frozen = sent["frozen"].reshape(-1, 1)
        # Visits can have different numbers of frozen layers. Every layer is therefore processed for
        # all visits, and `is_frozen` selects the visits for which the result is used.
        for layer, units in enumerate(structure.layers):
            is_frozen = num_frozen > layer
            nearest = nearest_units(
                models[:, units.incoming],
                server_models[:, units.incoming],
                structure.used_units(models)[:, units.all],
                structure.used_units(server_models)[:, units.all],
            )
            identity = torch.arange(structure.units, device=models.device).repeat(len(models), 1)
            before, after = identity[:, : units.first], identity[:, units.first + units.width :]
            permutation = torch.cat([before, units.first + nearest, after], 1)
            models = structure.reorder(models, torch.where(is_frozen, permutation, identity))
            models = torch.where(is_frozen & (structure.stage == layer), server_models, models)
        return models.reshape(own.shape)

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        matched = super().server_update(mode, uploads, cohort)
        layers = len(self.structure.layers) + 1 if self.structure is not None and self.freeze else 1
        return {**matched, "frozen": (mode["frozen"] + 1) % layers}

    def order(self, layers: Sequence[Units]) -> Sequence[Units]:
        return layers

    def features(self, units: Units, layers: Sequence[Units]) -> Tensor:
        return units.incoming
