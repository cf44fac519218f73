"""What engines of one machine share: data, keys, weights, memory and sums; they differ in how
visits are batched.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.batches import LocalWork, batch_table
from ...core.engine import Engine
from ...core.keys import shared_uniform, visit_key
from ...core.problem import LocalProblem
from ...core.round import Request
from ...core.secret import SecretSource
from ...core.types import Plan, RoundResult
from ...data.federated import FederatedData
from ...flat_params import Tree, rows
from ...modeling.functional_model import FunctionalModel
from ...runtime.oom import OOM_ERRORS, SMALLER_VISIT, oom_error, out_of_memory
from .block import BlockResult, Inputs, Minibatches, Tables, received, single, tuned
from .client_state import ClientMemory, Placement
from .device_cache import moved, to_device_async
from .run_visits import run_visits

_SMALL = 20_000  # examples of a block


class LocalEngine(Engine):
    """Carries out plans on this machine.

    Args:
        learner: the model's structure and loss.
        data: all clients' examples.
        work: how much a client trains.
        seed: of the run.
        client_memory: where clients' memory lies: "device", "host", "disk", or "auto", the first
            that has room.
    """

    batched: ClassVar[bool]
    block: int = 1  # visits trained together
    # of numbers that only a client knows; a simulation makes them from the seed
    secret: SecretSource | None = None

    def __init__(
        self,
        learner: FunctionalModel,
        data: FederatedData,
        work: LocalWork,
        seed: int,
        *,
        client_memory: Placement = "auto",
    ) -> None:
        self.learner, self.data, self.work, self.seed = (
            learner,
            moved(data, learner.device),
            work,
            seed,
        )
        self.host_sizes = data.size.cpu()
        self.starts = data.start.to(learner.device)
        self._foreseen: tuple[int, Plan, Tables] | None = None
        self.memory = ClientMemory(learner.device, client_memory)
        self.waiting: list[tuple[Plan, Tree]] = []  # what clients of the last visit are to remember
        self.gradient = learner.gradient_function(self.batched)

    def use(self, data: FederatedData) -> None:
        """Takes the same examples from where they lie now; what was prepared for the old place is
        forgotten.
        """
        self.data, self.starts = data, data.start.to(self.learner.device)
        self._foreseen = None

    @abstractmethod
    def order(self, counts: Tensor) -> Tensor:
        """The order in which visits with so many local steps are trained, as indices."""

    def visit(
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
    ) -> Inputs:
        """Everything a block of visits needs for local training; visits are sent the rows
        `mode`.
        """
        tables = self.tables(plan, round)
        rate = torch.full((len(plan.client), 1), algorithm.rate(round), dtype=torch.float64).to(
            self.learner.dtype
        )
        return Inputs(
            sent=sent,
            mode=mode,
            memory=self.memory.read(plan, rows(algorithm.init_memory(sent["theta"]), mode)),
            buffers=buffers,
            place=tables.place,
            weight=tables.weight,
            noise=tables.noise,
            own=tables.own,
            coin=tables.coin,
            sizes=tables.sizes,
            counts=tables.counts,
            lr=to_device_async(rate, self.learner.device),
            hyper={},
        )

    def foresee(self, plan: Plan, round: int) -> None:
        """Makes the tables of a round's first block while a GPU is busy with the round before."""
        if not len(plan.client):
            return
        first = self.order(self.work.count(self.host_sizes[plan.client]))[: self.block]
        part = Plan(plan.client[first], plan.mode[first])
        try:
            self._foreseen = (round, part, self._tables(part, round))
        except OOM_ERRORS as error:
            if not out_of_memory(error):  # then they are made when their round comes
                raise

    def tables(self, plan: Plan, round: int) -> Tables:
        """What a block of visits needs beside weights and memory."""
        known, self._foreseen = self._foreseen, None
        if known is not None and known[0] == round and all(map(torch.equal, known[1], plan)):
            return known[2]
        return self._tables(plan, round)

    def _tables(self, plan: Plan, round: int) -> Tables:
        host, device, dtype = self.host_sizes[plan.client], self.learner.device, self.learner.dtype
        # Keys, and tables while they are small, are made on the CPU: there, so many tiny operations
        # cost less.
        batches, noise, own = (
            visit_key(purpose, self.seed, round, plan.client, plan.mode)
            for purpose in ("batches", "model", "algorithm")
        )
        small = len(host) * int(host.max()) <= _SMALL
        place, weight = (
            batch_table(batches, host, self.work)
            if small
            else batch_table(
                to_device_async(batches, device), to_device_async(host, device), self.work, host
            )
        )
        starts = self.starts[to_device_async(plan.client, device)]
        return Tables(
            place=to_device_async(place, device) + starts.reshape(1, -1, 1),
            weight=to_device_async(weight, device),
            noise=to_device_async(noise, device),
            own=to_device_async(own, device),
            coin=to_device_async(shared_uniform(self.seed, round, plan.mode).to(dtype), device),
            sizes=to_device_async(host.unsqueeze(-1).to(dtype), device),
            counts=to_device_async(self.work.count(host).unsqueeze(-1).to(dtype), device),
        )

    def train(self, algorithm: Algorithm, given: Inputs, ragged: bool) -> BlockResult:
        """Local training of a block of visits."""
        return self.train_plainly(algorithm, given, ragged)

    def shrink(self, tried: int, lacking: str, round: int = 0) -> None:
        """Smaller blocks from this round on, because one of `tried` visits did not fit into memory.

        It is recorded, and the notes say so: sums in another order change the last bits of results.
        Raises if blocks cannot be smaller.
        """
        if self.block == 1:
            raise oom_error("One visit does", self.learner.device, lacking, SMALLER_VISIT)
        self.block = max(1, tried // 2)
        self.blocks = [*self.blocks, (round, self.block)]
        torch.cuda.empty_cache()
        self.notes = [
            *self.notes,
            (
                f"Out of memory in round {round + 1}{lacking}: from there on {self.block} visits are trained at once "
                f"instead of {tried}, which changes the last digits of results. To repeat them, set engine.options.block."
            ),
        ]

    def train_plainly(self, algorithm: Algorithm, given: Inputs, ragged: bool) -> BlockResult:
        """Local training step by step; without batching the block is one visit and has no leading
        dimension.
        """
        visits = len(given.noise)
        sent = received(given)
        if not self.batched:
            given, sent = single(given), rows(sent, 0)
        steps = Minibatches(self.data, self.learner.dtype, self.gradient, given, ragged)
        problem = LocalProblem(
            steps,
            given.buffers,
            algorithm.optimizer,
            given.lr,
            given.sizes,
            given.counts,
            given.own,
            given.coin,
            self.secret,
        )
        uploads, memory = tuned(algorithm, given.hyper).local_training(sent, given.memory, problem)
        losses = torch.stack([problem.losses[step] for step in sorted(problem.losses)]).reshape(
            -1, visits
        )
        return BlockResult(
            {name: value.reshape(visits, -1) for name, value in uploads.items()},
            {name: value.reshape(visits, -1) for name, value in memory.items()},
            problem.buffers.reshape(visits, -1),
            losses,
        )

    def commit(self) -> None:
        waiting, self.waiting = self.waiting, []
        self.memory.write_all(waiting)

    def read_memory(self, plan: Plan, fresh: Tree) -> Tree:
        return self.memory.read(plan, fresh) if len(plan.client) else fresh

    def memory_tensors(self) -> Tree:
        return self.memory.tensors()

    def load_memory(self, tensors: Tree) -> None:
        self.waiting = []
        self.memory.load(tensors)
