"""Accumulates the results of one run's visits in a round, block by block."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...core.mode_means import ModeMeans, gather
from ...core.probe import expected_uploads
from ...core.round import Request
from ...core.types import GatheredUploads, Plan, RoundResult
from ...core.visits.traffic import bytes_down, bytes_up, takes_optional_argument
from ...core.visits.visit_keys import shared_uniform
from ...core.visits.visit_reports import make_reports, update_norms
from ...flat_params import Tree, select_rows
from .block import BlockInputs, BlockResult, gather_sent, summarize_losses
from .device_cache import to_device_async
from .received import measure_received

if TYPE_CHECKING:
    from .local_engine import LocalEngine

# Name under which the change of the buffers is averaged along with the uploads. The change, not the
# buffers: some never change, and a weighted mean of equal values can differ from them in the last
# bit, whereas a mean of zeros is exactly zero.
_BUFFERS = "buffers"


class Block(NamedTuple):
    """The visits of one run that are trained in one block."""

    plan: Plan
    modes: Tensor  # [J] mode of each visit, on the device
    positions: Tensor  # [J] of the visits in the run's plan, on the device
    inputs: BlockInputs


class RunAccumulator:
    """The inputs and accumulated results of one run in one round."""

    def __init__(self, engine: LocalEngine, request: Request) -> None:
        self.engine, self.request = engine, request
        device, visits = engine.model.device, len(request.plan.client)
        self.counts = engine.count_steps(request.plan)  # [J] local steps
        # hyperparameters that differ from those of the runs trained together with this one
        self.hyperparameters: dict[str, float] = {}
        self.means = ModeMeans(len(request.buffers))
        self.loss = torch.empty(visits, dtype=engine.model.dtype, device=device)
        self.bad_step = torch.empty(visits, dtype=torch.int64, device=device)
        # (positions in the plan, bytes), only if downloads differ between visits of a mode
        self.downloads: list[tuple[Tensor, Tensor]] = []
        self.new_state: list[tuple[Plan, Tree]] = []  # client state
        self.gathers = request.algorithm.gathers_uploads(request.sent)
        self.members: list[GatheredUploads] = []
        # loss and gradient norm of received models, and lengths of updates, [3, J]
        self.reports: Tensor | None = None
        if engine.reports_visits:
            self.reports = torch.zeros(3, visits, dtype=torch.float64, device=device)

    def prepare_block(self, positions: Tensor) -> Block:
        """Builds the inputs of the visits at these positions of the plan, [J] on the CPU.

        All transfers to the device are queued here, before the block is trained.
        """
        algorithm, sent, buffers, plan, round = self.request
        part = plan.select(positions)
        modes = row = to_device_async(part.mode, buffers.device)
        if len(buffers) > len(modes):  # more modes than visits: pass on only the rows in use
            sent, row = select_rows(sent, modes), torch.arange(len(modes), device=modes.device)
        inputs = self.engine.prepare(algorithm, sent, row, buffers[modes], part, round)
        if self.hyperparameters:
            tensors = {
                name: torch.full_like(inputs.lr, value)
                for name, value in self.hyperparameters.items()
            }
            inputs = inputs._replace(hyperparameters=tensors)
        if takes_optional_argument(type(algorithm), "download_bytes"):
            shared_draw = shared_uniform(self.engine.seed, round, part.mode).to(
                self.engine.model.dtype
            )
            size = bytes_down(algorithm, gather_sent(inputs), inputs.memory, shared_draw)
            self.downloads.append((positions, torch.as_tensor(size).expand(len(positions), 1)))
        on_device = to_device_async(positions, buffers.device)
        if self.reports is not None:
            received = measure_received(self.engine, algorithm, part, inputs)
            self.reports[:2, on_device] = torch.stack(received).double()
        return Block(part, modes, on_device, inputs)

    # All-or-nothing. Any allocation can run out of memory, after which the same visits are trained
    # again in smaller blocks. If a part of the block had been added to the sums already, these
    # visits would count twice. So everything that allocates comes before the first sum is changed:
    # the copies here, and the temporaries in `ModeMeans.add`, which is all-or-nothing itself. Loss
    # and bad step are written at each visit's own position, which writing twice does not harm.
    def add(self, block: Block, result: BlockResult) -> None:
        """Adds the results of a block. If memory runs out, nothing has been added."""
        part, modes, positions, inputs = block
        algorithm, buffers = self.request.algorithm, self.request.buffers
        self.loss[positions], self.bad_step[positions] = summarize_losses(result, inputs)
        if self.reports is not None:
            unchanged = select_rows(self._unchanged, modes)
            self.reports[2, positions] = update_norms(result.uploads, unchanged)
        new_state = self.engine.memory.stage(result.memory)
        weight = inputs.sizes[:, 0]
        if algorithm.weighting == "uniform":
            weight = torch.ones_like(weight)
        members = []
        if self.gathers:
            # Copies, because the next replay of a CUDA graph overwrites the results of this block.
            uploads = {name: value.clone() for name, value in result.uploads.items()}
            client = to_device_async(part.client, buffers.device)
            members = [GatheredUploads(client, modes, weight, uploads, result.buffers.clone())]
        change = result.buffers - buffers[modes]
        self.means.add(modes, weight, {**result.uploads, _BUFFERS: change})
        self.new_state.append((part, new_state))
        self.members += members

    @cached_property
    def _unchanged(self) -> Tree:
        """The uploads of clients that learn nothing, one per mode, [K, P]."""
        algorithm, sent, buffers, _, round = self.request
        draw = shared_uniform(self.engine.seed, round, torch.arange(len(buffers)))
        draw = to_device_async(draw.to(self.engine.model.dtype), buffers.device)
        return expected_uploads(algorithm, sent, buffers, draw)

    def result(self) -> RoundResult:
        """The result of the round, as the server gets it."""
        algorithm, sent, buffers, plan, round = self.request
        engine = self.engine
        shared_draw = shared_uniform(engine.seed, round, torch.arange(len(buffers))).to(
            engine.model.dtype
        )
        uploads = self.means.mean()
        change = uploads.pop(_BUFFERS, torch.zeros_like(buffers))  # absent if no client trained
        members = gather(self.members) if self.members else None
        population = len(engine.host_sizes)
        total = population if algorithm.weighting == "uniform" else int(engine.host_sizes.sum())
        cohort = self.means.cohort(population, total, to_device_async(shared_draw, buffers.device))
        buffer_bytes = torch.full((len(buffers), 1), algorithm.buffer_bytes(buffers))
        upload_bytes = torch.as_tensor(bytes_up(algorithm, uploads, sent, shared_draw)).cpu()
        return RoundResult(
            uploads=uploads,
            buffers=buffers + change,
            cohort=replace(cohort, members=members, round=round, lr=algorithm.learning_rate(round)),
            loss=self.loss,
            first_bad_step=self.bad_step,
            bytes_up=(buffer_bytes + upload_bytes)[plan.mode, 0],
            bytes_down=self._count_downloads(shared_draw),
            reports=None if self.reports is None else make_reports(self.reports, round),
        )

    def _count_downloads(self, shared_draw: Tensor) -> Tensor:
        """Bytes that each visit received, buffers included, [J].

        Sizes are read from the device only here, at the end of the round, because reading waits for
        the kernels that are still running.
        """
        algorithm, sent, buffers, plan, _ = self.request
        buffer_bytes = algorithm.buffer_bytes(buffers)
        if not takes_optional_argument(type(algorithm), "download_bytes"):
            size = torch.as_tensor(bytes_down(algorithm, sent, {}, shared_draw)).expand(
                len(buffers), 1
            )
            return buffer_bytes + size[plan.mode, 0]
        total = torch.full((len(plan.client),), buffer_bytes)
        # Visits that were trained again after running out of memory are in the list twice, at the
        # same position.
        for positions, size in self.downloads:
            total[positions] = buffer_bytes + size[:, 0].cpu()
        return total
