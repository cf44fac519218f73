"""Engine `vector`: trains all visits of a block at once.

Layers run on stacked models where the model allows it (see `engines/stacked`), otherwise by `vmap`.
On a GPU local training is captured as CUDA graphs; on a CPU parts of a block run in threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...arguments import require_bool, require_integer, require_positive
from ...core.algorithm import Algorithm
from ...core.engine import engines
from ...data.federated import FederatedData
from ...errors import InputError
from ...flat_params import Tree
from ...modeling.functional_model import FunctionalModel, GradientFn
from ...runtime.num_threads import available_threads, num_threads
from ...runtime.oom import advise_smaller_visit, out_of_memory, raise_on_oom
from ..stacked.equivalence import check_stackable, check_vmap, choose_examples
from ..stacked.gradient import stacked_gradient
from ..stacked.stacked_params import cast_copy
from .block import BlockInputs, BlockResult, Minibatches
from .block_size import max_block_size
from .client_state import Placement
from .cuda_graph_training import CapturedTraining
from .divide_by_length import step_overhead
from .flops import count_flops
from .local_engine import LocalEngine
from .thread_pool import ThreadedTrainer

Precision = Literal["auto", "float32", "tf32", "bf16"]
_MAX_GRID = 65_535  # visits per block: the largest grid dimension of a CUDA kernel launch
_HEAVY = 2_000_000_000  # FLOPs of the check's forward pass from which several threads pay off
_NAME = "Engine 'vector'"
# Captured trainings that are kept at a time. Each holds a copy of its inputs, and the last blocks
# of rounds can have many different sizes.
_MAX_CAPTURED = 6


@engines.register("vector")
class VectorEngine(LocalEngine):
    """Trains many visits at once, in blocks of visits with similar numbers of local steps.

    Args:
        block: number of visits per block; None takes as many as fit into the memory budget.
        memory: memory budget of a block in GiB; None takes 60 % of a GPU's memory (minus the data),
            or 4 GiB on a CPU.
        precision: of matmuls on a GPU: "float32", "tf32" or "bf16"; parameters are always float32.
            "auto" is tf32.
        graphs: capture local training as CUDA graphs; None does so on a GPU.
        deterministic: use only kernels that take sums in the same order every time, even if they
            are slower.
        divide: on a GPU, divide rounds of clients of unequal size into blocks of visits of similar
            length where that should save time, see `divide_by_length.py`. Not measured yet.
    """

    batched: ClassVar[bool] = True
    # of one visit, in addition to its parameters; None if the block size was given
    activation_bytes: int | None = None

    def __init__(
        self,
        *args: Any,
        block: int | None = None,
        memory: float | None = None,
        precision: Precision = "auto",
        graphs: bool | None = None,
        deterministic: bool = False,
        divide: bool = False,
        client_memory: Placement = "auto",
    ) -> None:
        block = block if block is None else require_integer(_NAME, "block", block, 1)
        memory = memory if memory is None else require_positive(_NAME, "memory", memory)
        graphs = graphs if graphs is None else require_bool(_NAME, "graphs", graphs)
        self.deterministic = require_bool(_NAME, "deterministic", deterministic)
        divide = require_bool(_NAME, "divide", divide)
        super().__init__(*args, client_memory=client_memory)
        cuda = self.model.device.type == "cuda"
        self.precision = self._check_precision(precision, cuda)
        self.notes: list[str] = []
        # Check on a few examples whether stacked layers give the gradients of single models. The
        # check costs a few forward and backward passes; see `engines/stacked/equivalence.py`.
        flops = count_flops(self)
        index = choose_examples(len(self.data.x), self.work.batch_size, flops)
        index = index.to(self.data.x.device)
        x = self.data.inputs(self.data.x[index.flatten()], self.model.dtype)
        x, y = x.reshape(*index.shape, *x.shape[1:]), self.data.y[index]
        y = y.to(self.model.dtype) if y.is_floating_point() else y
        explain_oom = raise_on_oom(
            "A check of the model on a few examples does", self.model.device, advise_smaller_visit()
        )
        with explain_oom, num_threads(available_threads() if flops * index.numel() > _HEAVY else 1):
            reason, self.fusions, self.direct_calls = check_stackable(self.model, x, y)
            if reason is not None:
                check_vmap(self.model, x, y, reason)
        self.stacked = reason is None
        if reason is not None:
            self.notes.append(
                f"The model cannot be batched layer by layer ({reason}); using vmap, which is "
                "slower."
            )
            if self.precision == "bf16":
                self.precision = "tf32"
                self.notes.append("Without batched layers there is no bf16; using tf32.")
        self.gradient = self.gradient_of(self.model)
        self.threads = None if cuda else ThreadedTrainer(flops * self.work.batch_size)
        if cuda and divide:
            # On a CPU, `ThreadedTrainer` divides blocks into parts of similar visits in any case.
            length = x.shape[-2] if x.dim() > 3 else x.shape[-1]
            batch = flops * self.work.batch_size
            self.step_overhead = step_overhead(self.model.eval_model, length, batch)
        self.graphs = cuda if graphs is None else graphs and cuda
        if graphs and not cuda:
            self.notes.append(
                f"CUDA graphs need a GPU; on {self.model.device} graphs=true does nothing."
            )
        self.block = min(block or max_block_size(self, memory), _MAX_GRID)
        self.blocks, self._block_given = [(0, self.block)], block is not None
        self.most_steps = int(self.work.count(self.host_sizes).max())  # of the largest client
        self._captured: dict[Any, CapturedTraining] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.graphs else None

    def use(self, data: FederatedData) -> None:
        super().use(data)
        self._captured.clear()  # graphs read the data at their old addresses

    def gradient_of(self, model: FunctionalModel) -> GradientFn:
        """The batched gradient function of a model: stacked layers or `vmap`, as was chosen."""
        if not self.stacked:
            return model.gradient_function(batched=True)
        return stacked_gradient(model, self._matmul_dtype, self.fusions, calls=self.direct_calls)

    @property
    def _matmul_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else self.model.dtype

    def _make_cast_copy(self, theta: Tensor) -> Tensor | None:
        """The copy of parameters [J, P] that matmuls read, or None if they read `theta` itself."""
        if not self.stacked:
            return None
        return cast_copy(self.model.theta_layout, theta, self._matmul_dtype)

    def _check_precision(self, precision: str, cuda: bool) -> str:
        if precision not in ("auto", "float32", "tf32", "bf16"):
            raise InputError(
                f"precision is 'auto', 'float32', 'tf32' or 'bf16'; got {precision!r}."
            )
        if precision in ("tf32", "bf16") and (not cuda or self.model.dtype != torch.float32):
            raise InputError(
                f"precision '{precision}' needs a CUDA device and dtype float32; "
                "leave it at 'auto'."
            )
        if precision == "bf16" and not torch.cuda.is_bf16_supported():
            raise InputError("This GPU has no bf16; use precision 'tf32' or 'float32'.")
        if self.model.dtype == torch.float64:
            return "float64"
        return precision if precision != "auto" else "tf32" if cuda else "float32"

    def order(self, counts: Tensor) -> Tensor:
        # Visits with similar numbers of steps share a block: a block takes as many steps as its
        # longest visit, and the others compute gradients of padding until then.
        return torch.argsort(counts, stable=True, descending=True)

    def round_threads(self, visits: int) -> AbstractContextManager[None]:
        if self.threads is None:
            return nullcontext()
        return num_threads(self.threads.inside(min(visits, self.block)))

    def train(self, algorithm: Algorithm, inputs: BlockInputs, ragged: bool) -> BlockResult:
        with self.settings():
            # Joint visits evaluate all rows of a client, in a loop over clients of different sizes,
            # which cannot be captured.
            if self.graphs and not algorithm.joint:
                return self._train_captured(algorithm, inputs, ragged)
            if self.threads is not None:
                return self.threads.train(self, algorithm, inputs, ragged)
            return self.train_eager(algorithm, inputs, ragged)

    def halve_block_size(self, tried: int, report: str, round: int = 0) -> None:
        self._captured.clear()  # graphs hold memory, and their blocks are too large now
        super().halve_block_size(tried, report, round)

    # The history of block sizes. A block size decides in which order sums are taken, and so the
    # last bits of results. It can differ between two starts of the same run, because it follows
    # from the memory of the device, and it can change within a run, after running out of memory.
    # A resumed run must use the size that it would have without the interruption; otherwise it
    # would not repeat the uninterrupted run bit for bit. So checkpoints store the history.

    @property
    def _block_name(self) -> str:
        # by device type: the block size of a GPU is of no use on a CPU
        return f"blocks.{self.model.device.type}"

    def numerics(self) -> Tree:
        """The history of block sizes, as rows of (rank, round, size)."""
        return {self._block_name: torch.tensor([(0, *change) for change in self.blocks])}

    def load_numerics(self, tensors: Tree) -> None:
        """Restores the history of block sizes from a checkpoint.

        Ignores it if it is of another type of device, or if the user has set another block size
        since, or if the run had several ranks: sums over ranks differ anyway.
        """
        rows = tensors.get(self._block_name)
        if rows is None or int(rows[:, 0].max()) > 0:
            return
        blocks = [(int(round), int(size)) for _, round, size in rows.tolist()]
        if self._block_given and blocks[0][1] != self.blocks[0][1]:
            return
        self.blocks, self.block = blocks, blocks[-1][1]

    def _train_captured(
        self, algorithm: Algorithm, inputs: BlockInputs, ragged: bool
    ) -> BlockResult:
        """Trains a block by replaying CUDA graphs, which are captured once per block shape."""
        steps = len(inputs.batch_index)
        key = (
            algorithm,
            len(inputs.model_key),
            ragged,
            tuple(inputs.hyperparameters),
            len(inputs.sent["theta"]),
        )
        # Clients of other runs, trained together with this one, may be larger than any of its own.
        self.most_steps = max(self.most_steps, steps)
        if key in self._captured and len(self._captured[key].inputs.batch_index) < steps:
            self._captured.pop(key)
        if key not in self._captured:
            self._warm_up(algorithm, inputs, ragged)
            while len(self._captured) >= _MAX_CAPTURED:
                self._captured.pop(next(iter(self._captured)))  # the oldest
            try:
                self._captured[key] = CapturedTraining(
                    algorithm,
                    inputs,
                    self.most_steps,
                    lambda static: self._make_minibatches(static, ragged),
                    self._make_cast_copy,
                    self._pool,
                )
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                # If the capture runs out of memory, ending it raises a second error that hides the
                # first. The first is needed, because running out of memory is handled by the caller
                # and says nothing about the model.
                cause = error.__context__
                if cause is not None and out_of_memory(cause):
                    raise cause from None
                # The algorithm or the model does something that cannot be captured, such as
                # reading a value from the GPU. Train without graphs from here on.
                self.graphs = False
                self.notes.append(f"CUDA graphs are off: {str(error).splitlines()[0]}")
                torch.cuda.synchronize()
                return self.train_eager(algorithm, inputs, ragged)
        return self._captured[key].run(inputs)

    def _make_minibatches(self, inputs: BlockInputs, ragged: bool) -> Minibatches:
        return Minibatches(self.data, self.model.dtype, self.gradient, inputs, ragged)

    def _warm_up(self, algorithm: Algorithm, inputs: BlockInputs, ragged: bool) -> None:
        """Trains one local step without a graph, before a capture.

        In their first call, libraries such as cuBLAS allocate workspaces and Triton compiles
        kernels, which must not happen during a capture. It runs on a side stream, as torch's
        documentation of CUDA graphs recommends.
        """
        first_step = inputs._replace(batch_index=inputs.batch_index[:1], weight=inputs.weight[:1])
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.train_eager(algorithm, first_step, ragged)
        torch.cuda.current_stream().wait_stream(stream)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Sets torch's precision and determinism flags for local training, and restores them.

        Aggregation runs outside, because sums over clients are taken in full precision.
        """
        if self.model.device.type != "cuda":
            yield
            return
        matmul_precision = torch.get_float32_matmul_precision()
        cudnn_deterministic = torch.backends.cudnn.deterministic
        cudnn_tf32 = torch.backends.cudnn.allow_tf32
        deterministic = torch.are_deterministic_algorithms_enabled()
        exact = self.precision in ("float32", "float64")
        torch.backends.cudnn.allow_tf32 = not exact
        torch.set_float32_matmul_precision("highest" if exact else "high")
        # Frozen convolutions are cuDNN's, and some of its algorithms add up in any order. All other
        # layers are run by kernels that do not.
        torch.backends.cudnn.deterministic = self.deterministic or bool(self.model.frozen)
        torch.use_deterministic_algorithms(self.deterministic or deterministic)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matmul_precision)
            torch.backends.cudnn.deterministic = cudnn_deterministic
            torch.backends.cudnn.allow_tf32 = cudnn_tf32
            torch.use_deterministic_algorithms(deterministic)
