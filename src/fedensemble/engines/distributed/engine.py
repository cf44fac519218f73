"""Visits shared among the processes of a job: each rank trains its own clients with the engine of
one machine.

Client c belongs to rank c mod R, always, so what it remembers never moves. Sums of weights times
uploads are added up over ranks, and every rank does the same server step with the same numbers: the
model itself is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.engine import Engine
from ...core.keys import shared_uniform
from ...core.types import Cohort, Members, Plan, RoundResult
from ...errors import InputError, RankError
from ...flat_params import Tree
from ..local.local_engine import LocalEngine
from .process_group import ProcessGroup, forms_of

# Names that no upload has: a method's own are Python names.
_BUFFERS, _WEIGHT = "running statistics", "weight of a visit"


class DistributedEngine(Engine):
    """Carries out plans on all ranks of a job.

    Args:
        inner: what trains this rank's visits, the same kind on every rank.
        ranks: the job.
    """

    def __init__(self, inner: Engine, ranks: ProcessGroup) -> None:
        if not isinstance(inner, LocalEngine):
            raise InputError(
                f"Ranks train with engine 'vector' or 'loop'; got {type(inner).__name__}."
            )
        self.inner, self.ranks = inner, ranks
        self._stale = False  # a round failed: some ranks' memory may be a round ahead
        self.writes = ranks.rank == 0
        inner.load_memory(self._owned(inner.memory_tensors(), ranks.rank))

    @property
    def notes(self) -> Sequence[str]:  # type: ignore[override]
        """The inner engine's, and how ranks share their machine."""
        return [*self.inner.notes, *self.ranks.notes]

    @property
    def precision(self) -> str:  # type: ignore[override]
        """That of the engine on each rank."""
        return self.inner.precision

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:  # type: ignore[override]
        """Those of this rank."""
        return self.inner.blocks

    def numerics(self) -> Tree:
        """Every rank's choices on rank 0, nothing on the others; every rank must ask."""
        own = self.inner.numerics()
        return self.ranks.gather(
            {
                name: torch.cat([torch.full_like(rows[:, :1], self.ranks.rank), rows[:, 1:]], 1)
                for name, rows in own.items()
            }
        )

    def keep_numerics(self, tensors: Tree) -> None:
        """Each rank takes its own rows, if there were as many ranks."""
        own: Tree = {}
        for name, rows in tensors.items():
            mine = rows[rows[:, 0] == self.ranks.rank]
            if int(rows[:, 0].max()) + 1 == self.ranks.size and len(mine):
                own[name] = torch.cat([torch.zeros_like(mine[:, :1]), mine[:, 1:]], 1)
        self.inner.keep_numerics(own)

    def visit(
        self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> RoundResult:
        self._check()
        if not len(plan.client):
            return self.inner.visit(algorithm, sent, buffers, plan, round)
        own, part = self._part(plan)
        self._stale = True
        self.inner.waiting = []  # also where this rank has nothing to do
        returned, said = self.ranks.together(
            lambda: self.inner.visit(algorithm, sent, buffers, part, round) if len(own) else None,
            _forms,
        )
        forms = next(each["forms"] for each in said if each["forms"])
        own_weight = (
            torch.zeros(len(buffers), 1, device=buffers.device)
            if returned is None
            else returned.cohort.weight
        )
        cohort, loss, whole = self._facts(returned, own, plan, len(buffers), round)
        cohort = replace(cohort, round=round, lr=algorithm.rate(round))
        scale = torch.where(cohort.weight > 0, cohort.weight, 1.0)
        means: Tree = {}
        for name, (kind, shape) in forms["uploads"].items():
            total = torch.zeros(shape, dtype=getattr(torch, kind), device=buffers.device)
            if returned is not None:
                total = _uploads(returned, buffers)[name] * own_weight.to(total.dtype)
            means[name] = self.ranks.sum(total) / scale.to(total.dtype)
        moved = means.pop(_BUFFERS)
        if algorithm.gathers:
            cohort = replace(cohort, members=self._members(returned, forms["members"], plan))
        self._stale = not bool(loss.isfinite().all())
        bad_step, bytes_up, bytes_down = whole
        return RoundResult(
            means, buffers + moved, cohort, loss, bad_step.to(loss.device), bytes_up, bytes_down
        )

    def _facts(
        self, returned: RoundResult | None, own: Tensor, plan: Plan, modes: int, round: int
    ) -> tuple[Cohort, Tensor, Tensor]:
        """The whole cohort, the losses [J], and first bad steps and bytes up and down [3, J]: small
        numbers at once.
        """
        learner, visits = self.inner.learner, len(plan.client)
        real = torch.zeros(3 * modes + visits, dtype=torch.float64)
        whole = torch.zeros(3, visits, dtype=torch.int64)
        if returned is not None:
            cohort = returned.cohort
            real[: 3 * modes] = (
                torch.cat([cohort.count, cohort.weight, cohort.share]).flatten().double().cpu()
            )
            real[3 * modes + own] = returned.loss.double().cpu()
            for row, value in enumerate(
                (returned.first_bad_step, returned.bytes_up, returned.bytes_down)
            ):
                whole[row, own] = value.cpu()
        real, whole = self.ranks.sum(real).to(learner.device, learner.dtype), self.ranks.sum(whole)
        count, weight, share = real[: 3 * modes].reshape(3, modes, 1)
        coin = shared_uniform(self.inner.seed, round, torch.arange(modes)).to(
            learner.device, learner.dtype
        )
        return (
            Cohort(count, weight, share, len(self.inner.host_sizes), coin),
            real[3 * modes :],
            whole,
        )

    def _members(self, returned: RoundResult | None, forms: dict[str, Any], plan: Plan) -> Members:
        """What every visit sent: each rank puts its rows where they belong among zeros, and these
        are added up.
        """
        device = self.inner.learner.device
        order = torch.argsort(plan.client * (int(plan.mode.max()) + 1) + plan.mode)
        client, mode = plan.client[order].to(device), plan.mode[order].to(device)
        place = torch.nonzero(client % self.ranks.size == self.ranks.rank).flatten()
        mine = None if returned is None else returned.cohort.members
        found: Tree = {}
        for name, (kind, shape) in forms.items():
            table = torch.zeros(len(client), *shape[1:], dtype=getattr(torch, kind), device=device)
            if mine is not None:
                table[place] = _sent(mine)[name]
            found[name] = self.ranks.sum(table)
        return Members(client, mode, found.pop(_WEIGHT), buffers=found.pop(_BUFFERS), uploads=found)

    def agree(self, modes: Tree) -> Tree:
        """Those of rank 0: what a server does beyond sums may depend on the memory that its device
        has left.
        """
        lead = self.ranks.rank == 0
        return {
            name: self.ranks.sum(mode if lead else torch.zeros_like(mode))
            for name, mode in modes.items()
        }

    def commit(self) -> None:
        self._stale = True
        self.ranks.together(self.inner.commit)
        self._stale = False

    def foresee(self, plan: Plan, round: int) -> None:
        _, part = self._part(plan)
        if len(part.client):
            self.inner.foresee(part, round)

    def _part(self, plan: Plan) -> tuple[Tensor, Plan]:
        """Where this rank's visits are in the plan, and they alone."""
        own = torch.nonzero(plan.client % self.ranks.size == self.ranks.rank).flatten()
        return own, Plan(plan.client[own], plan.mode[own])

    def read_memory(self, plan: Plan, fresh: Tree) -> Tree:
        """Each rank looks up its own clients' rows, and these are added up; every rank must ask."""
        own, part = self._part(plan)
        found: Tree = {}
        mine = self.inner.read_memory(
            part, {name: value[own.to(value.device)] for name, value in fresh.items()}
        )
        for name, value in fresh.items():
            table = torch.zeros_like(value)
            table[own.to(value.device)] = mine[name]
            found[name] = self.ranks.sum(table)
        return found

    def memory_tensors(self) -> Tree:
        """All clients' memory on rank 0, nothing on the others; every rank must ask."""
        self._check()
        return self.ranks.gather(self.inner.memory_tensors())

    def load_memory(self, tensors: Tree) -> None:
        """Gives each rank its clients' part of what rank 0 holds; every rank must call."""
        lead = self.ranks.rank == 0
        parts = [self._owned(tensors, rank) for rank in range(self.ranks.size)] if lead else []
        self.inner.load_memory(self.ranks.scatter(parts))
        self._stale = False

    def _owned(self, tensors: Tree, rank: int) -> Tree:
        """A rank's clients' rows of all memory."""
        if "visits" not in tensors:
            return {}
        mine = torch.nonzero(tensors["visits"][:, 0] % self.ranks.size == rank).flatten()
        return (
            {name: value[mine.to(value.device)] for name, value in tensors.items()}
            if len(mine)
            else {}
        )

    def _check(self) -> None:
        if self._stale:
            raise RankError(
                "The last round failed, and clients may remember parts of it: load a checkpoint first."
            )


def _forms(returned: RoundResult | None) -> dict[str, Any]:
    """Types and shapes of what this rank adds up, for ranks that had nothing to do."""
    if returned is None:
        return {"forms": None}
    members = returned.cohort.members
    uploads = forms_of(_uploads(returned, returned.buffers))
    return {
        "forms": {
            "uploads": uploads,
            "members": forms_of(_sent(members)) if members is not None else {},
        }
    }


def _uploads(returned: RoundResult, buffers: Tensor) -> Tree:
    """Means by mode, running statistics as changes: frozen parameters, which travel with them, stay
    as they are.
    """
    return {**returned.uploads, _BUFFERS: returned.buffers - buffers}


def _sent(members: Members) -> Tree:
    """What each visit sent, [J, ...]."""
    return {**members.uploads, _BUFFERS: members.buffers, _WEIGHT: members.weight}
