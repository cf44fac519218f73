"""What engines of one machine share: data, keys, weights, memory and sums; they differ in how visits are batched."""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from functools import cached_property
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import draws
from ..core.algorithm import Algorithm
from ..core.batches import LocalWork, batch_table
from ..core.engine import Engine
from ..core.keys import shared_coin, visit_key
from ..core.learner import GradientFn, Learner
from ..core.problem import LocalProblem
from ..core.round import Request
from ..core.types import Plan, Returned
from ..data.federated import FederatedData
from ..vectors import Tree, rows
from .memory import ClientMemory, Placement

_SMALL = 20_000  # examples of a block
_ON_DEVICE: WeakKeyDictionary[FederatedData, dict[str, FederatedData]] = WeakKeyDictionary()


class Inputs(NamedTuple):
    """What local training of a block of J visits needs; tensors only."""

    sent: Tree  # [J, P]
    memory: Tree  # [J, P]
    buffers: Tensor  # [J, R]
    place: Tensor  # [S, J, B] rows of the data in each local step
    weight: Tensor  # [S, J, B] which of them count
    noise: Tensor  # [J] keys of random layers
    own: Tensor  # [J] keys of the algorithm
    coin: Tensor  # [J, 1]
    sizes: Tensor  # [J, 1]
    counts: Tensor  # [J, 1] local steps
    lr: Tensor  # [J, 1]
    hyper: Tree  # hyper-parameters that differ between visits of different runs, [J, 1]


class Tables(NamedTuple):
    """What a block of J visits needs that no other round can change."""

    place: Tensor  # all as in `Inputs`
    weight: Tensor
    noise: Tensor
    own: Tensor
    coin: Tensor
    sizes: Tensor
    counts: Tensor


class Trained(NamedTuple):
    """What a block of J visits gives."""

    uploads: Tree  # [J, P]
    memory: Tree  # [J, P]
    buffers: Tensor  # [J, R]
    losses: Tensor  # [S, J]


