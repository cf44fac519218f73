"""Trains the visits of a round block by block, for one run or for several runs together.

Small models do not fill a GPU. Runs that differ only in seed, data or some hyperparameters, such as
the columns of a table, are therefore trained together: a block may contain visits of any of them,
and the results of each visit go to the accumulator of its run. Each run keeps its own seed, data,
client state and hyperparameters, so its results are the same as those of running it separately, up
to the rounding of sums.

A block that runs out of memory is trained again as two blocks of half the size (`oom_retry.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.round import Request
from ...core.types import RoundResult
from ...flat_params import select_rows
from ...runtime.oom import raise_on_oom
from .batch_plans import make_batch_plans
from .block import BlockInputs, BlockResult
from .oom_retry import fits_in_memory
from .run_accumulator import RunAccumulator

if TYPE_CHECKING:
    from .local_engine import LocalEngine

# Hyperparameters that may differ between runs trained together without being passed per visit: the
# learning rate of each visit is an input of the block already, and the others are used on the
# server only.
NOT_PASSED_PER_VISIT = (
    "lr",
    "lr_decay",
    "lr_decay_every",
    "lr_cycle",
    "lr_cycle_end",
    "weighting",
    "stragglers",
    "server_lr_decay",
    "server_lr_decay_every",
)


def run_visits(engines: Sequence[LocalEngine], requests: Sequence[Request]) -> list[RoundResult]:
    """Trains all visits of all runs' plans; returns one result per run.

    The engine of the first run trains the blocks. The others supply data, keys and client state of
    their runs.
    """
    with engines[0].round_threads(sum(len(request.plan.client) for request in requests)):
        return _run_visits(engines, requests)


def _run_visits(engines: Sequence[LocalEngine], requests: Sequence[Request]) -> list[RoundResult]:
    engine = engines[0]
    runs = [
        RunAccumulator(run_engine, request)
        for run_engine, request in zip(engines, requests, strict=True)
    ]
    for name in differing_hyperparameters([request.algorithm for request in requests]):
        for run in runs:
            run.hyperparameters[name] = getattr(run.request.algorithm, name)
    # All visits of all runs in one list: number of local steps, run, and position in its plan.
    counts = torch.cat([run.counts for run in runs])
    run_of_visit = torch.repeat_interleave(torch.tensor([len(run.counts) for run in runs]))
    index = torch.cat([torch.arange(len(run.counts)) for run in runs])
    queue = engine.order(counts)
    # A joint visit takes the memory of as many visits as there are modes.
    request, width = requests[0], engine.model.theta_layout.total
    modes = request.sent["theta"].shape[-1] // width if request.algorithm.joint else 1
    sizes = iter(engine.block_sizes(counts[queue], modes))
    while len(queue):
        size = next(sizes)
        block, queue = queue[:size], queue[size:]
        ragged = bool(counts[block].min() < counts[block].max())
        owner = run_of_visit[block]
        remaining = {run: index[block[owner == run]] for run in sorted(set(owner.tolist()))}
        train_block = partial(_train_block, engine, runs, remaining, ragged)
        # In the unit of the block size, so that half of it is half of these visits.
        tried = len(block) * modes if len(block) > 1 else 1
        if not fits_in_memory(engine, train_block, tried, requests[0].round):
            # Visits of runs that were added already have left `remaining`: they are not repeated.
            queue = torch.cat([block[torch.isin(owner, torch.tensor([*remaining]))], queue])
            sizes = iter(engine.block_sizes(counts[queue], modes))  # the limit is lower now
    for run in runs:
        run.engine.pending_state = run.new_state
    return [run.result() for run in runs]


def _train_block(
    engine: LocalEngine, runs: Sequence[RunAccumulator], remaining: dict[int, Tensor], ragged: bool
) -> None:
    """Trains a block and adds its results to the accumulators of the runs.

    Args:
        remaining: positions of the block's visits in the plan of each run, by run. A run is removed
            from it once its results are added, so that after an error it holds the visits that must
            be trained again.
    """
    if len(remaining) > 1:
        _prefetch_batch_plans(runs, remaining)
    blocks = {run: runs[run].prepare_block(index) for run, index in remaining.items()}
    visits = sum(len(index) for index in remaining.values())
    inputs = concatenate_inputs([block.inputs for block in blocks.values()])
    result = engine.train(runs[0].request.algorithm, inputs, ragged)
    first = 0
    for run, block in blocks.items():
        steps = len(block.inputs.batch_index)
        runs[run].add(block, _select_visits(result, first, len(block.modes), steps, visits))
        first += len(block.modes)
        del remaining[run]


def _prefetch_batch_plans(runs: Sequence[RunAccumulator], remaining: dict[int, Tensor]) -> None:
    """Makes the batch plans of a block's visits for all runs at once, unless a run has its own."""
    missing = []
    for run, index in remaining.items():
        engine, request = runs[run].engine, runs[run].request
        part = request.plan.select(index)
        if not engine.has_prefetched(part, request.round):
            missing.append((engine, part, request.round))
    if missing:
        engines, plans, rounds = zip(*missing, strict=True)
        for engine, part, round, made in zip(
            engines, plans, rounds, make_batch_plans(engines, plans, rounds), strict=True
        ):
            engine.keep_batch_plan(part, round, made)


