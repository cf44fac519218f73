"""Trains the parts of a block in parallel threads on a CPU, if a local step is large enough."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...core.algorithm import Algorithm
from ...flat_params import Tree, select_rows
from ...runtime.num_threads import available_threads, num_threads
from .block import BlockInputs, BlockResult

if TYPE_CHECKING:
    from .vector import VectorEngine

# FLOPs of a visit's forward pass from which a thread per part pays off. Below that most of the time
# of a step is spent in Python, whose interpreter lock lets only one thread run at a time.
_WORTH = 10_000_000
# FLOPs of a block's forward pass from which torch's own threads inside each operation pay off.
# Below that they gain nothing, and on a busy machine they wait for each other.
_WORTH_INSIDE = 50_000_000
# Parts per core if visits have different numbers of steps. A thread that finishes early takes the
# next part, so that no core is idle while another trains the largest clients.
_PARTS_PER_CORE = 4


class ThreadedTrainer:
    """Trains a block of visits on all cores that torch may use, one part of the block per thread.

    This is faster than torch's own threads inside each operation, which must synchronize after
    every operation (docs/performance.md has measurements).

    Results do not depend on the order in which threads finish. The parts follow from the number of
    visits and cores alone, and their results are concatenated in order.

    Args:
        flops: of the forward pass of a visit's batch.
    """

    def __init__(self, flops: int) -> None:
        self.work = flops
        self._pool: ThreadPoolExecutor | None = None
        self._idle: list[VectorEngine] = []

    def inside(self, visits: int) -> int:
        """Threads inside torch's operators that pay off for so many visits."""
        return 1 if self.work * visits < _WORTH_INSIDE else available_threads()

    def train(
        self, engine: VectorEngine, algorithm: Algorithm, inputs: BlockInputs, ragged: bool
    ) -> BlockResult:
        """Trains a block of visits."""
        count, visits = available_threads(), len(inputs.model_key)
        if self.work < _WORTH or visits < 2 or (count < 2 and not ragged):
            with num_threads(self.inside(visits)):
                return engine.train_eager(algorithm, inputs, ragged)
        parts = split_inputs(inputs, min(visits, count * _PARTS_PER_CORE if ragged else count))
        if count < 2:
            # One core gains from parts, too, if visits have different numbers of steps: each part
            # has only as many as its longest visit.
            with num_threads(1):
                results = [_train_part(engine, algorithm, part) for part in parts]
            return concatenate_results(results, len(inputs.batch_index))
        pool = self._prepare_workers(engine, count)

        def train_part(part: BlockInputs) -> BlockResult:
            torch.set_num_threads(1)  # inside operations: the other cores have parts of their own
            worker = self._idle.pop()
            try:
                return _train_part(worker, algorithm, part)
            finally:
                self._idle.append(worker)

        # The number of threads and the attention backend are settings of the whole process. They
        # are set and restored here, around all threads: if each thread set and restored them by
        # itself, one could restore a setting that another still needs.
        with num_threads(torch.get_num_threads()), sdpa_kernel(SDPBackend.MATH):
            futures = [pool.submit(train_part, part) for part in parts]
            # Wait for all parts even if one fails. After running out of memory the block is tried
            # again in smaller parts, and no thread of the first attempt may still hold memory then.
            wait(futures)
            results = [future.result() for future in futures]
            return concatenate_results(results, len(inputs.batch_index))

    def _prepare_workers(self, engine: VectorEngine, count: int) -> ThreadPoolExecutor:
        """The pool, with one idle worker per thread.

        A worker is a copy of the engine with a module of its own. The forward pass replaces the
        parameters of the module temporarily, so two threads must not use the same module.
        """
        if self._pool is None or len(self._idle) != count:
            self._pool = ThreadPoolExecutor(count, thread_name_prefix="fedensemble")
            self._idle = [_make_worker(engine) for _ in range(count)]
        for worker in self._idle:
            worker.data = engine.data
        return self._pool


def _make_worker(engine: VectorEngine) -> VectorEngine:
    worker, model = copy(engine), engine.model.clone_module()
    worker.model, worker.gradient, worker.threads = model, engine.gradient_of(model), None
    return worker


def _train_part(engine: VectorEngine, algorithm: Algorithm, part: BlockInputs) -> BlockResult:
    """Trains a part of a block."""
    ragged = bool(part.counts.min() < part.counts.max())
    return engine.train_eager(algorithm, part, ragged)


def split_inputs(inputs: BlockInputs, count: int) -> list[BlockInputs]:
    """The inputs of a block in `count` parts, each with as many local steps as its visits need."""
    visits = torch.arange(len(inputs.model_key))
    return [_select_visits(inputs, part) for part in visits.tensor_split(count)]


def _select_visits(inputs: BlockInputs, visits: Tensor) -> BlockInputs:
    """The inputs of some consecutive visits of a block."""
    index = slice(int(visits[0]), int(visits[-1]) + 1)
    values: dict[str, Any] = {
        name: select_rows(value, index) if isinstance(value, dict) else value[index]
        for name, value in inputs._asdict().items()
    }
    steps = int(values["counts"].max())
    values["batch_index"] = inputs.batch_index[:steps, index]
    values["weight"] = inputs.weight[:steps, index]
    return BlockInputs(**{**values, "sent": inputs.sent})  # its rows are modes, not visits


def concatenate_results(parts: list[BlockResult], steps: int) -> BlockResult:
    """The result of a block of `steps` local steps from the results of its parts, in order."""

    def concatenate(name: str) -> Tree:
        trees: list[Tree] = [getattr(part, name) for part in parts]
        return {key: torch.cat([tree[key] for tree in trees]) for key in trees[0]}

    losses = [
        torch.cat([p.losses, p.losses.new_zeros(steps - len(p.losses), p.losses.shape[1])])
        for p in parts
    ]
    buffers = torch.cat([part.buffers for part in parts])
    return BlockResult(concatenate("uploads"), concatenate("memory"), buffers, torch.cat(losses, 1))
