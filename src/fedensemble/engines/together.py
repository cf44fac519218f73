"""A round's visits, of one run or of several side by side: blocks of them are trained, sums go to their own run.

Runs that advance together only share the program. Each keeps its own seed, data, memory and numbers, so that its
results are those of running it apart, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.aggregate import ModeMeans, gather
from ..core.algorithm import Algorithm
from ..core.keys import shared_coin
from ..core.round import Request
from ..core.types import Members, Plan, Returned
from ..vectors import Tree, rows
from .block import Inputs, Trained, judge
from .device import onto

if TYPE_CHECKING:
    from .simulation import Simulation

# Changes of running statistics are averaged like an upload; changes, so that frozen parameters stay exactly the same.
_BUFFERS = "buffers"
RATES = ("lr", "lr_decay", "lr_decay_every", "weighting")  # given to each visit, or used on the server only


class Block(NamedTuple):
    """Some of a run's visits that train together."""

    share: Share
    part: Plan
    modes: Tensor  # of the visits, on the device
    place: Tensor  # of the visits in the run's plan, on the device
    given: Inputs


class Share:
    """One run's part of a round: what it asks for, and what has come back."""

    def __init__(self, engine: Simulation, request: Request) -> None:
        self.engine, self.request = engine, request
        device, visits = engine.learner.device, len(request.plan.client)
        self.counts = engine.work.count(engine.host_sizes[request.plan.client])
        self.hyper: dict[str, float] = {}
        self.means = ModeMeans(len(request.buffers))
        self.loss = torch.empty(visits, dtype=engine.learner.dtype, device=device)
        self.bad_step = torch.empty(visits, dtype=torch.int64, device=device)
        self.kept: list[tuple[Plan, Tree]] = []
        self.gathered: list[Members] = []
        coin = shared_coin(engine.seed, request.round, torch.arange(len(request.buffers)))
        self.host_coin = coin.to(engine.learner.dtype)
        self.coin = onto(self.host_coin, device)

    def prepare(self, places: Tensor) -> Block:
        """What some of its visits need; all that goes to the device goes there before they are trained."""
        algorithm, sent, buffers, plan, round = self.request
        part = Plan(plan.client[places], plan.mode[places])
        modes = row = onto(part.mode, buffers.device)
        if len(buffers) > len(modes):  # more modes than visits: some are not needed
            sent, row = rows(sent, modes), torch.arange(len(modes), device=modes.device)
        given = self.engine.prepare(algorithm, sent, row, buffers[modes], part, round)
        if self.hyper:
            given = given._replace(hyper={name: torch.full_like(given.lr, v) for name, v in self.hyper.items()})
        return Block(self, part, modes, onto(places, buffers.device), given)

    def take(self, block: Block, trained: Trained) -> None:
        """Counts in what some of its visits gave."""
        _, part, modes, place, given = block
        buffers = self.request.buffers
        self.kept.append((part, self.engine.memory.aside(trained.memory)))
        weight = given.sizes[:, 0]
        weight = torch.ones_like(weight) if self.request.algorithm.weighting == "uniform" else weight
        self.means.add(modes, weight, {**trained.uploads, _BUFFERS: trained.buffers - buffers[modes]})
        if self.request.algorithm.gathers:  # copies: what a block gave holds until the next one runs
            uploads = {name: value.clone() for name, value in trained.uploads.items()}
            self.gathered.append(
                Members(onto(part.client, buffers.device), modes, weight, uploads, trained.buffers.clone())
            )
        self.loss[place], self.bad_step[place] = judge(trained, given)

    def returned(self) -> Returned:
        """What the server gets."""
        algorithm, sent, buffers, plan, _ = self.request
        engine = self.engine
        if any(memory for _, memory in self.kept) and bool(self.loss.isfinite().all()):
            engine.memory.write_all(self.kept)  # a round that fails leaves no trace: all stays as it was before it
        uploads = self.means.mean()
        moved = uploads.pop(_BUFFERS, torch.zeros_like(buffers))  # none if nobody trained
        carried = torch.full((len(buffers), 1), buffers.shape[-1] * buffers.element_size())
        members = gather(self.gathered) if self.gathered else None
        population = len(engine.host_sizes)
        total = population if algorithm.weighting == "uniform" else int(engine.host_sizes.sum())
        return Returned(
            uploads=uploads,
            buffers=buffers + moved,
            cohort=replace(self.means.cohort(population, total, self.coin), members=members),
            loss=self.loss,
            first_bad_step=self.bad_step,
            bytes_up=(carried + algorithm.upload_bytes(uploads, self.host_coin))[plan.mode, 0],
            bytes_down=(carried + algorithm.download_bytes(sent, self.host_coin))[plan.mode, 0],
        )


def visit_together(engines: Sequence[Simulation], requests: Sequence[Request]) -> list[Returned]:
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
        block = waiting[: lead.block]
        ragged = bool(counts[block].min() < counts[block].max())
        parts = []
        for run in sorted(set(owner[block].tolist())):
            parts.append(shares[run].prepare(index[block[owner[block] == run]]))
        trained = lead.train(requests[0].algorithm, joined([part.given for part in parts]), ragged)
        if trained is None:  # no room for so many: again, with smaller blocks
            continue
        waiting = waiting[len(block) :]
        first = 0
        for part in parts:
            part.share.take(part, _piece(trained, first, len(part.modes), len(part.given.place), len(block)))
            first += len(part.modes)
    return [share.returned() for share in shares]


def share_data(engines: Sequence[Simulation]) -> None:
    """Puts the data of all engines into one array, so that visits of any of them fit into one block."""
    # By their arrays: data that were put together before have one of them, whoever has left since.
    different = list({id(engine.data.x): engine.data for engine in engines}.values())
    if len(different) == 1:
        return
    starts = [0]
    for data in different:
        starts.append(starts[-1] + len(data.x))
    x, y = torch.cat([data.x for data in different]), torch.cat([data.y for data in different])
    offset = {id(data.x): start for data, start in zip(different, starts, strict=False)}
    for engine in engines:
        first = offset[id(engine.data.x)]
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


def joined(parts: Sequence[Inputs]) -> Inputs:
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


def _piece(trained: Trained, first: int, count: int, steps: int, visits: int) -> Trained:
    """What `count` of a block's visits gave."""
    if count == visits:
        return trained
    place = slice(first, first + count)
    return Trained(
        rows(trained.uploads, place), rows(trained.memory, place), trained.buffers[place], trained.losses[:steps, place]
    )