def concatenate_data(engines: Sequence[LocalEngine]) -> None:
    """Moves the data of all engines into one array, so that one block can index all of them."""
    # Datasets are compared by the identity of their arrays. Engines whose data were concatenated
    # before, perhaps with those of runs that have ended since, share both arrays. Targets are
    # compared as well as inputs: runs with label-flipping attackers have the same inputs and
    # different targets.
    datasets = list(
        {(id(engine.data.x), id(engine.data.y)): engine.data for engine in engines}.values()
    )
    if len(datasets) == 1:
        return
    starts = [0]
    for data in datasets:
        starts.append(starts[-1] + len(data.x))
    with raise_on_oom(
        "The data of runs that train together do",
        datasets[0].x.device,
        "train fewer of them at once",
    ):
        x, y = torch.cat([data.x for data in datasets]), torch.cat([data.y for data in datasets])
    offset = {
        (id(data.x), id(data.y)): start for data, start in zip(datasets, starts, strict=False)
    }
    for engine in engines:
        first = offset[id(engine.data.x), id(engine.data.y)]
        engine.use(replace(engine.data, x=x, y=y, start=engine.data.start + first))


def differing_hyperparameters(algorithms: Sequence[Algorithm]) -> list[str]:
    """Names of the float hyperparameters that differ between algorithms of the same class.

    Raises:
        ValueError: if another field differs, except for those in `NOT_PASSED_PER_VISIT`.
    """
    first, names = algorithms[0], []
    if len({algorithm.target_spread > 0 for algorithm in algorithms}) > 1:
        raise ValueError("runs with and without noise of the targets cannot be trained together")
    for field in fields(first):
        values = [getattr(algorithm, field.name) for algorithm in algorithms]
        if field.name in NOT_PASSED_PER_VISIT or all(value == values[0] for value in values):
            continue
        if not all(isinstance(value, float) for value in values):
            raise ValueError(f"runs with different {field.name} cannot be trained together")
        names.append(field.name)
    return names


def concatenate_inputs(parts: Sequence[BlockInputs]) -> BlockInputs:
    """The inputs of several runs' visits as those of one block."""
    if len(parts) == 1:
        return parts[0]
    steps = max(len(part.batch_index) for part in parts)
    # The modes of all runs are rows of one matrix, so each run's row numbers are shifted.
    starts = accumulate([len(part.sent["theta"]) for part in parts[:-1]], initial=0)

    def pad(table: Tensor) -> Tensor:
        """Appends steps of weight 0 (padding) up to the longest part."""
        if len(table) == steps:
            return table
        return torch.cat([table, table.new_zeros(steps - len(table), *table.shape[1:])])

    def concatenate(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if name == "mode":
            values = [value + start for value, start in zip(values, starts, strict=True)]
        if isinstance(values[0], dict):
            return {key: torch.cat([value[key] for value in values]) for key in values[0]}
        if name in ("batch_index", "weight"):
            return torch.cat([pad(value) for value in values], 1)
        return torch.cat(values)

    return BlockInputs(**{name: concatenate(name) for name in BlockInputs._fields})


def _select_visits(
    result: BlockResult, first: int, count: int, steps: int, visits: int
) -> BlockResult:
    """The results of `count` of a block's visits, from `first` on, which had `steps` steps."""
    if count == visits:
        return result
    index = slice(first, first + count)
    return BlockResult(
        select_rows(result.uploads, index),
        select_rows(result.memory, index),
        result.buffers[index],
        result.losses[:steps, index],
    )
