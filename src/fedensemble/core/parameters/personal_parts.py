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

from ...errors import InputError, setting
from ...flat_params import Layout, Tree
from ..algorithm import Algorithm, algorithms
from ..problem import Adjust, Gradient, LocalProblem, Step
from ..types import Cohort
from ..visits.traffic import bytes_down, bytes_up
from .shared import Shared

# Names in client state. No entry of an algorithm has them, because these are Python identifiers.
OWN, OWN_STATISTICS = "personal part", "personal statistics"
_SLOT = "personal optimizer/"  # first part of the names of its optimizer's state


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
        problem.buffers = parts.with_statistics(received, statistics)
        inner = _BodyProblem(problem, parts, memory[OWN])
        if parts.alternate:
            inner.train_own(sent["theta"])
        uploads, state = self.base.local_training(sent, _without_own(memory), inner)
        # Personal statistics stay here: to the server, they have not changed.
        problem.buffers = parts.with_statistics(
            inner.buffers, parts.select_statistics(received, statistics)
        )
        state = {**state, OWN: inner.own}
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


class _BodyProblem(LocalProblem):
    """The local problem of whole models, of which the algorithm sees the body.

    The personal part and the state of its optimizer are part of the state of each local step. So
    the problem of whole models runs the steps, in a loop or as CUDA graphs, and stops those of
    visits that have finished.

    Args:
        whole: the problem of whole models.
        parts: which parameters are personal.
        own: personal parts at the start, [..., H].
    """

    def __init__(self, whole: LocalProblem, parts: PersonalParts, own: Tensor) -> None:
        self.__dict__.update(vars(whole))
        self.own = own
        self._whole, self._parts, self._frozen = whole, parts, False

    def descend(self, start: Tensor, adjust: Adjust | None = None) -> Tensor:
        return LocalProblem.descend(self, start, adjust)

    def iterate(self, state: Tree, step: Step) -> Tree:
        own = {} if self._frozen else self._own_state()

        def whole_step(both: Tree, gradient: Gradient) -> Tree:
            now = {name: both[name] for name in own}

            def body_gradient(theta: Tensor) -> Tensor:
                value = gradient(self._parts.join(theta, now.get(OWN, self.own)))
                if now:
                    now.update(self._step_own(now, value))
                return value.index_select(-1, self._parts.body)

            new = step({name: both[name] for name in state}, body_gradient)
            return {**new, **now}

        return self._run({**state, **own}, whole_step, own)

    def train_own(self, body: Tensor) -> None:
        """Trains the personal part alone for all local steps, and freezes it.

        Statistics of the body stay what they were, because the body does not move.
        """
        own, start = self._own_state(), self.buffers

        def step(now: Tree, gradient: Gradient) -> Tree:
            return self._step_own(now, gradient(self._parts.join(body, now[OWN])))

        self._run(own, step, own)
        statistics = self._parts.select_statistics(self.buffers, self._parts.initial_statistics)
        self.buffers = self._parts.with_statistics(start, statistics)
        self._frozen = True

    def _run(self, state: Tree, step: Step, own: Tree) -> Tree:
        """The state after all local steps, without that of the personal part."""
        self._whole.buffers = self.buffers
        state = self._whole.iterate(state, step)
        self.buffers = self._whole.buffers
        self.own = state.get(OWN, self.own)
        return {name: value for name, value in state.items() if name not in own}

    def _own_state(self) -> Tree:
        """The personal part and the fresh state of its optimizer."""
        slots = self.optimizer.init_state(self.own)
        return {OWN: self.own, **{_SLOT + name: value for name, value in slots.items()}}

    def _step_own(self, now: Tree, gradient: Tensor) -> Tree:
        """The state of the personal part after a step with a gradient of whole models."""
        slots = {name.removeprefix(_SLOT): slot for name, slot in now.items() if name != OWN}
        own = gradient.index_select(-1, self._parts.own)
        theta, slots = self.optimizer.step(now[OWN], own, slots, self.lr)
        return {OWN: theta, **{_SLOT + name: slot for name, slot in slots.items()}}


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
