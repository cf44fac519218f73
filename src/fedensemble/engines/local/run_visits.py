"""A round's visits, of one run or of several side by side: blocks of them are trained, sums go to
their own run.

Runs that advance together only share the program. Each keeps its own seed, data, memory and
numbers, so that its results are those of running it apart, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.round import Request
from ...core.types import RoundResult
from ...flat_params import rows
from ...runtime.oom import OOM_ERRORS, lack, out_of_memory, raise_on_oom
from .block import BlockResult, Inputs
from .run_accumulator import Share

if TYPE_CHECKING:
    from .local_engine import LocalEngine

# Settings that are given to each visit, or used on the server only: runs that differ in them train
# together.
RATES = (
    "lr",
    "lr_decay",
    "lr_decay_every",
    "weighting",
    "server_lr_decay",
    "server_lr_decay_every",
)


def run_visits(engines: Sequence[LocalEngine], requests: Sequence[Request]) -> list[RoundResult]:
    """Lets all clients of all runs' plans train; the first run's engine does the work."""
    lead = engines[0]
    shares = [Share(engine, request) for engine, request in zip(engines, requests, strict=True)]
    for name in different([request.algorithm for request in requests]):
        for share in shares:
            share.hyper[name] = getattr(share.request.algorithm, name)
    counts = torch.cat([share.counts for share in shares])
    owner = torch.repeat_interleave(torch.tensor([len(share.counts) for share in shares]))
    index = torch.cat([torch.arange(len(share.counts)) for share in shares])
    waiting = lead.order(counts)
    while len(waiting):
        block, waiting = waiting[: lead.block], waiting[lead.block :]
        ragged, runs = bool(counts[block].min() < counts[block].max()), owner[block]
        left = {run: index[block[runs == run]] for run in sorted(set(runs.tolist()))}
        lacking = None
        try:
            _train(lead, shares, left, ragged)
        except OOM_ERRORS as error:
            if not out_of_memory(error):
                raise
            lacking = lack(error, lead.learner.device)
        if lacking is not None:  # out here, where the failed try holds no memory any more
            lead.shrink(len(block), lacking, requests[0].round)
            waiting = torch.cat([block[torch.isin(runs, torch.tensor([*left]))], waiting])
    for share in shares:
        share.engine.waiting = share.kept
    return [share.returned() for share in shares]


def _train(
    lead: LocalEngine, shares: Sequence[Share], left: dict[int, Tensor], ragged: bool
) -> None:
    """Trains a block of visits, those of each run that are `left`: whoever has been counted in is
    taken out of it.
    """
    parts = {run: shares[run].prepare(places) for run, places in left.items()}
    algorithm, visits = shares[0].request.algorithm, sum(len(places) for places in left.values())
    trained = lead.train(
        algorithm, concatenate_inputs([part.given for part in parts.values()]), ragged
    )
    first = 0
    for run, part in parts.items():
        shares[run].take(
            part, _piece(trained, first, len(part.modes), len(part.given.place), visits)
        )
        first += len(part.modes)
        del left[run]


def concatenate_data(engines: Sequence[LocalEngine]) -> None:
    """Puts the data of all engines into one array, so that visits of any of them fit into one
    block.
    """
    # By their arrays: data that were put together before have one of them, whoever has left since.
    # By both arrays: runs
    # whose malicious clients train on other labels have the same inputs.
    different = list(
        {(id(engine.data.x), id(engine.data.y)): engine.data for engine in engines}.values()
    )
    if len(different) == 1:
        return
    starts = [0]
    for data in different:
        starts.append(starts[-1] + len(data.x))
    with raise_on_oom(
        "The data of runs that train together do",
        different[0].x.device,
        "carry out fewer of them at once",
    ):
        x, y = torch.cat([data.x for data in different]), torch.cat([data.y for data in different])
    offset = {
        (id(data.x), id(data.y)): start for data, start in zip(different, starts, strict=False)
    }
    for engine in engines:
        first = offset[id(engine.data.x), id(engine.data.y)]
        engine.use(replace(engine.data, x=x, y=y, start=engine.data.start + first))


def different(algorithms: Sequence[Algorithm]) -> list[str]:
    """The numbers that differ between algorithms of one kind; raises if anything else does."""
    first, names = algorithms[0], []
    for field in fields(first):
        values = [getattr(algorithm, field.name) for algorithm in algorithms]
        if field.name in RATES or all(value == values[0] for value in values):
            continue
        if not all(isinstance(value, float) for value in values):
            raise ValueError(f"runs with different {field.name} cannot advance together")
        names.append(field.name)
    return names


def concatenate_inputs(parts: Sequence[Inputs]) -> Inputs:
    """Inputs of several runs' visits as those of one block."""
    if len(parts) == 1:
        return parts[0]
    steps = max(len(part.place) for part in parts)
    starts = accumulate([len(part.sent["theta"]) for part in parts[:-1]], initial=0)

    def padded(table: Tensor) -> Tensor:
        return torch.cat([table, table.new_zeros(steps - len(table), *table.shape[1:])])

    def cat(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if name == "mode":
            values = [value + start for value, start in zip(values, starts, strict=True)]
        if isinstance(values[0], dict):
            return {key: torch.cat([value[key] for value in values]) for key in values[0]}
        if name in ("place", "weight"):
            return torch.cat([padded(value) for value in values], 1)
        return torch.cat(values)

    return Inputs(**{name: cat(name) for name in Inputs._fields})


def _piece(trained: BlockResult, first: int, count: int, steps: int, visits: int) -> BlockResult:
    """What `count` of a block's visits gave."""
    if count == visits:
        return trained
    place = slice(first, first + count)
    return BlockResult(
        rows(trained.uploads, place),
        rows(trained.memory, place),
        trained.buffers[place],
        trained.losses[:steps, place],
    )
