"""One run's part of a round: what its visits need, and what they gave."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...core.aggregate import ModeMeans, gather
from ...core.keys import shared_uniform
from ...core.round import Request
from ...core.traffic import bytes_down, bytes_up, sees
from ...core.types import Members, Plan, RoundResult
from ...flat_params import Tree, rows
from .block import BlockResult, Inputs, received, summarize_losses
from .device_cache import to_device_async

if TYPE_CHECKING:
    from .local_engine import LocalEngine

# Changes of running statistics are averaged like an upload; changes, so that frozen parameters stay
# exactly the same.
_BUFFERS = "buffers"


class Block(NamedTuple):
    """Some of a run's visits that train together."""

    part: Plan
    modes: Tensor  # of the visits, on the device
    place: Tensor  # of the visits in the run's plan, on the device
    given: Inputs


class Share:
    """One run's part of a round: what it asks for, and what has come back."""

    def __init__(self, engine: LocalEngine, request: Request) -> None:
        self.engine, self.request = engine, request
        device, visits = engine.learner.device, len(request.plan.client)
        self.counts = engine.work.count(engine.host_sizes[request.plan.client])
        self.hyper: dict[str, float] = {}
        self.means = ModeMeans(len(request.buffers))
        self.loss = torch.empty(visits, dtype=engine.learner.dtype, device=device)
        self.bad_step = torch.empty(visits, dtype=torch.int64, device=device)
        # places and bytes, where these differ between visits
        self.downloads: list[tuple[Tensor, Tensor]] = []
        self.kept: list[tuple[Plan, Tree]] = []
        self.gathered: list[Members] = []

    def prepare(self, places: Tensor) -> Block:
        """What some of its visits need; all that goes to the device goes there before they are
        trained.
        """
        algorithm, sent, buffers, plan, round = self.request
        part = Plan(plan.client[places], plan.mode[places])
        modes = row = to_device_async(part.mode, buffers.device)
        if len(buffers) > len(modes):  # more modes than visits: some are not needed
            sent, row = rows(sent, modes), torch.arange(len(modes), device=modes.device)
        given = self.engine.prepare(algorithm, sent, row, buffers[modes], part, round)
        if self.hyper:
            given = given._replace(
                hyper={name: torch.full_like(given.lr, v) for name, v in self.hyper.items()}
            )
        if sees(type(algorithm), "download_bytes"):
            coin = shared_uniform(self.engine.seed, round, part.mode).to(self.engine.learner.dtype)
            size = bytes_down(algorithm, received(given), given.memory, coin)
            self.downloads.append((places, torch.as_tensor(size).expand(len(places), 1)))
        return Block(part, modes, to_device_async(places, buffers.device), given)

    def take(self, block: Block, trained: BlockResult) -> None:
        """Counts in what some of its visits gave; where memory runs out, nothing of it."""
        part, modes, place, given = block
        buffers = self.request.buffers
        self.loss[place], self.bad_step[place] = summarize_losses(
            trained, given
        )  # visits that are tried again write it again
        memory = self.engine.memory.aside(trained.memory)
        weight = given.sizes[:, 0]
        weight = (
            torch.ones_like(weight) if self.request.algorithm.weighting == "uniform" else weight
        )
        gathered = []
        # copies: what a block gave holds until the next one runs
        if self.request.algorithm.gathers:
            uploads = {name: value.clone() for name, value in trained.uploads.items()}
            client = to_device_async(part.client, buffers.device)
            gathered = [Members(client, modes, weight, uploads, trained.buffers.clone())]
        self.means.add(
            modes, weight, {**trained.uploads, _BUFFERS: trained.buffers - buffers[modes]}
        )
        self.kept.append((part, memory))
        self.gathered += gathered

    def returned(self) -> RoundResult:
        """What the server gets."""
        algorithm, sent, buffers, plan, round = self.request
        engine = self.engine
        coin = shared_uniform(engine.seed, round, torch.arange(len(buffers))).to(
            engine.learner.dtype
        )
        uploads = self.means.mean()
        moved = uploads.pop(_BUFFERS, torch.zeros_like(buffers))  # none if nobody trained
        carried = torch.full((len(buffers), 1), buffers.shape[-1] * buffers.element_size())
        members = gather(self.gathered) if self.gathered else None
        population = len(engine.host_sizes)
        total = population if algorithm.weighting == "uniform" else int(engine.host_sizes.sum())
        return RoundResult(
            uploads=uploads,
            buffers=buffers + moved,
            cohort=replace(
                self.means.cohort(population, total, to_device_async(coin, buffers.device)),
                members=members,
                round=round,
                lr=algorithm.rate(round),
            ),
            loss=self.loss,
            first_bad_step=self.bad_step,
            bytes_up=(carried + torch.as_tensor(bytes_up(algorithm, uploads, sent, coin)).cpu())[
                plan.mode, 0
            ],
            bytes_down=self._downloaded(coin),
        )

    def _downloaded(self, coin: Tensor) -> Tensor:
        """Bytes that each visit received, running statistics included, [J]; read from the device
        only now.
        """
        algorithm, sent, buffers, plan, _ = self.request
        carried = buffers.shape[-1] * buffers.element_size()
        if not sees(type(algorithm), "download_bytes"):
            size = torch.as_tensor(bytes_down(algorithm, sent, {}, coin)).expand(len(buffers), 1)
            return carried + size[plan.mode, 0]
        total = torch.full((len(plan.client),), carried)
        # visits that are tried again are counted again, in the same place
        for places, size in self.downloads:
            total[places] = carried + size[:, 0].cpu()
        return total
