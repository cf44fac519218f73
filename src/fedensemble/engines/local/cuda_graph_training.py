"""Local training as CUDA graphs: Python runs once per block shape, then the GPU replays.

A local step of a small model is dozens of kernels of a few microseconds each, and launching them
from Python takes longer than running them. A CUDA graph launches them all with one call.

Capturing one graph per number of local steps would need a graph for each client size. Instead,
local training is cut into three kinds of graphs: the work before the local steps, one local step,
and the work after the steps. A round copies its inputs to the addresses that the graphs read,
replays the first graph, replays the step graph once per local step, and replays the last graph. The
step graph counts steps in a tensor on the GPU, from which it looks up the batch of each step.

Algorithms need no changes: they call `problem.iterate` or `problem.descend` as always, and only
these two methods differ here. Functions that run on the server are captured by
`modeling/graphed_function.py`.
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
from .block import BlockInputs, BlockResult, Minibatches, gather_sent, with_hyperparameters

MakeCastCopy = Callable[[Tensor], Tensor | None]


class GraphRecorder:
    """Captures the work of a stream as a sequence of CUDA graphs that share one memory pool.

    The shared pool lets a graph read tensors that an earlier graph of the sequence has allocated.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        # (graph, True if it is replayed once per local step)
        self.graphs: list[tuple[torch.cuda.CUDAGraph, bool]] = []
        self._capture: Any = None

    def begin(self, repeated: bool) -> None:
        """Ends the current capture, if any, and begins the next graph."""
        self.end()
        graph = torch.cuda.CUDAGraph()
        self._capture = torch.cuda.graph(graph, pool=self.pool)
        self._capture.__enter__()
        self.graphs.append((graph, repeated))

    def end(self) -> None:
        """Ends the current capture, if any."""
        if self._capture is not None:
            capture, self._capture = self._capture, None
            with warnings.catch_warnings():
                # An algorithm may have no work before or after the local steps.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                capture.__exit__(None, None, None)


