"""What engines of one machine share: data, keys, weights, memory and sums; they differ in how visits are batched."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import draws
from ..core.aggregate import ModeMeans
from ..core.algorithm import Algorithm
from ..core.batches import LocalWork, batch_table
from ..core.engine import Engine
from ..core.keys import shared_coin, visit_key
from ..core.learner import GradientFn, Learner
from ..core.problem import LocalProblem
from ..core.types import Plan, Returned
from ..data.federated import FederatedData
from ..vectors import Tree, rows
from .memory import ClientMemory


class Trained(NamedTuple):
    """What a block of J visits gives."""

    uploads: Tree  # [J, P]
    memory: Tree  # [J, P]
    buffers: Tensor  # [J, R]
    loss: Tensor  # [J]
    first_bad_step: Tensor  # [J]


class Minibatches:
    """The local steps of a block: gathers each step's batch and asks the learner for gradients."""

    def __init__(
        self, data: FederatedData, dtype: torch.dtype, gradient: GradientFn, keys: Tensor, place: Tensor, weight: Tensor
    ) -> None:
        self.data, self.dtype, self._gradient, self.keys = data, dtype, gradient, keys
        self.place, self.weight = place, weight  # [S, ..., B]
        self.count = len(place)
        running = weight.any(-1, keepdim=True)
        self.active = None if bool(running.all()) else running

    def gradient(self, step: int, at: Tensor, buffers: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Minibatch gradient, loss and new buffers in a local step."""
        place = self.place[step]
        x = self.data.inputs(self.data.x[place.flatten()], self.dtype)
        x, y = x.reshape(*place.shape, *x.shape[1:]), self.data.y[place]
        y = y.to(self.dtype) if y.is_floating_point() else y
        return self._gradient(at, buffers, x, y, self.weight[step], draws.fold(self.keys, step))  # type: ignore[arg-type]


class Simulation(Engine):
    """Carries out plans on this machine.

    Args:
        learner: the model's structure and loss.
        data: all clients' examples.
        work: how much a client trains.
        seed: of the run.
    """

    batched: bool

    def __init__(self, learner: Learner, data: FederatedData, work: LocalWork, seed: int) -> None:
        self.learner, self.data, self.work, self.seed = learner, data.to(learner.device), work, seed
        self.sizes = data.size.to(learner.device)
        self.starts = data.start.to(learner.device)
        self.memory = ClientMemory()
        self.gradient = learner.gradient_function(self.batched)

    @abstractmethod
    def blocks(self, plan: Plan) -> Iterator[Tensor]:
        """Which visits are trained together, as indices into the plan."""

    def visit(self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int) -> Returned:
        device = self.learner.device
        plan = Plan(plan.client.to(device), plan.mode.to(device))
        means = ModeMeans(len(buffers))
        visits = len(plan.client)
        loss = torch.empty(visits, dtype=self.learner.dtype, device=device)
        bad_step = torch.empty(visits, dtype=torch.int64, device=device)
        upload_bytes = 0
        kept: list[tuple[Plan, Tree]] = []
        for block in self.blocks(plan):
            part = Plan(plan.client[block], plan.mode[block])
            trained = self.train(algorithm, rows(sent, part.mode), buffers[part.mode], part, round)
            kept.append((part, trained.memory))
            weight = self.sizes[part.client].to(self.learner.dtype)
            weight = torch.ones_like(weight) if algorithm.weighting == "uniform" else weight
            means.add(part.mode, weight, {**trained.uploads, _BUFFERS: trained.buffers - buffers[part.mode]})
            loss[block], bad_step[block] = trained.loss, trained.first_bad_step
            upload_bytes = algorithm.upload_bytes(trained.uploads)
        if bool(loss.isfinite().all()):  # a round that fails leaves no trace: state and memory stay those before it
            for part, memory in kept:
                self.memory.write(part, memory)
        uploads = means.mean()
        carried = buffers.shape[-1] * buffers.element_size()
        return Returned(
            uploads={name: value for name, value in uploads.items() if name != _BUFFERS},
            buffers=buffers + uploads[_BUFFERS],
            cohort=means.cohort(len(self.data), self.coin(round, torch.arange(len(buffers), device=device))),
            loss=loss,
            first_bad_step=bad_step,
            bytes_up=torch.full((visits,), upload_bytes + carried),
            bytes_down=torch.full((visits,), algorithm.download_bytes(sent) + carried),
        )

    def train(self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int) -> Trained:
        """Local training of a block of visits; without batching the block is one visit and has no leading dimension."""
        sizes = self.sizes[plan.client]
        batches, noise, own = (
            visit_key(purpose, self.seed, round, plan.client, plan.mode)
            for purpose in ("batches", "model", "algorithm")
        )
        place, weight = batch_table(batches, sizes, self.work)
        place = place + self.starts[plan.client].reshape(1, -1, 1)
        coin = self.coin(round, plan.mode)
        memory = self.memory.read(plan, algorithm.init_memory(sent["theta"]))
        counts = self.work.count(sizes)
        if not self.batched:
            place, weight, noise, own = place[:, 0], weight[:, 0], noise[0], own[0]
            coin = coin[0]
            sent, memory, buffers, sizes, counts = rows(sent, 0), rows(memory, 0), buffers[0], sizes[0], counts[0]
        steps = Minibatches(self.data, self.learner.dtype, self.gradient, noise, place, weight)
        problem = LocalProblem(
            steps, buffers, algorithm.optimizer, algorithm.rate(round),
            sizes.unsqueeze(-1), counts.unsqueeze(-1), own, coin,
        )  # fmt: skip
        uploads, memory = algorithm.local_training(sent, memory, problem)
        return self._collect(uploads, memory, problem, steps)

    def _collect(self, uploads: Tree, memory: Tree, problem: LocalProblem, steps: Minibatches) -> Trained:
        visits = len(steps.keys) if self.batched else 1
        uploads = {name: value.reshape(visits, -1) for name, value in uploads.items()}
        memory = {name: value.reshape(visits, -1) for name, value in memory.items()}
        order = sorted(problem.losses)
        losses = torch.stack([problem.losses[step] for step in order], dim=-1).reshape(visits, -1)
        active = steps.weight.any(-1)[order].reshape(len(order), visits).T
        loss = torch.where(active, losses, 0).sum(1) / active.sum(1)
        bad = active & ~torch.isfinite(losses)
        finite = torch.stack([value.isfinite().all(-1) for value in uploads.values()]).all(0)
        loss = torch.where(finite, loss, torch.nan)
        last = torch.where(finite, -1, active.sum(1) - 1)  # all losses were finite, but the last step's result is not
        first = torch.where(bad.any(1), bad.long().argmax(1), last)
        return Trained(uploads, memory, problem.buffers.reshape(visits, -1), loss, first)

    def coin(self, round: int, mode: Tensor) -> Tensor:
        """The number that server and clients of a mode share in a round, [..., 1]."""
        return shared_coin(self.seed, round, mode).to(self.learner.dtype)

    def memory_tensors(self) -> Tree:
        return self.memory.tensors()

    def load_memory(self, tensors: Tree) -> None:
        self.memory.load(tensors, self.learner.device)


# Changes of running statistics are averaged like an upload; changes, so that frozen parameters stay exactly the same.
_BUFFERS = "buffers"
