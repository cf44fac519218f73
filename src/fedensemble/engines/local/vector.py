"""All visits of a block at once: folded where the model allows it, by `vmap` otherwise, as CUDA
graphs on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...arguments import flag, positive, whole
from ...core.algorithm import Algorithm
from ...core.engine import engines
from ...data.federated import FederatedData
from ...errors import InputError
from ...flat_params import Tree
from ...modeling.functional_model import FunctionalModel, GradientFn
from ...runtime.num_threads import cores, num_threads
from ...runtime.oom import SMALLER_VISIT, out_of_memory, raise_on_oom
from ..stacked.equivalence import check_stackable, check_vmap, choose_examples
from ..stacked.gradient import stacked_gradient
from ..stacked.stacked_params import cast_copy
from .block import BlockResult, Inputs, Minibatches
from .block_size import visits_that_fit
from .captured_training import CapturedTraining
from .client_state import Placement
from .flops import operations
from .local_engine import LocalEngine
from .thread_pool import ThreadedTrainer

Precision = Literal["auto", "float32", "tf32", "bf16"]
_GRID = 65_535  # visits that one launch takes on a GPU
_HEAVY = 2_000_000_000  # operations of a trial's forward pass that are worth several threads
_NAME = "Engine 'vector'"
_MOST_SHAPES = 6  # captured at a time; each holds a copy of its inputs


@engines.register("vector")
class VectorEngine(LocalEngine):
    """Trains blocks of visits together, those with the same number of local steps side by side.

    Args:
        block: visits at once; None takes as many as the memory budget allows.
        memory: budget in GiB for a block; None takes 60 % of a GPU's memory (less the data), or 4
            GiB on a CPU.
        precision: of products on a GPU: "float32", "tf32" or "bf16", weights always in float32;
            "auto" is tf32.
        graphs: record local training as CUDA graphs; None does on a GPU.
        deterministic: only kernels whose sums always come in the same order, even if they are
            slower.
    """

    batched: ClassVar[bool] = True

    def __init__(
        self,
        *args: Any,
        block: int | None = None,
        memory: float | None = None,
        precision: Precision = "auto",
        graphs: bool | None = None,
        deterministic: bool = False,
        client_memory: Placement = "auto",
    ) -> None:
        block = block if block is None else whole(_NAME, "block", block, 1)
        memory = memory if memory is None else positive(_NAME, "memory", memory)
        graphs = graphs if graphs is None else flag(_NAME, "graphs", graphs)
        self.deterministic = flag(_NAME, "deterministic", deterministic)
        super().__init__(*args, client_memory=client_memory)
        cuda = self.learner.device.type == "cuda"
        self.precision = self._check_precision(precision, cuda)
        self.notes: list[str] = []
        each = operations(self)
        few = choose_examples(len(self.data.x), self.work.batch_size, each).to(self.data.x.device)
        inputs, targets = (
            self.data.inputs(self.data.x[few.flatten()], self.learner.dtype),
            self.data.y[few],
        )
        inputs = inputs.reshape(*few.shape, *inputs.shape[1:])
        targets = targets.to(self.learner.dtype) if targets.is_floating_point() else targets
        trial = raise_on_oom(
            "A trial of the model on a few examples does", self.learner.device, SMALLER_VISIT
        )
        with trial, num_threads(cores() if each * few.numel() > _HEAVY else 1):
            reason, self.fusions = check_stackable(self.learner, inputs, targets)
            if reason is not None:
                check_vmap(self.learner, inputs, targets, reason)
        self.stacked = reason is None
        if reason is not None:
            self.notes.append(
                f"The model cannot be batched layer by layer ({reason}); using vmap, which is slower."
            )
            if self.precision == "bf16":
                self.precision = "tf32"
                self.notes.append("Without batched layers there is no bf16; using tf32.")
        self.gradient = self.gradient_of(self.learner)
        self.threads = None if cuda else ThreadedTrainer(self)
        self.graphs = cuda if graphs is None else graphs and cuda
        if graphs and not cuda:
            self.notes.append(
                f"CUDA graphs need a GPU; on {self.learner.device} graphs=true does nothing."
            )
        self.block = min(block or visits_that_fit(self, memory), _GRID)
        self.blocks, self._chosen = [(0, self.block)], block is not None
        self.most_steps = int(self.work.count(self.host_sizes).max())
        self._captured: dict[Any, CapturedTraining] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None

    def use(self, data: FederatedData) -> None:
        super().use(data)
        self._captured.clear()  # graphs read from where the data were

    def gradient_of(self, learner: FunctionalModel) -> GradientFn:
        """The way of batching that was chosen, for a learner's module."""
        if not self.stacked:
            return learner.gradient_function(batched=True)
        return stacked_gradient(learner, self._compute, self.fusions)

    @property
    def _compute(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else self.learner.dtype

    def _copied(self, theta: Tensor) -> Tensor | None:
        return cast_copy(self.learner.theta_layout, theta, self._compute) if self.stacked else None

    def _check_precision(self, precision: str, cuda: bool) -> str:
        if precision not in ("auto", "float32", "tf32", "bf16"):
            raise InputError(
                f"precision is 'auto', 'float32', 'tf32' or 'bf16'; got {precision!r}."
            )
        if precision in ("tf32", "bf16") and (not cuda or self.learner.dtype != torch.float32):
            raise InputError(
                f"precision '{precision}' needs a CUDA device and dtype float32; leave it at 'auto'."
            )
        if precision == "bf16" and not torch.cuda.is_bf16_supported():
            raise InputError("This GPU has no bf16; use precision 'tf32' or 'float32'.")
        if self.learner.dtype == torch.float64:
            return "float64"
        return precision if precision != "auto" else "tf32" if cuda else "float32"

    def order(self, counts: Tensor) -> Tensor:
        return torch.argsort(counts, stable=True, descending=True)

    def train(self, algorithm: Algorithm, given: Inputs, ragged: bool) -> BlockResult:
        with self.settings():
            if self.graphs:
                return self._train_captured(algorithm, given, ragged)
            if self.threads is not None:
                return self.threads.train(self, algorithm, given, ragged)
            return self.train_plainly(algorithm, given, ragged)

    def shrink(self, tried: int, lacking: str, round: int = 0) -> None:
        self._captured.clear()
        super().shrink(tried, lacking, round)

    @property
    def _block_name(self) -> str:
        return f"blocks.{self.learner.device.type}"  # a size for a GPU says nothing of a CPU

    def numerics(self) -> Tree:
        """All block sizes so far: rows of rank, round and size. They decide in which order sums are
        taken.
        """
        return {self._block_name: torch.tensor([(0, *each) for each in self.blocks])}

    def keep_numerics(self, tensors: Tree) -> None:
        """Keeps the last size of the same kind of device, unless the user has chosen another one
        since.
        """
        rows = tensors.get(self._block_name)
        # of a job of several ranks, whose sums are others anyway
        if rows is None or int(rows[:, 0].max()) > 0:
            return
        blocks = [(int(round), int(size)) for _, round, size in rows.tolist()]
        if self._chosen and blocks[0][1] != self.blocks[0][1]:
            return
        self.blocks, self.block = blocks, blocks[-1][1]

    def _train_captured(self, algorithm: Algorithm, given: Inputs, ragged: bool) -> BlockResult:
        key = (algorithm, len(given.noise), ragged, tuple(given.hyper), len(given.sent["theta"]))
        # another run's clients may have more than ours
        self.most_steps = max(self.most_steps, len(given.place))
        if key in self._captured and len(self._captured[key].given.place) < len(given.place):
            self._captured.pop(key)
        if key not in self._captured:
            self._warm_up(algorithm, given, ragged)
            while len(self._captured) >= _MOST_SHAPES:
                self._captured.pop(next(iter(self._captured)))
            try:
                self._captured[key] = CapturedTraining(
                    algorithm,
                    given,
                    self.most_steps,
                    lambda static: self._minibatches(static, ragged),
                    self._copied,
                    self._pool,
                )
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                # what ended the recording, if ending it then failed, too
                behind = error.__context__
                if behind is not None and out_of_memory(behind):
                    raise behind from None
                self.graphs = False
                self.notes.append(f"CUDA graphs are off: {str(error).splitlines()[0]}")
                torch.cuda.synchronize()
                return self.train_plainly(algorithm, given, ragged)
        return self._captured[key].run(given)

    def _minibatches(self, given: Inputs, ragged: bool) -> Minibatches:
        return Minibatches(self.data, self.learner.dtype, self.gradient, given, ragged)

    def _warm_up(self, algorithm: Algorithm, given: Inputs, ragged: bool) -> None:
        """One local step on a stream of its own: libraries set themselves up, which no graph may
        record.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.train_plainly(
                algorithm, given._replace(place=given.place[:1], weight=given.weight[:1]), ragged
            )
        torch.cuda.current_stream().wait_stream(stream)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Precision and determinism, for local training only: sums over clients stay exact."""
        if self.learner.device.type != "cuda":
            yield
            return
        before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.deterministic)
        convolutions = torch.backends.cudnn.allow_tf32
        exact = self.precision in ("float32", "float64")
        torch.backends.cudnn.allow_tf32 = not exact
        algorithms = torch.are_deterministic_algorithms_enabled()
        torch.set_float32_matmul_precision("highest" if exact else "high")
        torch.backends.cudnn.deterministic = self.deterministic
        torch.use_deterministic_algorithms(self.deterministic or algorithms)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.deterministic = before[1]
            torch.backends.cudnn.allow_tf32 = convolutions
            torch.use_deterministic_algorithms(algorithms)
