"""Local training as CUDA graphs: Python runs once for each shape, the card does the rest.

While local training is recorded, the work before, in and after the local steps goes to graphs of
its own. A round copies its inputs to where the graphs expect them, replays the first, then the
step's graph as often as there are steps (it counts them on the card), then the last. Algorithms do
not know of it: only `iterate` differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.optimizer import SGD
from ...core.problem import Adjust, Gradient, LocalProblem, Step
from ...flat_params import Tree
from ..stacked import dispatch
from ..stacked.aligned_rows import sgd_step_, to_aligned
from ..stacked.stacked_params import use_cast_copy
from .block import BlockResult, Inputs, Minibatches, received, tuned

Copied = Callable[[Tensor], Tensor | None]


class Recorder:
    """Cuts the work of a stream into graphs that share one memory pool."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        # and whether it is one of the repeated steps
        self.graphs: list[tuple[torch.cuda.CUDAGraph, bool]] = []
        self._open: Any = None

    def begin(self, repeated: bool) -> None:
        """Ends the graph that is being recorded, if any, and begins the next."""
        self.end()
        graph = torch.cuda.CUDAGraph()
        self._open = torch.cuda.graph(graph, pool=self.pool)
        self._open.__enter__()
        self.graphs.append((graph, repeated))

    def end(self) -> None:
        """Ends the graph that is being recorded."""
        if self._open is not None:
            opened, self._open = self._open, None
            with warnings.catch_warnings():  # there may be nothing to do before or after the steps
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                opened.__exit__(None, None, None)


class RecordedProblem(LocalProblem):
    """A problem whose local steps are recorded once and replayed."""

    recorder: Recorder
    minibatches: Minibatches
    table: Tensor  # losses, [S, J]
    copied: Copied  # what products read of weights [J, P], or None
    # [J, 1], while a step is recorded whose visits do not all take part
    active: Tensor | None = None

    def descend(
        self, start: Tensor, adjust: Adjust | None = None, limit: Tensor | None = None
    ) -> Tensor:
        # a subclass may step in its own way
        plain = type(self.optimizer) is SGD and self.optimizer.momentum == 0
        if not plain or limit is not None:
            return super().descend(start, adjust, limit)

        def step(state: Tree, gradient: Gradient) -> Tree:
            """The same in place: one pass over the weights."""
            theta = state["theta"]
            with use_cast_copy(theta, copy):
                value, decay = gradient(theta), self.optimizer.weight_decay
            value = value if adjust is None else adjust(theta, value)
            if self.optimizer.clip > 0:
                value, decay = self.optimizer.prepare(theta, value), 0.0
            rate = self.lr if self.active is None else self.lr * self.active
            return {"theta": sgd_step_(theta, value, torch.as_tensor(rate), decay, copy)}

        # Copies: the steps write into them, and the caller's tensors must stay as they are.
        theta = to_aligned(start)
        copy = self.copied(theta)
        return self._repeated({"theta": theta}, step)["theta"]

    def iterate(self, state: Tree, step: Step) -> Tree:
        return self._repeated({name: value.clone() for name, value in state.items()}, step)

    def _repeated(self, state: Tree, step: Step) -> Tree:
        """Records a step, which is then repeated; the state is written over."""
        given = self.minibatches.given
        buffers = self.buffers.clone()
        index = torch.zeros(1, dtype=torch.int64, device=buffers.device)
        self.recorder.begin(repeated=True)
        place, weight = (
            table.index_select(0, index).squeeze(0) for table in (given.place, given.weight)
        )
        active = self.active = (
            weight.any(-1, keepdim=True) if self.minibatches.active is not None else None
        )
        key = dispatch.fold_in(given.noise, index)

        def gradient(at: Tensor) -> Tensor:
            value, (loss, new) = self.minibatches.on_batch(place, weight, key, at, buffers)
            if new is not buffers:
                buffers.copy_(new if active is None else torch.where(active, new, buffers))
            self.table.index_copy_(0, index, loss.unsqueeze(0))
            return value

        new = step(state, gradient)
        own = {value.untyped_storage().data_ptr() for value in state.values()}
        # an old value that goes on under another name must not be overwritten first
        for name, value in new.items():
            if value is not state[name] and value.untyped_storage().data_ptr() in own:
                new = {**new, name: value.clone()}
        for name, value in new.items():
            if value is not state[name]:
                state[name].copy_(
                    value if active is None else torch.where(active, value, state[name])
                )
        index.add_(1)
        self.recorder.begin(repeated=False)
        self.buffers = buffers
        return state


class CapturedTraining:
    """Local training of one algorithm for blocks of one shape.

    Args:
        given: inputs of such a block, as an example.
        most_steps: local steps of the largest client.
        minibatches: makes the local steps from inputs.
        copied: makes the copy of weights that products read, or gives None.
        pool: memory shared with other captured trainings; they never run at the same time.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        given: Inputs,
        most_steps: int,
        minibatches: Callable[[Inputs], Minibatches],
        copied: Copied,
        pool: Any,
    ) -> None:
        room = (most_steps, *given.place.shape[1:])
        self.given = Inputs(
            **{
                **{name: _copied(value) for name, value in given._asdict().items()},
                "place": given.place.new_zeros(room),
                "weight": given.weight.new_zeros(room),
            }
        )
        self.load(given)
        self.recorder = Recorder(pool)
        problem = RecordedProblem(
            steps := minibatches(self.given),
            self.given.buffers,
            algorithm.optimizer,
            self.given.lr,
            self.given.sizes,
            self.given.counts,
            self.given.own,
            self.given.coin,
        )
        problem.recorder, problem.minibatches, problem.copied = self.recorder, steps, copied
        problem.table = torch.zeros(
            room[:2], dtype=self.given.lr.dtype, device=self.given.lr.device
        )
        self.table = problem.table
        try:
            self.recorder.begin(repeated=False)
            method = tuned(algorithm, self.given.hyper)
            uploads, memory = method.local_training(
                received(self.given), self.given.memory, problem
            )
            self.uploads, self.memory, self.buffers = uploads, memory, problem.buffers
        finally:
            self.recorder.end()

    def load(self, given: Inputs) -> None:
        """Puts a block's inputs where the graphs expect them."""
        for name, held in self.given._asdict().items():
            value = getattr(given, name)
            if name in ("place", "weight"):
                held[: len(value)].copy_(value)
            elif isinstance(held, dict):
                for key, tensor in held.items():
                    tensor.copy_(value[key])
            else:
                held.copy_(value)

    def run(self, given: Inputs) -> BlockResult:
        """Trains a block; what it returns holds until the next run, what clients remember for
        ever.
        """
        self.load(given)
        steps = len(given.place)
        for graph, repeated in self.recorder.graphs:
            for _ in range(steps if repeated else 1):
                graph.replay()
        # read only at the end of the round
        kept = {name: value.clone() for name, value in self.memory.items()}
        return BlockResult(self.uploads, kept, self.buffers, self.table[:steps])


def _copied(value: Any) -> Any:
    return (
        {name: tensor.clone() for name, tensor in value.items()}
        if isinstance(value, dict)
        else value.clone()
    )