class CapturedProblem(LocalProblem):
    """A local problem that captures one local step, to be replayed once per step."""

    recorder: GraphRecorder
    minibatches: Minibatches
    loss_table: Tensor  # [S, J]
    make_cast_copy: MakeCastCopy  # the copy of parameters [J, P] that matmuls read, or None
    # [J, 1], set while a step is captured in which some visits may have finished; otherwise None
    active: Tensor | None = None

    def descend(self, start: Tensor, adjust: Adjust | None = None) -> Tensor:
        # Exactly SGD, because a subclass may override `step`.
        plain_sgd = type(self.optimizer) is SGD and self.optimizer.momentum == 0
        if not plain_sgd:
            return super().descend(start, adjust)

        # Plain SGD updates the parameters in place, in one pass over memory. The same pass writes
        # the copy that the next step's matmuls read (bf16, or aligned rows). The general path in
        # `LocalProblem.descend` makes new tensors in several passes.
        def step(state: Tree, gradient: Gradient) -> Tree:
            theta = state["theta"]
            with use_cast_copy(theta, cast_copy):
                grad, decay = gradient(theta), self.optimizer.weight_decay
            grad = grad if adjust is None else adjust(theta, grad)
            if self.optimizer.clip > 0:
                grad, decay = self.optimizer.prepare(theta, grad), 0.0
            # Visits that have finished have learning rate 0.
            rate = self.lr if self.active is None else self.lr * self.active
            return {"theta": sgd_step_(theta, grad, torch.as_tensor(rate), decay, cast_copy)}

        theta = to_aligned(start)  # a copy: the steps write to it, and `start` must not change
        cast_copy = self.make_cast_copy(theta)
        return self._capture_steps({"theta": theta}, step)["theta"]

    def iterate(self, state: Tree, step: Step) -> Tree:
        return self._capture_steps({name: value.clone() for name, value in state.items()}, step)

    def _capture_steps(self, state: Tree, step: Step) -> Tree:
        """Captures one step as a graph of its own; the step overwrites `state` with its result.

        A graph always reads and writes the same addresses. So everything that changes from step to
        step lives in tensors that the step updates in place: the state, the buffers, the loss
        table, and the step index.
        """
        inputs = self.minibatches.inputs
        buffers = self.buffers.clone()
        index = torch.zeros(1, dtype=torch.int64, device=buffers.device)
        self.recorder.begin(repeated=True)
        batch_index, weight = (
            table.index_select(0, index).squeeze(0) for table in (inputs.batch_index, inputs.weight)
        )
        active = self.active = (
            weight.any(-1, keepdim=True) if self.minibatches.active is not None else None
        )
        key = dispatch.fold_in(inputs.model_key, index)

        def gradient(theta: Tensor) -> Tensor:
            value, (loss, new) = self.minibatches.on_batch(batch_index, weight, key, theta, buffers)
            if new is not buffers:
                buffers.copy_(new if active is None else torch.where(active, new, buffers))
            self.loss_table.index_copy_(0, index, loss.unsqueeze(0))
            return value

        new = step(state, gradient)
        # A step may return an old value under another name, such as {"previous": state["theta"]}.
        # Copying the new "theta" first would overwrite it, so values that share memory with the old
        # state are cloned before anything is written.
        old_storages = {value.untyped_storage().data_ptr() for value in state.values()}
        for name, value in new.items():
            if value is not state[name] and value.untyped_storage().data_ptr() in old_storages:
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
    """The local training of one algorithm, captured for blocks of one shape.

    Args:
        inputs: the inputs of one such block. They are copied.
        most_steps: number of local steps of the largest client; blocks may have fewer.
        make_minibatches: makes the local steps from inputs.
        make_cast_copy: makes the copy of parameters [J, P] that matmuls read, or returns None.
        pool: memory pool shared with other captured trainings. Sharing is safe because they never
            run at the same time.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        inputs: BlockInputs,
        most_steps: int,
        make_minibatches: Callable[[BlockInputs], Minibatches],
        make_cast_copy: MakeCastCopy,
        pool: Any,
    ) -> None:
        # Graphs read their inputs from the addresses seen at capture time. `self.inputs` owns these
        # addresses; `load` copies the inputs of each block to them. The batch tables have room for
        # the largest client, so that blocks with any number of steps can use the same graphs.
        shape = (most_steps, *inputs.batch_index.shape[1:])
        self.inputs = BlockInputs(
            **{
                **{name: _clone(value) for name, value in inputs._asdict().items()},
                "batch_index": inputs.batch_index.new_zeros(shape),
                "weight": inputs.weight.new_zeros(shape),
            }
        )
        self.load(inputs)
        static = self.inputs
        self.recorder = GraphRecorder(pool)
        minibatches = make_minibatches(static)
        problem = CapturedProblem(
            minibatches,
            static.buffers,
            algorithm.optimizer,
            static.lr,
            static.sizes,
            static.counts,
            static.algorithm_key,
            static.shared_draw,
        )
        problem.recorder, problem.minibatches = self.recorder, minibatches
        problem.make_cast_copy = make_cast_copy
        self.loss_table = torch.zeros(shape[:2], dtype=static.lr.dtype, device=static.lr.device)
        problem.loss_table = self.loss_table
        try:
            self.recorder.begin(repeated=False)
            tuned = with_hyperparameters(algorithm, static.hyperparameters)
            self.uploads, self.memory = tuned.local_training(
                gather_sent(static), static.memory, problem
            )
            self.buffers = problem.buffers
        finally:
            self.recorder.end()

    def load(self, inputs: BlockInputs) -> None:
        """Copies the inputs of a block to the addresses that the graphs read."""
        for name, static in self.inputs._asdict().items():
            value = getattr(inputs, name)
            if name in ("batch_index", "weight"):
                static[: len(value)].copy_(value)
            elif isinstance(static, dict):
                for key, tensor in static.items():
                    tensor.copy_(value[key])
            else:
                static.copy_(value)

    def run(self, inputs: BlockInputs) -> BlockResult:
        """Trains a block.

        The next run overwrites the result, except for the client state: it is needed at the end of
        the round, after other blocks have run, and is therefore copied.
        """
        self.load(inputs)
        steps = len(inputs.batch_index)
        for graph, repeated in self.recorder.graphs:
            for _ in range(steps if repeated else 1):
                graph.replay()
        memory = {name: value.clone() for name, value in self.memory.items()}
        return BlockResult(self.uploads, memory, self.buffers, self.loss_table[:steps])


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: tensor.clone() for name, tensor in value.items()}
    return value.clone()