class Minibatches:
    """The local steps of a block: gathers each step's batch and asks for gradients."""

    def __init__(
        self, data: FederatedData, dtype: torch.dtype, gradient: GradientFn, given: Inputs, ragged: bool
    ) -> None:
        self.data, self.dtype, self._gradient, self.given = data, dtype, gradient, given
        self.count = len(given.place)
        self.active = given.weight.any(-1, keepdim=True) if ragged else None

    def gradient(self, step: int, at: Tensor, buffers: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Minibatch gradient, loss and new buffers in a local step."""
        key = draws.fold(self.given.noise, step)
        return self.on_batch(self.given.place[step], self.given.weight[step], torch.as_tensor(key), at, buffers)

    def on_batch(
        self, place: Tensor, weight: Tensor, key: Tensor, at: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same on the examples in these places, [..., B]."""
        x = self.data.inputs(self.data.x[place.flatten()], self.dtype)
        x, y = x.reshape(*place.shape, *x.shape[1:]), self.data.y[place]
        y = y.to(self.dtype) if y.is_floating_point() else y
        return self._gradient(at, buffers, x, y, weight, key)


class Simulation(Engine):
    """Carries out plans on this machine.

    Args:
        learner: the model's structure and loss.
        data: all clients' examples.
        work: how much a client trains.
        seed: of the run.
        client_memory: where clients' memory lies: "device", "host", "disk", or "auto", the first that has room.
    """

    batched: ClassVar[bool]
    block: int = 1  # visits trained together

    def __init__(
        self, learner: Learner, data: FederatedData, work: LocalWork, seed: int, *, client_memory: Placement = "auto"
    ) -> None:
        self.learner, self.data, self.work, self.seed = learner, _moved(data, learner.device), work, seed
        self.host_sizes = data.size.cpu()
        self.starts = data.start.to(learner.device)
        self._foreseen: tuple[int, Plan, Tables] | None = None
        self.memory = ClientMemory(learner.device, client_memory)
        self.gradient = learner.gradient_function(self.batched)

    def use(self, data: FederatedData) -> None:
        """Takes the same examples from where they lie now; what was prepared for the old place is forgotten."""
        self.data, self.starts = data, data.start.to(self.learner.device)
        self._foreseen = None

    @abstractmethod
    def order(self, counts: Tensor) -> Tensor:
        """The order in which visits with so many local steps are trained, as indices."""

    def visit(self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int) -> Returned:
        from .together import visit_together

        return visit_together([self], [Request(algorithm, sent, buffers, plan, round)])[0]

    def prepare(self, algorithm: Algorithm, sent: Tree, buffers: Tensor, plan: Plan, round: int) -> Inputs:
        """Everything a block of visits needs for local training."""
        tables = self.tables(plan, round)
        rate = torch.full((len(plan.client), 1), algorithm.rate(round), dtype=torch.float64).to(self.learner.dtype)
        return Inputs(
            sent=sent,
            memory=self.memory.read(plan, algorithm.init_memory(sent["theta"])),
            buffers=buffers,
            place=tables.place,
            weight=tables.weight,
            noise=tables.noise,
            own=tables.own,
            coin=tables.coin,
            sizes=tables.sizes,
            counts=tables.counts,
            lr=onto(rate, self.learner.device),
            hyper={},
        )

    def foresee(self, plan: Plan, round: int) -> None:
        """Makes the tables of a round's first block while a GPU is busy with the round before."""
        if len(plan.client):
            first = self.order(self.work.count(self.host_sizes[plan.client]))[: self.block]
            part = Plan(plan.client[first], plan.mode[first])
            self._foreseen = (round, part, self._tables(part, round))

    def tables(self, plan: Plan, round: int) -> Tables:
        """What a block of visits needs beside weights and memory."""
        known, self._foreseen = self._foreseen, None
        if known is not None and known[0] == round and all(map(torch.equal, known[1], plan)):
            return known[2]
        return self._tables(plan, round)

    def _tables(self, plan: Plan, round: int) -> Tables:
        host, device, dtype = self.host_sizes[plan.client], self.learner.device, self.learner.dtype
        # Keys, and tables while they are small, are made on the CPU: there, so many tiny operations cost less.
        batches, noise, own = (
            visit_key(purpose, self.seed, round, plan.client, plan.mode)
            for purpose in ("batches", "model", "algorithm")
        )
        small = len(host) * int(host.max()) <= _SMALL
        place, weight = batch_table(batches, host, self.work) if small else batch_table(
            onto(batches, device), onto(host, device), self.work, host
        )  # fmt: skip
        starts = self.starts[onto(plan.client, device)]
        return Tables(
            place=onto(place, device) + starts.reshape(1, -1, 1),
            weight=onto(weight, device),
            noise=onto(noise, device),
            own=onto(own, device),
            coin=onto(shared_coin(self.seed, round, plan.mode).to(dtype), device),
            sizes=onto(host.unsqueeze(-1).to(dtype), device),
            counts=onto(self.work.count(host).unsqueeze(-1).to(dtype), device),
        )

    def train(self, algorithm: Algorithm, given: Inputs, ragged: bool) -> Trained | None:
        """Local training of a block of visits; None if it did not fit into memory and blocks are smaller now."""
        return self.train_plainly(algorithm, given, ragged)

    def train_plainly(self, algorithm: Algorithm, given: Inputs, ragged: bool) -> Trained:
        """Local training step by step; without batching the block is one visit and has no leading dimension."""
        visits = len(given.noise)
        if not self.batched:
            given = _single(given)
        steps = Minibatches(self.data, self.learner.dtype, self.gradient, given, ragged)
        problem = LocalProblem(
            steps, given.buffers, algorithm.optimizer, given.lr, given.sizes, given.counts, given.own, given.coin
        )
        uploads, memory = tuned(algorithm, given.hyper).local_training(given.sent, given.memory, problem)
        losses = torch.stack([problem.losses[step] for step in sorted(problem.losses)]).reshape(-1, visits)
        return Trained(
            {name: value.reshape(visits, -1) for name, value in uploads.items()},
            {name: value.reshape(visits, -1) for name, value in memory.items()},
            problem.buffers.reshape(visits, -1),
            losses,
        )

    def memory_tensors(self) -> Tree:
        return self.memory.tensors()

    def load_memory(self, tensors: Tree) -> None:
        self.memory.load(tensors)


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, without waiting for what that is doing."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def tuned(algorithm: Algorithm, hyper: Tree) -> Algorithm:
    """The algorithm with a tensor [..., 1] in place of some of its numbers: visits of different runs side by side."""
    if not hyper:
        return algorithm
    other = copy(algorithm)
    for name in [name for name in vars(other) if isinstance(getattr(type(other), name, None), cached_property)]:
        del other.__dict__[name]  # it may have been made from one run's numbers
    for name, value in hyper.items():
        object.__setattr__(other, name, value)
    return other


def judge(trained: Trained, given: Inputs) -> tuple[Tensor, Tensor]:
    """Mean loss of each visit, nan if its upload is not finite, and its first bad step or -1; [J] each."""
    active = given.weight[: len(trained.losses)].any(-1)  # [S, J]
    loss = torch.where(active, trained.losses, 0).sum(0) / active.sum(0)
    bad = active & ~torch.isfinite(trained.losses)
    # One pass over the uploads: a sum is finite only if all of it is (or, at 1e38, is as good as diverged).
    finite = torch.stack([value.sum(-1).isfinite() for value in trained.uploads.values()]).all(0)
    last = torch.where(finite, -1, active.sum(0) - 1)  # all losses were finite, but the last step's result is not
    return torch.where(finite, loss, torch.nan), torch.where(bad.any(0), bad.long().argmax(0), last)


def _moved(data: FederatedData, device: torch.device) -> FederatedData:
    """The data on a device, once for all engines that use them."""
    kept = _ON_DEVICE.setdefault(data, {})
    if str(device) not in kept:
        moved = data.to(device)
        if moved.x is data.x:
            return data
        kept[str(device)] = moved
    return kept[str(device)]


def _single(given: Inputs) -> Inputs:
    """A block of one visit without its leading dimension."""
    values = given._asdict()
    for name in ("sent", "memory", "hyper"):
        values[name] = rows(values[name], 0)
    for name in ("buffers", "noise", "own", "coin", "sizes", "counts", "lr"):
        values[name] = values[name][0]
    return Inputs(**{**values, "place": given.place[:, 0], "weight": given.weight[:, 0]})
