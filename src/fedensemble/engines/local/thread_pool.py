"""Several cores: shares of a block train side by side, one thread each, where a local step is worth
a thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.algorithm import Algorithm
from ...flat_params import Tree, rows
from ...runtime.num_threads import cores, num_threads
from .block import BlockResult, Inputs
from .flops import operations

if TYPE_CHECKING:
    from .vector import VectorEngine

# operations of a visit's forward pass; below it most of a step is Python, which threads share
_WORTH = 10_000_000
# of a block's; below it torch's own threads gain nothing and, on a busy machine, lose much
_WORTH_INSIDE = 50_000_000
# shares a core where visits have different numbers of steps: whoever is done takes the next
_UNEVEN = 4


class ThreadedTrainer:
    """Trains a block of visits on as many cores as torch may use, each share on one of them.

    Faster than torch's own threads inside each operation (docs/performance.md). Shares are cut by
    the number of visits and cores alone, and put together in order: the same numbers, whoever
    computes them first.

    Args:
        engine: whose blocks are trained; it is not kept.
    """

    def __init__(self, engine: VectorEngine) -> None:
        self.work = operations(engine) * engine.work.batch_size  # of a visit's forward pass
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[VectorEngine] = []

    def train(
        self, engine: VectorEngine, algorithm: Algorithm, given: Inputs, ragged: bool
    ) -> BlockResult:
        """Local training of a block of visits."""
        count, visits = cores(), len(given.noise)
        if self.work < _WORTH or min(count, visits) < 2:
            with num_threads(1 if self.work * visits < _WORTH_INSIDE else count):
                return engine.train_plainly(algorithm, given, ragged)
        parts = shares(given, min(visits, count * _UNEVEN if ragged else count))
        pool = self._ready(engine, count)

        def work(part: Inputs) -> BlockResult:
            torch.set_num_threads(1)  # of this thread, and of the matrix library
            worker = self._idle.pop()
            try:
                return worker.train_plainly(
                    algorithm, part, bool(part.counts.min() < part.counts.max())
                )
            finally:
                self._idle.append(worker)

        # Settings of the whole process: threads must not undo each other's.
        with num_threads(torch.get_num_threads()), sdpa_kernel(SDPBackend.MATH):
            working = [pool.submit(work, part) for part in parts]
            wait(working)  # for all, also where one fails: none may go on beside the next try
            return together([part.result() for part in working], len(given.place))

    def _ready(self, engine: VectorEngine, count: int) -> ThreadPoolExecutor:
        """Threads, and for each a module of its own: weights are put into a module and taken out
        again.
        """
        if self._pool is None or len(self._idle) != count:
            self._pool = ThreadPoolExecutor(count, thread_name_prefix="fedensemble")
            self._idle = [_worker(engine) for _ in range(count)]
        for worker in self._idle:
            worker.data = engine.data
        return self._pool


def _worker(engine: VectorEngine) -> VectorEngine:
    worker, learner = copy(engine), engine.learner.clone_module()
    worker.learner, worker.gradient, worker.threads = learner, engine.gradient_of(learner), None
    return worker


def shares(given: Inputs, count: int) -> list[Inputs]:
    """A block's inputs in `count` parts, each with the local steps its visits have."""
    return [_share(given, part) for part in torch.arange(len(given.noise)).tensor_split(count)]


def _share(given: Inputs, visits: Tensor) -> Inputs:
    place = slice(int(visits[0]), int(visits[-1]) + 1)
    values: dict[str, Any] = given._asdict()
    values = {
        name: rows(v, place) if isinstance(v, dict) else v[place] for name, v in values.items()
    }
    steps = int(values["counts"].max())
    tables = {"place": given.place[:steps, place], "weight": given.weight[:steps, place]}
    return Inputs(**{**values, **tables, "sent": given.sent})


def together(parts: list[BlockResult], steps: int) -> BlockResult:
    """What a block gave, from what its parts gave."""

    def trees(name: str) -> Tree:
        values: list[Tree] = [getattr(part, name) for part in parts]
        return {key: torch.cat([value[key] for value in values]) for key in values[0]}

    losses = [
        torch.cat([p.losses, p.losses.new_zeros(steps - len(p.losses), p.losses.shape[1])])
        for p in parts
    ]
    buffers = torch.cat([part.buffers for part in parts])
    return BlockResult(trees("uploads"), trees("memory"), buffers, torch.cat(losses, 1))
