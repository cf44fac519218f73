"""What methods that match hidden units share: units, their growth, and the average of what was
matched.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from math import ceil
from typing import ClassVar, Self

import torch
from torch import Tensor

from ...core.algorithm import algorithms
from ...core.problem import LocalProblem
from ...core.types import Cohort
from ...errors import InputError
from ...flat_params import Tree
from ...modeling.server_context import ServerContext
from ..fedavg import FedAvg
from .assignment import Prior, match_units
from .unit_permutation import Structure, Units, find_structure

_LEFT = "own_rounds_left"  # updates of a mode before which clients still train models of their own
_DRAWN = 8  # models that moments are estimated from


@dataclass(frozen=True, kw_only=True)
class Matched(FedAvg):
    """FedAvg whose server first puts the hidden units of its clients into one order.

    A weight is the weighted mean over the clients that have both of its units. The papers take the
    posterior mean, which shrinks weights towards 0; done once, that hardly matters, but round after
    round it would be a weight decay.

    The papers are about clients with models of their own, whose units are in no common order: each
    starts from its own random initialisation, and the server matches what they have learned. In the
    first `own_rounds` updates of a mode clients do so; a client that is asked again in that time
    goes on with its own model, which it keeps. The papers' one-shot setting is one long round in
    which all clients take part. After that, clients start from the matched model of the round
    before: their units are in its order already, and matching only lets layers grow.

    A layer is as wide as the model, and units beyond those in use are 0 in all their weights. Such
    a unit gives 0 and has gradient 0 (which is tried out for the model at hand), so clients leave
    it alone: shapes never change.

    Args:
        start: share of each layer's units that are in use at first; the rest is room to grow, at
            most to the width of the model. With 1, units are matched one to one.
        sigma, sigma0, gamma: see `matching.Prior`; the larger gamma and the smaller sigma, the
            sooner a layer grows.
        sweeps: times that each client is matched anew to all others.
        own_rounds: updates of a mode before which clients train models of their own. With 0 they
            always start from the server's model, which makes matching with start = 1 the same as
            averaging.
    """

    gathers = True
    structure: ClassVar[Structure | None] = None  # of the model it is bound to
    # mean and spread of the model's initialisation, [P] each
    initial: ClassVar[tuple[Tensor, Tensor] | None] = None

    start: float = 1.0
    sigma: float = 1.0
    sigma0: float = 3.0  # a variance of 10 or so, as in the authors' experiments
    gamma: float = 1.0
    sweeps: int = 3
    own_rounds: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        if not 0 < self.start <= 1:
            raise InputError(f"{owner} needs 0 < start <= 1; got {self.start}.")
        for name in ("sigma", "sigma0", "gamma"):
            if not getattr(self, name) > 0:
                raise InputError(f"{owner} needs {name} > 0; got {getattr(self, name)}.")
        if self.sweeps < 0:
            raise InputError(f"{owner} needs sweeps >= 0; got {self.sweeps}.")
        if self.own_rounds < 0:
            raise InputError(f"{owner} needs own_rounds >= 0; got {self.own_rounds}.")

    def bind(self, workshop: ServerContext) -> Self:
        name = algorithms.name_of(type(self)) or type(self).__name__
        bound = copy(self)
        structure = find_structure(workshop.learner, workshop.examples, f"Algorithm '{name}'")
        object.__setattr__(bound, "structure", structure)
        object.__setattr__(bound, "initial", initialisation(workshop))
        if self.start < 1:
            check_unused(
                workshop, bound.narrowed(workshop.learner.initial(0, 1)[0]), structure, name
            )
        return bound

    def init_mode(self, theta: Tensor) -> Tree:
        mode = {"theta": self.narrowed(theta)}
        return (
            {**mode, _LEFT: torch.full_like(theta[..., :1], self.own_rounds)}
            if self.own_rounds
            else mode
        )

    def broadcast(self, mode: Tree) -> Tree:
        return mode

    def init_memory(self, theta: Tensor) -> Tree:
        if self.own_rounds < 2:  # with one such round nobody goes on with a model of its own
            return {}
        return {"own": torch.zeros_like(theta), "has_own": torch.zeros_like(theta[..., :1])}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start = self.starting_point(sent, memory, problem)
        theta = self.train(start, sent, problem)
        return {"theta": theta}, {
            "own": theta,
            "has_own": torch.ones_like(theta[..., :1]),
        } if memory else memory

    def train(self, start: Tensor, sent: Tree, problem: LocalProblem) -> Tensor:
        """The client's model after local training."""
        return problem.descend(start)

    def starting_point(self, sent: Tree, memory: Tree, problem: LocalProblem) -> Tensor:
        """The server's model, or, while clients train models of their own, the client's."""
        theta = sent["theta"]
        if self.own_rounds == 0 or self.initial is None:
            return theta
        middle, spread = self.initial
        own = self.narrowed(middle + spread * (2 * problem.uniform(theta) - 1))
        own = torch.where(memory["has_own"] > 0, memory["own"], own) if memory else own
        return torch.where(sent[_LEFT] > 0, self.aligned(own, sent), theta)

    def aligned(self, own: Tensor, sent: Tree) -> Tensor:
        """A client's own model as it fits what the server has sent; PFNM's server does all the
        matching.
        """
        return own

    def narrowed(self, theta: Tensor) -> Tensor:
        """Networks [..., P] of which the share `start` of each layer's units is in use."""
        if self.structure is None or self.start == 1:
            return theta
        used = torch.zeros(self.structure.units, dtype=torch.bool, device=theta.device)
        for units in self.structure.layers:
            used[units.first : units.first + ceil(self.start * units.width)] = True
        return theta * self.structure.held(used)

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        theta, members = uploads["theta"].clone(), cohort.members
        if members is None or self.structure is None:
            raise InputError(
                f"{type(self).__name__} needs what each client sent, and to be bound to a model."
            )
        for one in sorted(set(members.mode.tolist())):  # the Hungarian algorithm knows no batches
            mine = members.mode == one
            theta[one] = self.merge(
                self.structure, members.uploads["theta"][mine], members.weight[mine]
            )
        left = {_LEFT: (mode[_LEFT] - 1).clamp(min=0)} if _LEFT in mode else {}
        return {**mode, **left, "theta": theta}

    def merge(self, structure: Structure, theta: Tensor, weight: Tensor) -> Tensor:
        """One network [P] from those of J clients, [J, P]."""
        slot = torch.arange(structure.units, device=theta.device).repeat(len(theta), 1)
        used = structure.alive(theta)
        prior = Prior(self.sigma, self.sigma0, self.gamma)
        for units in self.order(structure.layers):
            vectors = structure.reorder(theta, slot)[:, self.features(units, structure.layers)]
            found = match_units(vectors, used[:, units.all], weight, prior, self.sweeps)
            slot[:, units.all] = units.first + found.to(slot.device)
        theta = structure.reorder(theta, slot)
        held = structure.held(torch.zeros_like(used).scatter(1, slot, used)) * weight.unsqueeze(
            1
        ).to(theta.dtype)
        total = held.sum(0)
        return (theta * held).sum(0) / torch.where(total > 0, total, torch.ones_like(total))

    @abstractmethod
    def order(self, layers: Sequence[Units]) -> Sequence[Units]:
        """The layers as they are matched, one given those before it."""

    @abstractmethod
    def features(self, units: Units, layers: Sequence[Units]) -> Tensor:
        """Places of the weights that a layer's units are matched by, [W, D]."""


