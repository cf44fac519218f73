"""Base class of algorithms that match clients' hidden units before they average them."""

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

# Name, in a mode's state, of the number of updates for which clients still train their own models.
_ROUNDS_LEFT = "own_rounds_left"
_INIT_SAMPLES = 8  # models from which the distribution of initial weights is estimated


@dataclass(frozen=True, kw_only=True)
class Matched(FedAvg):
    """FedAvg whose server first permutes the hidden units of all clients into one order.

    A weight of the new model is the weighted mean over the clients that use both of its units. The
    papers take the posterior mean, which shrinks weights towards 0; once this hardly matters, but
    in every round it would act as weight decay.

    In the papers, clients have models of their own: each starts from its own random initialization,
    so their units have no common order, and the server matches what they have learned. Clients do
    this in the first `own_rounds` updates of a mode; a client that is selected again in that time
    continues to train its own model, which is part of its client state. The papers' one-shot
    setting is one long round in which all clients participate. After `own_rounds`, clients start
    from the matched model of the previous round: their units already have its order, and matching
    only lets layers grow.

    Layers keep the width of the model, so that shapes never change. All weights of an unused unit
    are 0. Such a unit outputs 0 and has gradient 0 (`bind` checks this for the model), so local
    training does not change it.

    Args:
        start: fraction of each layer's units that are used at first; the rest lets the layer grow,
            at most to the width of the model. With 1, units are matched one to one.
        sigma, sigma0, gamma: see `matching.assignment.Prior`; the larger gamma and the smaller
            sigma, the sooner a layer grows.
        sweeps: how often each client is matched again to all others.
        own_rounds: number of a mode's updates for which clients train models of their own. With 0,
            clients always start from the server's model; with start = 1 as well, matching is the
            same as averaging.
    """

    gathers = True
    structure: ClassVar[Structure | None] = None  # of the model that it is bound to
    # Mean and half width of the model's initial weights, [P] each; see `init_distribution`.
    initial: ClassVar[tuple[Tensor, Tensor] | None] = None

    start: float = 1.0
    sigma: float = 1.0
    sigma0: float = 3.0  # a variance of about 10, as in the authors' experiments
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

    def bind(self, context: ServerContext) -> Self:
        name = algorithms.name_of(type(self)) or type(self).__name__
        bound = copy(self)
        structure = find_structure(context.model, context.examples, f"Algorithm '{name}'")
        object.__setattr__(bound, "structure", structure)
        object.__setattr__(bound, "initial", init_distribution(context))
        if self.start < 1:
            theta = bound.zero_unused_units(context.model.init_params(0, 1)[0])
            check_unused_units(context, theta, structure, name)
        return bound

    def init_mode(self, theta: Tensor) -> Tree:
        mode = {"theta": self.zero_unused_units(theta)}
        if self.own_rounds:
            mode[_ROUNDS_LEFT] = torch.full_like(theta[..., :1], self.own_rounds)
        return mode

    def broadcast(self, mode: Tree) -> Tree:
        return mode

    def init_client_state(self, theta: Tensor) -> Tree:
        if self.own_rounds < 2:  # no client continues to train its own model
            return {}
        return {"own": torch.zeros_like(theta), "has_own": torch.zeros_like(theta[..., :1])}

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start = self.starting_point(sent, memory, problem)
        theta = self.train(start, sent, problem)
        if memory:
            memory = {"own": theta, "has_own": torch.ones_like(theta[..., :1])}
        return {"theta": theta}, memory

    def train(self, start: Tensor, sent: Tree, problem: LocalProblem) -> Tensor:
        """The client's model after local training."""
        return problem.descend(start)

    def starting_point(self, sent: Tree, memory: Tree, problem: LocalProblem) -> Tensor:
        """The model that local training starts from: the client's own, or the server's."""
        theta = sent["theta"]
        if self.own_rounds == 0 or self.initial is None:
            return theta
        # Visits are trained in a batch and cannot branch: compute all candidates, then select.
        mean, half_width = self.initial
        own = self.zero_unused_units(mean + half_width * (2 * problem.uniform(theta) - 1))
        own = torch.where(memory["has_own"] > 0, memory["own"], own) if memory else own
        return torch.where(sent[_ROUNDS_LEFT] > 0, self.aligned(own, sent), theta)

    def aligned(self, own: Tensor, sent: Tree) -> Tensor:
        """A client's own model, with its units in the order of what the server sent.

        This returns it unchanged, which is right if the server does all the matching, as in PFNM.
        """
        return own

    def zero_unused_units(self, theta: Tensor) -> Tensor:
        """Networks [..., P] that use only the fraction `start` of each layer's units."""
        if self.structure is None or self.start == 1:
            return theta
        used = torch.zeros(self.structure.units, dtype=torch.bool, device=theta.device)
        for units in self.structure.layers:
            used[units.first : units.first + ceil(self.start * units.width)] = True
        return theta * self.structure.used_weights(used)

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        theta, members = uploads["theta"].clone(), cohort.members
        if members is None or self.structure is None:
            raise InputError(
                f"{type(self).__name__} needs each client's upload, and must be bound to a model."
            )
        # One mode at a time, because the Hungarian algorithm cannot be batched.
        for index in sorted(set(members.mode.tolist())):
            of_mode = members.mode == index
            theta[index] = self.merge(
                self.structure, members.uploads["theta"][of_mode], members.weight[of_mode]
            )
        updated = {**mode, "theta": theta}
        if _ROUNDS_LEFT in mode:
            updated[_ROUNDS_LEFT] = (mode[_ROUNDS_LEFT] - 1).clamp(min=0)
        return updated

    def merge(self, structure: Structure, theta: Tensor, weight: Tensor) -> Tensor:
        """The matched average [P] of the networks of J clients, [J, P]."""
        slot = torch.arange(structure.units, device=theta.device).repeat(len(theta), 1)
        used = structure.used_units(theta)
        prior = Prior(self.sigma, self.sigma0, self.gamma)
        for units in self.order(structure.layers):
            vectors = structure.reorder(theta, slot)[:, self.features(units, structure.layers)]
            matched = match_units(vectors, used[:, units.all], weight, prior, self.sweeps)
            slot[:, units.all] = units.first + matched.to(slot.device)
        theta = structure.reorder(theta, slot)
        used_weights = structure.used_weights(torch.zeros_like(used).scatter(1, slot, used))
        client_weight = used_weights * weight.unsqueeze(1).to(theta.dtype)
        total = client_weight.sum(0)
        # A weight that no client uses is 0 in all of them, and stays 0.
        return (theta * client_weight).sum(0) / torch.where(
            total > 0, total, torch.ones_like(total)
        )

    @abstractmethod
    def order(self, layers: Sequence[Units]) -> Sequence[Units]:
        """The layers in the order in which they are matched."""

    @abstractmethod
    def features(self, units: Units, layers: Sequence[Units]) -> Tensor:
        """Positions of the weights by which a layer's units are compared, [W, D]."""


