"""A federated method without an ensemble: a loop over clients, one nn.Module and autograd."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..core.algorithm import Algorithm
from ..core.problem import LocalProblem
from ..core.types import Cohort, GatheredUploads
from ..core.visits.batches import batch_table
from ..core.visits.visit_keys import shared_uniform, visit_key
from ..federation.federation import Federation
from ..flat_params import Tree


class AutogradSteps:
    """One client's local steps on a plain nn.Module with cross-entropy.

    Args:
        x, y: the client's examples.
        rows, weight: indices of the examples of every step, and their weights, [S, B].
    """

    active: Tensor | None = None  # all steps count: no other client takes more of them

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, rows: Tensor, weight: Tensor
    ) -> None:
        self.model, self.x, self.y, self.rows, self.weight = model, x, y, rows, weight
        self.count = len(rows)

    def gradient(
        self, step: int, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The gradient of the mean loss over the rows whose weight is not zero."""
        rows = self.rows[step][self.weight[step].bool()]
        vector_to_parameters(theta, self.model.parameters())
        loss = F.cross_entropy(self.model(self.x[rows]), self.y[rows])
        gradient = torch.autograd.grad(loss, list(self.model.parameters()))
        return parameters_to_vector(gradient), (loss.detach(), buffers)

    def row_losses(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each example under the one model, [1, n]."""
        vector_to_parameters(theta[0], self.model.parameters())
        with torch.no_grad():
            losses = F.cross_entropy(self.model(self.x), self.y, reduction="none")
        return losses.unsqueeze(0), torch.ones_like(losses)

    def weigh_rows(self, weight: Tensor) -> None:
        """Nothing: with one model, all rows belong to it."""


def without_ensemble(
    algorithm: Algorithm, federation: Federation, rounds: int
) -> tuple[Tree, Tree]:
    """Server state [P] and client state after some rounds; the federation itself is not changed."""
    algorithm = federation.algorithm
    data, work, seed = federation.data, federation.work, federation.seed
    model = federation.model.build(0)
    mode = {name: value[0].clone() for name, value in federation.state.modes.items()}
    memory: dict[int, Tree] = {}
    shares = data.size if algorithm.weighting == "examples" else torch.ones_like(data.size)
    for round in range(rounds):
        plan = federation.schedule.plan(federation.state.schedule, round)
        plan = federation.participation.limit_steps(plan, round, federation.costs)
        clients = plan.client.tolist()
        sent, shared_draw = algorithm.broadcast(mode), shared_uniform(seed, round, torch.tensor(0))
        sums: Tree = {}
        total, all_uploads = 0.0, []
        for j, client in enumerate(clients):
            x, y = data.client(client)
            visit = (seed, round, torch.tensor([client]), torch.tensor([0]))
            rows, weight = batch_table(
                visit_key("batches", *visit),
                data.size[client : client + 1],
                work,
                counts=None if plan.steps is None else plan.steps[j : j + 1],
            )
            steps = AutogradSteps(model, x, y, rows[:, 0], weight[:, 0])
            size, count = (
                data.size[client : client + 1].double(),
                torch.tensor([steps.count]).double(),
            )
            problem = LocalProblem(
                steps,
                torch.empty(0),
                algorithm.optimizer,
                algorithm.learning_rate(round),
                size,
                count,
                visit_key("algorithm", *visit)[0],
                shared_draw,
            )
            previous = memory.get(client, algorithm.init_client_state(sent["theta"]))
            uploads, memory[client] = algorithm.local_training(sent, previous, problem)
            share_of_client = float(shares[client])
            all_uploads.append(uploads)
            sums = {
                name: sums.get(name, 0) + share_of_client * value for name, value in uploads.items()
            }
            total += share_of_client
        sizes = (len(clients), total, total / float(shares.sum()))
        count, weights, share = (torch.tensor([value], dtype=torch.float64) for value in sizes)
        means = {name: value / total for name, value in sums.items()}
        lr = algorithm.learning_rate(round)
        cohort = Cohort(count, weights, share, len(data), shared_draw, round=round, lr=lr)
        if not (algorithm.gathers or algorithm.couples):
            mode = algorithm.server_update(mode, means, cohort)
            continue
        # Algorithms that gather uploads or couple modes get a leading dimension of one mode.
        members = _gathered(clients, all_uploads, shares) if algorithm.gathers else None
        mode_cohort = replace(
            cohort,
            count=count[None],
            weight=weights[None],
            share=share[None],
            shared_draw=shared_draw[None],
            members=members,
        )
        state, mean_uploads = (
            {name: value[None] for name, value in tree.items()} for tree in (mode, means)
        )
        updated = algorithm.server_update(state, mean_uploads, mode_cohort)
        coupled, _ = algorithm.couple(updated, federation.state.buffers[:1], mode_cohort)
        mode = {name: value[0] for name, value in coupled.items()}
    named = {
        f"{n} of client {c}, mode 0": row for c, tree in memory.items() for n, row in tree.items()
    }
    return mode, named


def _gathered(clients: list[int], uploads: list[Tree], shares: Tensor) -> GatheredUploads:
    """The uploads of the clients of one mode, stacked."""
    client, mode = torch.tensor(clients), torch.zeros(len(clients), dtype=torch.int64)
    stacked = {name: torch.stack([tree[name] for tree in uploads]) for name in uploads[0]}
    no_buffers = torch.empty(len(clients), 0).double()
    return GatheredUploads(client, mode, shares[client].double(), stacked, no_buffers)