def initialisation(workshop: ServerContext) -> tuple[Tensor, Tensor]:
    """Mean and half width of the uniform distribution with the moments of the model's
    initialisation, [P] each.

    The moments are those of each parameter tensor. Layers of torch are initialised uniformly, so
    for them this is their own distribution, and a client can draw a model from it without building
    modules.
    """
    learner = workshop.learner
    means, widths = {}, {}
    for name, values in learner.theta_layout.unflatten(learner.initial(0, _DRAWN)[0]).items():
        spread, mean = torch.std_mean(values, correction=0)
        means[name], widths[name] = (
            mean.expand(values.shape[1:]),
            (3**0.5 * spread).expand(values.shape[1:]),
        )
    return learner.theta_layout.flatten(means), learner.theta_layout.flatten(widths)


def check_unused(workshop: ServerContext, theta: Tensor, structure: Structure, name: str) -> None:
    """Raises unless a unit whose weights are 0 has gradient 0 in networks `theta` [1, P]."""
    x = workshop.examples.unsqueeze(0)
    buffers = workshop.learner.initial(0, 1)[1]
    gradient = workshop.gradient(lambda outputs, _: (outputs**2).mean(), theta, buffers, x, x)
    woken = structure.alive(gradient) & ~structure.alive(theta)
    for units in structure.layers:
        if bool(woken[:, units.all].any()):
            raise InputError(
                f"Algorithm '{name}' cannot let layer '{units.name}' grow: a unit without weights does not give 0 "
                "there (a sigmoid gives 1/2), so local training would wake it. Use ReLU or tanh, or start = 1."
            )
