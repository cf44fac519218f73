"""Trains a model of its own for each client, all clients at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..algorithms.fedavg import FedAvg
from ..core.algorithm import Algorithm
from ..core.parameters.shared import Shared
from ..core.problem import LocalProblem
from ..core.types import Plan
from ..core.visits.batches import LocalWork
from ..data.federated import FederatedData
from ..errors import DivergedError
from ..federation.resolve import resolve_engine
from ..flat_params import Tree, select_rows
from ..modeling.functional_model import FunctionalModel
from .settings import PersonalSettings

if TYPE_CHECKING:
    from ..federation.federation import Federation


@dataclass(frozen=True, kw_only=True)
class OwnTraining(FedAvg):
    """Local SGD whose result stays on the client, as its state.

    It is an algorithm, so that engines train it as any other: in blocks of many clients, with CUDA
    graphs, and in halved blocks after running out of memory.
    """

    # Which entries are trained; None for all. Not a field, because fields are hyperparameters.
    trained: ClassVar[Shared | None] = None

    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        start, statistics, trained = sent["theta"], problem.buffers, self.trained
        if trained is None:
            end = problem.descend(start)
        else:
            # Frozen entries have no gradient, so that the clipped norm is that of the others.
            end = problem.descend(start, lambda theta, gradient: gradient * trained.parameters)
            # Weight decay moves parameters without a gradient, too.
            end = torch.where(trained.parameters, end, start)
            if problem.buffers.shape[-1]:
                problem.buffers = torch.where(trained.buffers, problem.buffers, statistics)
        # Nothing is averaged. Engines need one value as an upload.
        return {"theta": start[..., :1]}, {"personal": end, "statistics": problem.buffers}

    @classmethod
    def of(
        cls, settings: PersonalSettings, trained_by: Algorithm, round: int, model: FunctionalModel
    ) -> OwnTraining:
        """The training that the settings describe.

        Args:
            trained_by: algorithm of the modes, for the learning rate after `round` rounds.
            round: number of rounds that the modes were trained.
        """
        lr = settings.lr
        if lr is None:
            lr = trained_by.learning_rate(max(round - 1, 0))
        algorithm = cls(lr=lr, optimizer=settings.optimizer)  # type: ignore[arg-type]
        if settings.head:
            trained = Shared.of(settings.head, model.theta_layout, model.buffer_layout, "head")
            object.__setattr__(algorithm, "trained", trained.to(model.device))
        return algorithm


def local_steps(settings: PersonalSettings, work: LocalWork, largest: int) -> LocalWork:
    """The local work that the settings describe.

    Args:
        work: of a visit.
        largest: number of rows of the largest client.
    """
    return LocalWork(
        steps=settings.steps,
        batch_size=min(settings.batch_size or work.batch_size, largest),
        last_batch=work.last_batch,
    )


def train_own_models(
    federation: Federation,
    data: FederatedData,
    settings: PersonalSettings,
    start: tuple[Tensor, Tensor, Tensor],
    visit: int,
) -> tuple[Tensor, Tensor]:
    """Parameters [N, P] and running statistics [N, R] of all clients after `settings.steps` steps.

    Args:
        data: of the clients; they train on their training rows.
        start: models [M, P], running statistics [M, R], and the model of each client, [N].
        visit: separates the random numbers of several trainings.
    """
    theta, buffers, row = start
    model = federation.model
    algorithm = OwnTraining.of(settings, federation.algorithm, federation.round, model)
    work = local_steps(settings, federation.work, int(data.size.max()))
    engine = resolve_engine(*federation._engine, model, data, work, federation.seed)
    plan = Plan(torch.arange(len(data)), row.cpu())
    result = engine.run_visits(algorithm, {"theta": theta}, buffers, plan, visit)
    if not bool(result.loss.isfinite().all()):
        client = int(torch.nonzero(~result.loss.isfinite())[0])
        raise DivergedError(
            f"personalize(): the model of client {client} diverged within {settings.steps} local "
            "steps. Lower lr, or clip the gradient, optimizer={'name': 'sgd', 'clip': 1.0}."
        )
    engine.commit()
    fresh = {"personal": theta, "statistics": buffers}
    state = engine.read_client_state(plan, select_rows(fresh, row.to(theta.device)))
    return state["personal"], state["statistics"]
