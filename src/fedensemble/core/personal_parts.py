"""Personal parts: parameters that each client keeps for itself, such as those of a head.

The other parameters, the body, travel and are averaged. An algorithm sees the body only, as vectors
[..., B], so that its messages, its client state and its server state have no trace of the personal
part. During local training, each gradient is one of the whole model: its entries of the body go to
the algorithm, and with its other entries the local optimizer takes a step of the personal part.
With local SGD, this trains body and personal part together (FedPer). With `alternate`, a visit
first trains the personal part for all its local steps, on a body that does not move, and then the
body for the same steps (FedRep). Running statistics can be personal, too (FedBN).

References: Arivazhagan et al., "Federated learning with personalization layers", 2019 (FedPer);
Collins et al., "Exploiting shared representations for personalized federated learning", ICML 2021
(FedRep); Li et al., "FedBN: federated learning on non-iid features via local batch normalization",
ICLR 2021.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import InputError, setting
from ..flat_params import Layout, Tree
from .algorithm import Algorithm, algorithms
from .optimizer import Optimizer
from .problem import LocalProblem, Steps
from .shared import Shared
from .traffic import bytes_down, bytes_up
from .types import Cohort

# Names in client state. No entry of an algorithm has them, because these are Python identifiers.
OWN, OWN_STATISTICS = "personal part", "personal statistics"


@dataclass(frozen=True, slots=True, eq=False)
class PersonalParts:
    """Which entries of a model's flat vectors are personal, and their initial values.

    The initial values are the same for all modes and clients. Server state has them, too, where a
    whole model is needed.

    Args:
        own, body: indices of the personal entries of the parameters, [H], and of the others, [B].
        order: place of each entry of a whole vector in a body and a personal part that follow
            each other, [P].
        own_statistics, body_statistics: indices of the personal entries of the running statistics,
            and of the others.
        initial, initial_statistics: of the personal entries, [H] and [R'].
        alternate: whether a visit trains the personal part first, and then the body.
    """

    own: Tensor
    body: Tensor
    order: Tensor
    own_statistics: Tensor
    body_statistics: Tensor
    initial: Tensor
    initial_statistics: Tensor
    alternate: bool = False

    @classmethod
    def of(
        cls,
        patterns: tuple[str, ...],
        parameters: Layout,
        buffers: Layout,
        initial: tuple[Tensor, Tensor],
        alternate: bool = False,
    ) -> PersonalParts:
        """The entries whose tensors match a pattern; raises unless some match and some do not.

        Args:
            initial: parameters [P] and running statistics [R] of the model at the start.
        """
        name = setting("ensemble.personal")
        found = Shared.of(patterns, parameters, buffers, name)
        if bool(found.parameters.all()):
            raise InputError(
                f"{name}: all parameters match {list(patterns)}, so that nothing would travel. "
                "Leave some to be trained together."
            )
        theta, statistics = initial
        device = theta.device
        own, body, own_statistics, body_statistics = (
            torch.nonzero(mask).flatten().to(device)
            for mask in (found.parameters, ~found.parameters, found.buffers, ~found.buffers)
        )
        return cls(
            own,
            body,
            torch.cat([body, own]).argsort(),
            own_statistics,
            body_statistics,
            theta[own].clone(),
            statistics[own_statistics].clone(),
            alternate,
        )

    def join(self, body: Tensor, own: Tensor) -> Tensor:
        """Whole vectors [..., P] from the body [..., B] and personal parts [..., H]."""
        own = own.expand(*body.shape[:-1], own.shape[-1])
        return torch.cat([body, own], -1).index_select(-1, self.order)

    def select_body(self, theta: Tensor) -> Tensor:
        """The body [..., B] of whole vectors [..., P]; a body is returned as it is."""
        return theta if theta.shape[-1] == len(self.body) else theta.index_select(-1, self.body)

    def with_statistics(self, buffers: Tensor, own: Tensor) -> Tensor:
        """Running statistics [..., R] with these personal entries."""
        # A probe of the algorithm, see `core/probe.py`, has no running statistics.
        if not len(self.own_statistics) or not buffers.shape[-1]:
            return buffers
        own = own.expand(*buffers.shape[:-1], own.shape[-1])
        return buffers.index_copy(-1, self.own_statistics, own)

    def select_statistics(self, buffers: Tensor, default: Tensor) -> Tensor:
        """The personal entries of running statistics [..., R]."""
        if not buffers.shape[-1]:
            return default
        return buffers.index_select(-1, self.own_statistics)


class WithPersonalParts(Algorithm):
    """An algorithm that trains the body of models whose other parameters are personal.

    Args:
        base: the algorithm, bound to its server.
        parts: which parameters are personal.
    """

    def __init__(self, base: Algorithm, parts: PersonalParts) -> None:
        # Not a dataclass: its fields are those of the algorithm that it wraps.
        for name in (field.name for field in fields(Algorithm)):
            object.__setattr__(self, name, getattr(base, name))
        for name in ("gathers", "couples", "quantised", "sends", "full_participation"):
            object.__setattr__(self, name, getattr(base, name))
        # The server tracks nothing of the personal part.
        private = base.private_state or not base.init_client_state(parts.initial[:1])
        object.__setattr__(self, "private_state", private)
        object.__setattr__(self, "personal", True)
        object.__setattr__(self, "wrapped", base)
        object.__setattr__(self, "parts", parts)

    wrapped: Algorithm
    parts: PersonalParts

    @property
    def base(self) -> Algorithm:
        """The algorithm without personal parts."""
        return self.wrapped

    def __repr__(self) -> str:
        """The algorithm, and how many parameters are personal."""
        return f"{self.base!r} with {len(self.parts.own)} personal parameters"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, WithPersonalParts)
            and self.base == other.base
            and self.parts is other.parts
        )

    def __hash__(self) -> int:
        return hash((type(self), self.base))

    def learning_rate(self, round: int) -> float:
        return self.base.learning_rate(round)

    @property
    def assumes_full_participation(self) -> bool:
        """That of the algorithm."""
        return self.base.assumes_full_participation

    @property
    def target_spread(self) -> float:
        """That of the algorithm."""
        return self.base.target_spread

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of the algorithm."""
        return self.base.notes

    def bind(self, context: Any) -> Self:
        return self

    def init_mode(self, theta: Tensor) -> Tree:
        return self._with_whole(self.base.init_mode(self.parts.select_body(theta)))

    def check_state(self, mode: Tree) -> None:
        self.base.check_state(self._with_body(mode))

    def init_client_state(self, theta: Tensor) -> Tree:
        body = self.parts.select_body(theta)
        state = self.base.init_client_state(body)
        shape = body.shape[:-1]
        state = {**state, OWN: self.parts.initial.expand(*shape, -1).to(theta.dtype)}
        if len(self.parts.own_statistics):
            state[OWN_STATISTICS] = self.parts.initial_statistics.expand(*shape, -1)
        return state

    def personal_model(self, mode: Tree, buffers: Tensor, memory: Tree) -> tuple[Tensor, Tensor]:
        whole = self.parts.join(self.parts.select_body(mode["theta"]), memory[OWN])
        if OWN_STATISTICS not in memory:
            return whole, buffers
        return whole, self.parts.with_statistics(buffers, memory[OWN_STATISTICS])

    def received_model(self, sent: Tree, memory: Tree, buffers: Tensor) -> tuple[Tensor, Tensor]:
        body, buffers = self.base.received_model(sent, _without_own(memory), buffers)
        statistics = memory.get(OWN_STATISTICS, self.parts.initial_statistics)
        whole = self.parts.join(body, memory[OWN])
        return whole, self.parts.with_statistics(buffers, statistics)

    def start_modes(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        theta, buffers = self.base.start_modes(theta, buffers)
        whole = self.parts.join(self.parts.select_body(theta), self.parts.initial)
        return whole, self.parts.with_statistics(buffers, self.parts.initial_statistics)

    def deployed_modes(self, modes: Tree, buffers: Tensor) -> tuple[Tree, Tensor]:
        deployed, buffers = self.base.deployed_modes(self._with_body(modes), buffers)
        return self._with_whole(deployed), buffers

    def predictors(self, mode: Tree) -> Tensor:
        return self.parts.join(self.base.predictors(self._with_body(mode)), self.parts.initial)

    def broadcast(self, mode: Tree) -> Tree:
        return self.base.broadcast(self._with_body(mode))

    def upload_bytes(
        self, uploads: Tree, shared_draw: Tensor, sent: Tree | None = None
    ) -> int | Tensor:
        return bytes_up(self.base, uploads, sent or {}, shared_draw)

    def download_bytes(
        self, sent: Tree, shared_draw: Tensor, memory: Tree | None = None
    ) -> int | Tensor:
        return bytes_down(self.base, sent, _without_own(memory or {}), shared_draw)

    def encode(self, uploads: Tree, shared_draw: Tensor) -> Tree:
        return self.base.encode(uploads, shared_draw)

    def decode(self, message: Tree, like: Tree, shared_draw: Tensor) -> Tree:
        return self.base.decode(message, like, shared_draw)

    def sent_buffers(self, buffers: Tensor) -> Tensor:
        return (
            buffers.index_select(-1, self.parts.body_statistics) if buffers.shape[-1] else buffers
        )

    def whole_buffers(self, sent: Tensor, *, change: bool = False) -> Tensor:
        parts = self.parts
        own = torch.zeros_like(parts.initial_statistics) if change else parts.initial_statistics
        size = len(parts.body_statistics) + len(parts.own_statistics)
        whole = sent.new_zeros(*sent.shape[:-1], size)
        whole = whole.index_copy(-1, parts.body_statistics, sent)
        return parts.with_statistics(whole, own.to(sent.dtype))

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        parts, received = self.parts, problem.buffers
        statistics = memory.get(OWN_STATISTICS, parts.initial_statistics)
        buffers = parts.with_statistics(received, statistics)
        steps = _WholeModels(problem.steps, parts, memory[OWN], problem.optimizer, problem.lr)
        if parts.alternate:
            buffers = steps.train_own(sent["theta"], buffers)
        inner = problem.with_steps(steps, buffers)
        uploads, state = self.base.local_training(sent, _without_own(memory), inner)
        problem.losses = inner.losses
        # Personal statistics stay here: to the server, they have not changed.
        problem.buffers = parts.with_statistics(
            inner.buffers, parts.select_statistics(received, statistics)
        )
        state = {**state, OWN: steps.own}
        if len(parts.own_statistics):
            state[OWN_STATISTICS] = parts.select_statistics(inner.buffers, statistics)
        return uploads, state

    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        return self._with_whole(self.base.server_update(self._with_body(mode), uploads, cohort))

    def couple(self, modes: Tree, buffers: Tensor, cohort: Cohort) -> tuple[Tree, Tensor]:
        coupled, buffers = self.base.couple(self._with_body(modes), buffers, cohort)
        return self._with_whole(coupled), buffers

    def _with_body(self, mode: Tree) -> Tree:
        return {**mode, "theta": self.parts.select_body(mode["theta"])}

    def _with_whole(self, mode: Tree) -> Tree:
        return {**mode, "theta": self.parts.join(mode["theta"], self.parts.initial)}


class _WholeModels:
    """Local steps of whole models, of which the algorithm sees the body.

    Args:
        steps: of whole models.
        parts: which parameters are personal.
        own: personal parts at the start, [..., H].
        optimizer, lr: the local optimizer.
    """

    def __init__(
        self,
        steps: Steps,
        parts: PersonalParts,
        own: Tensor,
        optimizer: Optimizer,
        lr: Tensor | float,
    ) -> None:
        self.count, self.active = steps.count, steps.active
        self.own = own
        self._steps, self._parts, self._optimizer, self._lr = steps, parts, optimizer, lr
        self._slots = optimizer.init_state(own)
        self._frozen = False

    def gradient(
        self, step: int, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The body's gradient; the personal part takes a step, unless it is trained already."""
        value, result = self._steps.gradient(step, self._parts.join(theta, self.own), buffers)
        if not self._frozen:
            self._step_own(step, value.index_select(-1, self._parts.own))
        return value.index_select(-1, self._parts.body), result

    def train_own(self, body: Tensor, buffers: Tensor) -> Tensor:
        """Trains the personal part alone for all local steps; returns the running statistics.

        Statistics of the body stay what they were, because the body does not move.
        """
        start = buffers
        for step in range(self.count):
            _, (_, new) = self.gradient(step, body, buffers)
            buffers = new if self.active is None else torch.where(self.active[step], new, buffers)
        self._frozen = True
        own = self._parts.select_statistics(buffers, self._parts.initial_statistics)
        return self._parts.with_statistics(start, own)

    def _step_own(self, step: int, gradient: Tensor) -> None:
        own, slots = self._optimizer.step(self.own, gradient, self._slots, self._lr)
        if self.active is not None:
            running = self.active[step]
            own = torch.where(running, own, self.own)
            slots = {n: torch.where(running, slot, self._slots[n]) for n, slot in slots.items()}
        self.own, self._slots = own, slots


def check_personal(algorithm: Algorithm) -> None:
    """Raises if the algorithm cannot train models with personal parts."""
    name = algorithms.name_of(type(algorithm)) or type(algorithm).__name__
    reason = ""
    if algorithm.personal:
        reason = "its clients have models of their own already"
    elif algorithm.joint:
        reason = "its clients receive all modes at once"
    elif algorithm.distils or type(algorithm).gathers:
        reason = "its server computes with whole models"
    if reason:
        raise InputError(
            f"Algorithm '{name}' cannot be used with {setting('ensemble.personal')}: {reason}. Use "
            "another one, such as fedavg, fedprox, scaffold or fedadam, or make nothing personal."
        )


def _without_own(memory: Tree) -> Tree:
    """Client state without the personal part: that of the algorithm."""
    return {name: value for name, value in memory.items() if name not in (OWN, OWN_STATISTICS)}
