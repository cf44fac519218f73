"""Distributes the visits of a round over the ranks of a job.

Each rank trains its own clients with a local engine. Client c always belongs to rank c mod R, so
client state never moves between ranks. The weighted sums of uploads are added up over the ranks,
and every rank computes the same server update from the same sums, so that the model itself is
never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.engine import Engine
from ...core.types import Cohort, GatheredUploads, Plan, RoundResult, VisitReports
from ...core.visits.visit_keys import shared_uniform
from ...core.visits.visit_reports import make_reports
from ...errors import InputError, RankError
from ...flat_params import Tree
from ..local.local_engine import LocalEngine
from .process_group import ProcessGroup, tensor_specs

# Buffers and weights are summed along with the uploads, under names that no upload can have: those
# of an algorithm are Python identifiers.
_BUFFERS, _WEIGHT = "running statistics", "weight of a visit"


class DistributedEngine(Engine):
    """Executes plans on all ranks of a job.

    All ranks must make the same calls: `run_visits`, `commit`, `broadcast_state`, `numerics`,
    `read_client_state`, `client_state_tensors` and `load_client_state` are collective.

    Args:
        inner: the engine that trains this rank's visits, of the same class on every rank.
        ranks: the job.
    """

    def __init__(self, inner: Engine, ranks: ProcessGroup) -> None:
        if not isinstance(inner, LocalEngine):
            raise InputError(
                f"Ranks train with engine 'vector' or 'loop'; got {type(inner).__name__}."
            )
        self.inner, self.ranks = inner, ranks
        # True during `run_visits` and `commit`, and after one of them has failed. Some ranks may
        # then have stored the client state of the round and others not, so nothing may be trained
        # or saved until a checkpoint is loaded.
        self._stale = False
        self.is_writer = ranks.rank == 0
        self.reports_visits = inner.reports_visits
        inner.load_client_state(self._select_rank(inner.client_state_tensors(), ranks.rank))

    @property
    def notes(self) -> Sequence[str]:  # type: ignore[override]
        """Notes of the inner engine and of the process group."""
        return [*self.inner.notes, *self.ranks.notes]

    @property
    def precision(self) -> str:  # type: ignore[override]
        """Precision of the inner engine."""
        return self.inner.precision

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:  # type: ignore[override]
        """Block sizes of this rank."""
        return self.inner.blocks

    def numerics(self) -> Tree:
        """On rank 0 the rows of all ranks, each with its rank in column 0; elsewhere nothing."""
        own = self.inner.numerics()
        return self.ranks.gather(
            {
                name: torch.cat([torch.full_like(rows[:, :1], self.ranks.rank), rows[:, 1:]], 1)
                for name, rows in own.items()
            }
        )

    def load_numerics(self, tensors: Tree) -> None:
        """Restores this rank's own rows, if the checkpoint is of the same number of ranks."""
        own: Tree = {}
        for name, rows in tensors.items():
            mine = rows[rows[:, 0] == self.ranks.rank]
            if int(rows[:, 0].max()) + 1 == self.ranks.size and len(mine):
                own[name] = torch.cat([torch.zeros_like(mine[:, :1]), mine[:, 1:]], 1)
        self.inner.load_numerics(own)

    def run_visits(
        self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> RoundResult:
        self._check_not_stale()
        if not len(plan.client):
            return self.inner.run_visits(algorithm, sent, buffers, plan, round)
        own, part = self._own_visits(plan)
        self._stale = True
        self.inner.pending_state = []  # also if this rank has no visits in this round
        result, messages = self.ranks.together(
            lambda: (
                self.inner.run_visits(algorithm, sent, buffers, part, round) if len(own) else None
            ),
            _describe_result,
        )
        # A rank without visits does not know which tensors the others sum up, since only
        # `local_training` tells. It takes names, dtypes and shapes from a rank that trained, and
        # adds zeros.
        specs = next(message["specs"] for message in messages if message["specs"])
        cohort, loss, counters = self._sum_statistics(result, own, plan, len(buffers), round)
        cohort = replace(cohort, round=round, lr=algorithm.learning_rate(round))
        # The mean over all ranks: each rank's mean times its weight, summed, over the total weight.
        total_weight = torch.where(cohort.weight > 0, cohort.weight, 1.0)
        means: Tree = {}
        for name, (dtype, shape) in specs["uploads"].items():
            weighted = torch.zeros(shape, dtype=getattr(torch, dtype), device=buffers.device)
            if result is not None:
                own_weight = result.cohort.weight.to(weighted.dtype)
                weighted = _uploads_with_buffers(result, buffers)[name] * own_weight
            means[name] = self.ranks.sum(weighted) / total_weight.to(weighted.dtype)
        change = means.pop(_BUFFERS)
        if algorithm.gathers_uploads(sent):
            cohort = replace(cohort, members=self._gather_members(result, specs["members"], plan))
        # If a visit has diverged, the server's step raises: the round has failed.
        self._stale = not bool(loss.isfinite().all())
        bad_step, bytes_up, bytes_down = counters
        return RoundResult(
            means,
            buffers + change,
            cohort,
            loss,
            bad_step.to(loss.device),
            bytes_up,
            bytes_down,
            reports=self._sum_reports(result, own, plan, round) if self.reports_visits else None,
        )

    def _sum_reports(
        self, result: RoundResult | None, own: Tensor, plan: Plan, round: int
    ) -> VisitReports:
        """The reports of all ranks' visits; each rank writes its own into zeros."""
        table = torch.zeros(3, len(plan.client), dtype=torch.float64)
        if result is not None and result.reports is not None:
            table[:, own] = torch.stack(result.reports[:3]).double().cpu()
        return make_reports(self.ranks.sum(table), round)

    def _sum_statistics(
        self, result: RoundResult | None, own: Tensor, plan: Plan, modes: int, round: int
    ) -> tuple[Cohort, Tensor, Tensor]:
        """The cohort of all ranks, losses [J], and bad steps, bytes up and bytes down [3, J].

        Each rank writes its values into tensors of zeros, of which there are only two, so that two
        sums are enough for everything.
        """
        model, visits = self.inner.model, len(plan.client)
        floats = torch.zeros(3 * modes + visits, dtype=torch.float64)
        integers = torch.zeros(3, visits, dtype=torch.int64)
        if result is not None:
            cohort = result.cohort
            floats[: 3 * modes] = (
                torch.cat([cohort.count, cohort.weight, cohort.share]).flatten().double().cpu()
            )
            floats[3 * modes + own] = result.loss.double().cpu()
            for row, value in enumerate(
                (result.first_bad_step, result.bytes_up, result.bytes_down)
            ):
                integers[row, own] = value.cpu()
        floats = self.ranks.sum(floats).to(model.device, model.dtype)
        integers = self.ranks.sum(integers)
        count, weight, share = floats[: 3 * modes].reshape(3, modes, 1)
        shared_draw = shared_uniform(self.inner.seed, round, torch.arange(modes)).to(
            model.device, model.dtype
        )
        cohort = Cohort(count, weight, share, len(self.inner.host_sizes), shared_draw)
        return cohort, floats[3 * modes :], integers

    def _gather_members(
        self, result: RoundResult | None, specs: dict[str, Any], plan: Plan
    ) -> GatheredUploads:
        """The uploads of all visits, in ascending order of (client, mode), on every rank.

        Each rank writes its rows into a table of zeros, and the tables are summed.
        """
        device = self.inner.model.device
        order = torch.argsort(plan.client * (int(plan.mode.max()) + 1) + plan.mode)
        client, mode = plan.client[order].to(device), plan.mode[order].to(device)
        own = torch.nonzero(client % self.ranks.size == self.ranks.rank).flatten()
        members = None if result is None else result.cohort.members
        tables: Tree = {}
        for name, (dtype, shape) in specs.items():
            table = torch.zeros(len(client), *shape[1:], dtype=getattr(torch, dtype), device=device)
            if members is not None:
                table[own] = _member_tensors(members)[name]
            tables[name] = self.ranks.sum(table)
        weight, buffers = tables.pop(_WEIGHT), tables.pop(_BUFFERS)
        return GatheredUploads(client, mode, weight, buffers=buffers, uploads=tables)

    def broadcast_state(self, modes: Tree) -> Tree:
        """Broadcasts the modes of rank 0.

        Ranks compute the same server update from the same sums, but some algorithms do more on the
        server, such as distillation, in chunks that depend on the free memory of the device. Small
        differences would otherwise grow from round to round.
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

    def prefetch(self, plan: Plan, round: int) -> None:
        _, part = self._own_visits(plan)
        if len(part.client):
            self.inner.prefetch(part, round)

    def _own_visits(self, plan: Plan) -> tuple[Tensor, Plan]:
        """Positions of this rank's visits in the plan, and the plan of these visits alone."""
        own = torch.nonzero(plan.client % self.ranks.size == self.ranks.rank).flatten()
        return own, plan.select(own)

    def read_client_state(self, plan: Plan, fresh: Tree) -> Tree:
        """Client state of the plan's visits; each rank looks up the rows of its own clients."""
        own, part = self._own_visits(plan)
        state: Tree = {}
        mine = self.inner.read_client_state(
            part, {name: value[own.to(value.device)] for name, value in fresh.items()}
        )
        for name, value in fresh.items():
            table = torch.zeros_like(value)
            table[own.to(value.device)] = mine[name]
            state[name] = self.ranks.sum(table)
        return state

    def client_state_tensors(self) -> Tree:
        """All clients' state on rank 0, nothing on the others."""
        self._check_not_stale()
        return self.ranks.gather(self.inner.client_state_tensors())

    def load_client_state(self, tensors: Tree) -> None:
        """Gives each rank the state of its clients, from the tensors on rank 0."""
        lead = self.ranks.rank == 0
        parts = (
            [self._select_rank(tensors, rank) for rank in range(self.ranks.size)] if lead else []
        )
        self.inner.load_client_state(self.ranks.scatter(parts))
        self._stale = False

    def _select_rank(self, tensors: Tree, rank: int) -> Tree:
        """The rows of client state that belong to the clients of a rank."""
        if "visits" not in tensors:
            return {}
        own = torch.nonzero(tensors["visits"][:, 0] % self.ranks.size == rank).flatten()
        if not len(own):
            return {}
        return {name: value[own.to(value.device)] for name, value in tensors.items()}

    def _check_not_stale(self) -> None:
        if self._stale:
            raise RankError(
                "The last round failed, and clients may have kept parts of it: "
                "load a checkpoint first."
            )


def _describe_result(result: RoundResult | None) -> dict[str, Any]:
    """Dtypes and shapes of the tensors that this rank sums up, for ranks without visits."""
    if result is None:
        return {"specs": None}
    members = result.cohort.members
    return {
        "specs": {
            "uploads": tensor_specs(_uploads_with_buffers(result, result.buffers)),
            "members": tensor_specs(_member_tensors(members)) if members is not None else {},
        }
    }


def _uploads_with_buffers(result: RoundResult, buffers: Tensor) -> Tree:
    """Mean uploads of each mode, and the change of the buffers.

    The change, so that buffers which never change stay exactly the same: the mean of equal values
    can differ from them in the last bit, that of zeros cannot.
    """
    return {**result.uploads, _BUFFERS: result.buffers - buffers}


def _member_tensors(members: GatheredUploads) -> Tree:
    """Uploads, buffers and weight of each visit, [J, ...]."""
    return {**members.uploads, _BUFFERS: members.buffers, _WEIGHT: members.weight}
