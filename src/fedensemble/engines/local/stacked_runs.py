"""Trains the visits of several runs as those of one wide run with R * K modes.

`run_visits.py` accumulates the results of each run by itself, a few dozen operations per run and
round. For small models these take longer than the training. Here the modes of all runs are the rows
of one matrix, and each of the operations is done once for all runs. That needs runs of the same
shape, whose visits fit into one block; `experiment/studies/run_stack.py` finds them.

Symbols: R runs with K modes each, J visits per run; visit j of run r is row r * J + j.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.types import Cohort, Plan
from ...flat_params import Tree, select_rows
from .batch_plans import make_batch_plans
from .block import BatchPlan, BlockInputs, BlockResult, summarize_losses
from .device_cache import to_device_async

if TYPE_CHECKING:
    from .local_engine import LocalEngine


class StackedPlan(NamedTuple):
    """The visits of a round, which depend on no result of an earlier round."""

    round: int  # counted from 0
    plans: list[Plan]  # of each run
    mode: Tensor  # [R * J] row of each visit's mode in the matrix of all modes, on the device
    batches: BatchPlan


class StackedResult(NamedTuple):
    """The results of the visits of all runs."""

    uploads: Tree  # [R * K, P] weighted mean of each mode's uploads; zero without clients
    buffers: Tensor  # [R * K, R'] the same mean of running statistics
    clients: Tensor  # [R * K, 1] number of clients of each mode
    weight: Tensor  # [R * K, 1] sum of their aggregation weights
    loss: Tensor  # [R * J]
    first_bad_step: Tensor  # [R * J]
    memory: Tree  # [R * J, ...] new client state

    def cohort(self, total: Tensor, population: int, shared_draw: Tensor) -> Cohort:
        """The clients behind each mode's update, without round and learning rate.

        Args:
            total: sum of the weights of all N clients of a mode's run, [R * K, 1].
            population: N.
            shared_draw: the round's shared random draw per mode, [R * K, 1].
        """
        share = self.weight / total
        return Cohort(self.clients, self.weight, share, population, shared_draw)


def make_stacked_plan(
    engines: Sequence[LocalEngine],
    plans: Sequence[Plan],
    runs: Sequence[int],
    modes: int,
    round: int,
) -> StackedPlan:
    """Prepares the visits of a round.

    Args:
        engines: those that draw different batches; runs with equal seeds and data share one.
        plans: of these engines, with equal numbers of visits.
        runs: index of the engine of each run.
        modes: K.
        round: counted from 0.
    """
    made = make_batch_plans(engines, plans, [round] * len(plans))
    steps = max(len(each.batch_index) for each in made)
    parts = [_pad(each, steps) for each in made]
    batches = parts[0]
    if len(runs) > 1:
        batches = BatchPlan(
            *(
                torch.cat([getattr(parts[run], name) for run in runs], 1 if name in _BY_STEP else 0)
                for name in BatchPlan._fields
            )
        )
    plan_of_run = [plans[run] for run in runs]
    first = torch.arange(len(runs)).unsqueeze(1) * modes
    mode = (torch.stack([plan.mode for plan in plan_of_run]) + first).flatten()
    return StackedPlan(round, plan_of_run, to_device_async(mode, engines[0].model.device), batches)


_BY_STEP = ("batch_index", "weight")  # the tensors of a batch plan whose visits are in dimension 1


def _pad(plan: BatchPlan, steps: int) -> BatchPlan:
    """Appends local steps of weight 0, up to those of the longest visit."""
    missing = steps - len(plan.batch_index)
    if not missing:
        return plan
    longer = {
        name: torch.cat([table, table.new_zeros(missing, *table.shape[1:])])
        for name in _BY_STEP
        for table in [getattr(plan, name)]
    }
    return plan._replace(**longer)


def train_stacked(
    engines: Sequence[LocalEngine],
    algorithm: Algorithm,
    sent: Tree,
    buffers: Tensor,
    stacked: StackedPlan,
    lr: Tensor,
    hyperparameters: Mapping[str, Tensor],
    ragged: bool,
) -> StackedResult:
    """Trains the visits of all runs in one block. Client state does not change.

    Args:
        engines: of each run; the first trains the block.
        algorithm: of the first run.
        sent, buffers: what the modes of all runs send, [R * K, P] and [R * K, R'].
        stacked: the visits.
        lr: learning rate of each run, [R, 1].
        hyperparameters: those whose values differ, of each run, [R, 1].
        ragged: whether visits have different numbers of local steps.
    """
    runs, mode = len(engines), stacked.mode
    visits = len(mode) // runs

    def of_visits(values: Tensor) -> Tensor:
        return values.expand(runs, visits).reshape(-1, 1)

    inputs = BlockInputs(
        sent=sent,
        mode=mode,
        memory=_read_memory(engines, algorithm, sent, stacked),
        buffers=buffers[mode],
        lr=of_visits(lr),
        hyperparameters={name: of_visits(value) for name, value in hyperparameters.items()},
        rows={},
        target_noise={},
        **stacked.batches._asdict(),
    )
    result = engines[0].train(algorithm, inputs, ragged)
    return _average(result, inputs, runs, buffers, algorithm.weighting == "uniform")


def _average(
    result: BlockResult, inputs: BlockInputs, runs: int, buffers: Tensor, uniform: bool
) -> StackedResult:
    """Averages the uploads of each mode: one matmul [K, J] x [J, P] per run, batched over runs."""
    loss, bad_step = summarize_losses(result, inputs)
    modes, visits = len(buffers) // runs, len(loss) // runs
    rows = torch.arange(runs * modes, device=loss.device).reshape(runs, modes, 1)
    weight = torch.ones_like(inputs.sizes) if uniform else inputs.sizes
    one_hot = (inputs.mode.reshape(runs, 1, visits) == rows).to(weight.dtype)  # [R, K, J]
    weighted = one_hot * weight.reshape(runs, 1, visits)
    total = weighted.sum(2).reshape(-1, 1)
    scale = torch.where(total > 0, total, torch.ones_like(total))

    def mean(values: Tensor) -> Tensor:
        sums = torch.bmm(weighted.to(values.dtype), values.reshape(runs, visits, -1))
        return sums.reshape(runs * modes, -1) / scale.to(values.dtype)

    # The change of the buffers is averaged, see `_BUFFERS` in `run_accumulator.py`.
    change = mean(result.buffers - inputs.buffers) if buffers.shape[1] else 0
    return StackedResult(
        {name: mean(value) for name, value in result.uploads.items()},
        buffers + change,
        one_hot.sum(2).reshape(-1, 1),
        total,
        loss,
        bad_step,
        result.memory,
    )


def _read_memory(
    engines: Sequence[LocalEngine], algorithm: Algorithm, sent: Tree, stacked: StackedPlan
) -> Tree:
    """The client state of all visits, [R * J, ...]; empty for most algorithms."""
    fresh = select_rows(algorithm.init_client_state(sent["theta"]), stacked.mode)
    if not fresh:
        return {}
    visits = len(stacked.mode) // len(engines)
    parts = [
        engine.memory.read(plan, select_rows(fresh, slice(run * visits, (run + 1) * visits)))
        for run, (engine, plan) in enumerate(zip(engines, stacked.plans, strict=True))
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in fresh}


def write_memory(engine: LocalEngine, plan: Plan, memory: Tree, run: int) -> None:
    """Stores the new client state of one run's visits.

    Args:
        engine: of the run.
        plan: its visits.
        memory: client state of all runs' visits, [R * J, ...].
        run: index of the run.
    """
    visits = len(plan.client)
    own = select_rows(memory, slice(run * visits, (run + 1) * visits))
    engine.pending_state = [(plan, engine.memory.stage(own))]
    engine.commit()
