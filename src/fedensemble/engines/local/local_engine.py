"""The base class of the engines `loop` and `vector`: data, keys, client state and local training.

The two engines differ only in how visits are batched. `run_visits` cuts the visits of a round into
blocks; this class builds the inputs of a block and trains it.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.engine import Engine
from ...core.problem import LocalProblem
from ...core.round import Request
from ...core.secret import SecretSource
from ...core.types import Plan, RoundResult
from ...core.visits.batches import LocalWork
from ...core.visits.visit_keys import visit_key
from ...data.federated import FederatedData
from ...flat_params import Tree, select_rows
from ...modeling.functional_model import FunctionalModel
from ...runtime.oom import OOM_ERRORS, out_of_memory
from .batch_plans import make_batch_plans
from .block import (
    BatchPlan,
    BlockInputs,
    BlockResult,
    Minibatches,
    gather_sent,
    squeeze_single_visit,
    with_hyperparameters,
)
from .client_state import ClientMemory, Placement
from .device_cache import cached_on_device, to_device_async
from .divide_by_length import block_sizes
from .joint_minibatches import JointMinibatches
from .oom_retry import halve_block_size
from .run_visits import run_visits


class LocalEngine(Engine):
    """Executes plans in this process.

    Args:
        functional_model: the model's structure and loss.
        data: all clients' examples.
        work: how much a client trains.
        seed: of the run.
        client_memory: where client state is kept: "device", "host", "disk", or "auto", the first
            of these with enough free memory.
    """

    batched: ClassVar[bool]
    block: int = 1  # largest number of visits trained together
    # Time of a local step that does not grow with its visits, in units of visits, see
    # `divide_by_length.py`; None: blocks are as large as possible.
    step_overhead: float | None = None
    # Dataset of random numbers that only the client knows; None derives them from the seed.
    secret: SecretSource | None = None

    def __init__(
        self,
        model: FunctionalModel,
        data: FederatedData,
        work: LocalWork,
        seed: int,
        *,
        client_memory: Placement = "auto",
    ) -> None:
        self.model, self.work, self.seed = model, work, seed
        self.data = cached_on_device(data, model.device)
        self.host_sizes = data.size.cpu()  # on the CPU: reading them does not wait for the GPU
        self.starts = data.start.to(model.device)  # first row of each client in the data
        self._prefetched: tuple[int, Plan, BatchPlan] | None = None
        self.memory = ClientMemory(model.device, client_memory)
        # New client state of the last `run_visits`, which `commit` stores. A round that fails
        # before `commit` leaves the client state unchanged.
        self.pending_state: list[tuple[Plan, Tree]] = []
        self.gradient = model.gradient_function(self.batched)

    def use(self, data: FederatedData) -> None:
        """Switches to another copy of the same examples and drops the prefetched batch plan.

        The batch plan holds row numbers, which differ between copies.
        """
        self.data, self.starts = data, data.start.to(self.model.device)
        self._prefetched = None

    def count_steps(self, plan: Plan) -> Tensor:
        """Local steps of each visit of a plan, [J] on the CPU."""
        return self.work.count(self.host_sizes[plan.client]) if plan.steps is None else plan.steps

    @abstractmethod
    def order(self, counts: Tensor) -> Tensor:
        """The order in which to train visits with these numbers of local steps, as indices."""

    def block_sizes(self, counts: Tensor, modes: int = 1) -> list[int]:
        """The numbers of visits of successive blocks.

        Args:
            counts: local steps of the visits, in the order of `order`.
            modes: models per visit, more than one in joint visits.
        """
        return block_sizes(counts.tolist(), max(1, self.block // modes), self.step_overhead)

    def round_threads(self, visits: int) -> AbstractContextManager[None]:
        """Sets how many threads torch's operators use in a round of so many visits."""
        return nullcontext()

    def run_visits(
        self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int
    ) -> RoundResult:
        return run_visits([self], [Request(algorithm, sent, buffers, plan, round)])[0]

    def prepare(
        self,
        algorithm: Algorithm,
        sent: Tree,
        mode: Tensor,
        buffers: Tensor,
        plan: Plan,
        round: int,
    ) -> BlockInputs:
        """The inputs of a block of visits.

        Args:
            sent: the broadcast, [K, P].
            mode: row of `sent` that each visit gets, [J].
            buffers: of each visit, [J, R].
        """
        batch_plan = self.batch_plan(plan, round)
        lr = torch.full((len(plan.client), 1), algorithm.learning_rate(round), dtype=torch.float64)
        return BlockInputs(
            sent=sent,
            mode=mode,
            memory=self.memory.read(
                plan, select_rows(algorithm.init_client_state(sent["theta"]), mode)
            ),
            buffers=buffers,
            lr=to_device_async(lr.to(self.model.dtype), self.model.device),
            hyperparameters={},
            rows=self._first_rows(plan) if algorithm.joint else {},
            target_noise=self._target_noise(algorithm, plan),
            **batch_plan._asdict(),
        )

    def _first_rows(self, plan: Plan) -> Tree:
        """The first row of the data of each visit's client, [J]."""
        return {"first": self.starts[to_device_async(plan.client, self.model.device)]}

    def _target_noise(self, algorithm: Algorithm, plan: Plan) -> Tree:
        """What determines the noise of each visit's targets, [J]; empty for most algorithms."""
        if algorithm.target_spread == 0:
            return {}
        device, dtype = self.model.device, self.model.dtype
        # Round 0 in every round: the noise belongs to mode and client.
        key = visit_key("target noise", self.seed, 0, plan.client, plan.mode)
        scale = torch.full(key.shape, algorithm.target_spread, dtype=dtype)
        return {
            "key": to_device_async(key, device),
            "first": self.starts[to_device_async(plan.client, device)],
            "scale": to_device_async(scale, device),
        }

    # Prefetch. The batch plan of a block depends on seed, round and plan only, and making it takes
    # many small operations. While the GPU works through the kernels that were queued for a round,
    # the CPU would only wait for it. `prefetch` uses this time to make the batch plan of the next
    # round's first block and to copy it to the GPU. `batch_plan` then finds it ready, if round and
    # visits are the expected ones, and otherwise makes another.
    def prefetch(self, plan: Plan, round: int) -> None:
        """Makes the batch plan of the first block of a later round in advance."""
        if not len(plan.client):
            return
        counts = self.count_steps(plan)
        order = self.order(counts)
        part = plan.select(order[: self.block_sizes(counts[order])[0]])
        try:
            self.keep_batch_plan(part, round, self._make_batch_plan(part, round))
        except OOM_ERRORS as error:
            # The current round may still need the memory. The plan is then made when it is needed.
            if not out_of_memory(error):
                raise

    def batch_plan(self, plan: Plan, round: int) -> BatchPlan:
        """The batch plan of a block of visits: the prefetched one if it matches."""
        known = self.has_prefetched(plan, round)
        prefetched, self._prefetched = self._prefetched, None
        if known and prefetched is not None:
            return prefetched[2]
        return self._make_batch_plan(plan, round)

    def has_prefetched(self, plan: Plan, round: int) -> bool:
        """True if the prefetched batch plan is that of these visits."""
        if self._prefetched is None:
            return False
        known_round, known_plan, _ = self._prefetched
        known, wanted = known_plan.tensors(), plan.tensors()
        return (known_round, set(known)) == (round, set(wanted)) and all(
            torch.equal(value, wanted[name]) for name, value in known.items()
        )

    def keep_batch_plan(self, plan: Plan, round: int, batch_plan: BatchPlan) -> None:
        """Keeps a batch plan that was made elsewhere, as a prefetched one."""
        self._prefetched = (round, plan, batch_plan)

    def _make_batch_plan(self, plan: Plan, round: int) -> BatchPlan:
        return make_batch_plans([self], [plan], [round])[0]

    def train(self, algorithm: Algorithm, inputs: BlockInputs, ragged: bool) -> BlockResult:
        """Trains a block of visits; `ragged` if they have different numbers of local steps."""
        return self.train_eager(algorithm, inputs, ragged)

    def settings(self) -> AbstractContextManager[None]:
        """Sets torch's flags for local training, and restores them."""
        return nullcontext()

    def halve_block_size(self, tried: int, report: str, round: int = 0) -> None:
        """Halves the block size, after a block of `tried` visits ran out of memory."""
        halve_block_size(self, tried, report, round)

    def train_eager(self, algorithm: Algorithm, inputs: BlockInputs, ragged: bool) -> BlockResult:
        """Trains a block step by step, without CUDA graphs or threads.

        If the engine is not batched, the block is one visit, and the algorithm sees it without the
        leading dimension J.
        """
        visits = len(inputs.model_key)
        sent = gather_sent(inputs)
        if not self.batched:
            inputs, sent = squeeze_single_visit(inputs), select_rows(sent, 0)
        minibatches = self.make_minibatches(algorithm, inputs, ragged)
        problem = LocalProblem(
            minibatches,
            inputs.buffers,
            algorithm.optimizer,
            inputs.lr,
            inputs.sizes,
            inputs.counts,
            inputs.algorithm_key,
            inputs.shared_draw,
            self.secret,
        )
        tuned = with_hyperparameters(algorithm, inputs.hyperparameters)
        uploads, memory = tuned.local_training(sent, inputs.memory, problem)
        losses = torch.stack([problem.losses[step] for step in sorted(problem.losses)])
        return BlockResult(
            {name: value.reshape(visits, -1) for name, value in uploads.items()},
            {name: value.reshape(visits, -1) for name, value in memory.items()},
            problem.buffers.reshape(visits, -1),
            losses.reshape(-1, visits),
        )

    def make_minibatches(
        self, algorithm: Algorithm, inputs: BlockInputs, ragged: bool
    ) -> Minibatches:
        """The local steps of a block."""
        arguments = (self.data, self.model.dtype, self.gradient, inputs, ragged)
        if algorithm.joint:
            return JointMinibatches(*arguments, self.model)
        return Minibatches(*arguments)

    def commit(self) -> None:
        pending, self.pending_state = self.pending_state, []
        self.memory.write_all(pending)

    def read_client_state(self, plan: Plan, fresh: Tree) -> Tree:
        return self.memory.read(plan, fresh) if len(plan.client) else fresh

    def client_state_tensors(self) -> Tree:
        return self.memory.tensors()

    def load_client_state(self, tensors: Tree) -> None:
        self.pending_state = []
        self.memory.load(tensors)
