"""Tiny problems for the contract checks: float64, clients of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import prng
from ..core.algorithm import Algorithm
from ..core.probe import NoRows
from ..core.problem import LocalProblem
from ..core.visits.visit_keys import visit_key
from ..data.federated import FederatedData
from ..federation.federation import Federation
from ..schedules import Stratified

# With batches of 3, some last batches are full, some partial, and one client has less than a batch.
SIZES = (7, 3, 5, 1, 9, 4)
FEATURES, CLASSES, BATCH, SEED = 4, 3, 3, 5


def numbers(*shape: int, word: int = 0) -> Tensor:
    """Standard normal values, float64, the same on every machine."""
    return prng.normal(prng.key(SEED, "testing", word), torch.Size(shape).numel()).reshape(shape)


def labels(*shape: int, classes: int = CLASSES, word: int = 0) -> Tensor:
    """Uniform class labels or tokens, the same on every machine."""
    drawn = prng.uniform(prng.key(SEED, "testing labels", word), torch.Size(shape).numel())
    return (drawn * classes).long().reshape(shape)


def ragged(x: Tensor, y: Tensor, sizes: Sequence[int] = SIZES) -> FederatedData:
    """The federated data of clients with these sizes."""
    return FederatedData.from_arrays(x, y, list(sizes))


def classification() -> FederatedData:
    """Six clients with four features and three classes; the server has eight inputs."""
    server = numbers(8, FEATURES, word=3)
    return FederatedData.from_arrays(
        numbers(sum(SIZES), FEATURES), labels(sum(SIZES)), list(SIZES), x_server=server
    )


def small_model() -> nn.Module:
    """A network with a smooth loss: at a kink, rounding errors would be amplified."""
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def small_federation(
    algorithm: Algorithm, engine: str, modes: int, strata: int, **options: Any
) -> Federation:
    """A federation of the six clients, four per round, with two local epochs."""
    return Federation(
        small_model,
        classification(),
        algorithm,
        engine=engine,
        batch_size=BATCH,
        dtype=torch.float64,
        **{
            "schedule": Stratified(modes=modes, strata=strata, clients_per_round=4),
            "epochs": 2,
            "seed": SEED,
            **options,
        },
    )


def train(federation: Federation, rounds: int) -> Federation:
    """The same federation, trained for `rounds` more rounds."""
    for _ in federation.rounds(rounds):
        pass
    return federation


class Quadratics(NoRows):
    """Local steps on f(w) = 1/2 (w - center)' diag(curvature) (w - center), one f per visit.

    Args:
        curvature, center: [..., P].
        counts: local steps of each visit, [..., 1].
    """

    def __init__(self, curvature: Tensor, center: Tensor, counts: Tensor) -> None:
        self.curvature, self.center = curvature, center
        self.count = int(counts.max())
        running = torch.arange(self.count).reshape(-1, *(1,) * counts.dim()) < counts
        self.active = None if bool(running.all()) else running

    def gradient(
        self, step: int, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Exact gradient, loss and unchanged buffers."""
        distance = theta - self.center
        return self.curvature * distance, (0.5 * (self.curvature * distance**2).sum(-1), buffers)


def quadratic_problem(
    algorithm: Algorithm, visits: int, size: int, only: int | None = None
) -> LocalProblem:
    """The problem of J visits with 2, 3, 4, 2, ... local steps, or of one visit.

    Args:
        only: the index of a single visit; its problem has no leading dimension.
    """
    curvature, center = (
        0.5 + numbers(visits, size, word=1).abs().clamp(max=1.0),
        numbers(visits, size, word=2),
    )
    counts, sizes = (
        (2 + torch.arange(visits) % 3).unsqueeze(-1),
        (3 + torch.arange(visits)).unsqueeze(-1),
    )
    buffers = torch.empty(visits, 0, dtype=torch.float64)
    if only is not None:
        curvature, center, counts = curvature[only], center[only], counts[only]
        sizes, buffers = sizes[only], buffers[only]
    steps = Quadratics(curvature, center, counts)
    key = visit_key("algorithm", 0, 0, torch.arange(visits), torch.zeros(visits, dtype=torch.int64))
    shared_draw = torch.full((visits, 1), 0.3, dtype=torch.float64)  # as in check_arithmetic
    if only is not None:
        key, shared_draw = key[only], shared_draw[only]
    return LocalProblem(
        steps,
        buffers,
        algorithm.optimizer,
        algorithm.learning_rate(0),
        sizes,
        counts,
        key,
        shared_draw,
    )