def init_distribution(context: ServerContext) -> tuple[Tensor, Tensor]:
    """Mean and half width of a uniform distribution of the model's initial weights, [P] each.

    It has the mean and the variance of each parameter tensor, estimated from a few models. torch's
    layers are initialized uniformly, so for them this is the exact distribution, and a client can
    draw a model from it without building modules.
    """
    model = context.model
    means, half_widths = {}, {}
    samples, _ = model.init_params(0, _INIT_SAMPLES)
    for name, values in model.theta_layout.unflatten(samples).items():
        std, mean = torch.std_mean(values, correction=0)
        shape = values.shape[1:]
        means[name], half_widths[name] = mean.expand(shape), (3**0.5 * std).expand(shape)
    return model.theta_layout.flatten(means), model.theta_layout.flatten(half_widths)


def check_unused_units(
    context: ServerContext, theta: Tensor, structure: Structure, name: str
) -> None:
    """Raises unless the unused units of networks `theta` [1, P] have gradient 0."""
    x = context.examples.unsqueeze(0)
    buffers = context.model.init_params(0, 1)[1]
    gradient = context.gradient(lambda outputs, _: (outputs**2).mean(), theta, buffers, x, x)
    trained = structure.used_units(gradient) & ~structure.used_units(theta)
    for units in structure.layers:
        if bool(trained[:, units.all].any()):
            raise InputError(
                f"Algorithm '{name}' cannot let layer '{units.name}' grow: a unit whose weights "
                "are 0 does not output 0 there (a sigmoid outputs 1/2), so local training would "
                "change it. Use ReLU or tanh, or start = 1."
            )
