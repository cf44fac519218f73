"""K models trained independently: the deep-ensemble baseline, at 1x and K x communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .. import prng
from ..core.sampling import sample_without_replacement
from ..core.schedule import Schedule, schedules
from ..core.types import Plan
from ..flat_params import Tree


@schedules.register("independent")
@dataclass(frozen=True, kw_only=True)
class Independent(Schedule):
    """K independent federated runs that take turns, at the communication cost of one run.

    In round r all M clients, drawn from all N, train mode r mod K. After R rounds each model has
    been trained for R / K rounds. Strata are not used.
    """

    trains_apart: ClassVar[bool] = True

    @property
    def clients_per_mode(self) -> float:
        """M, because all clients of a round train the same mode."""
        return float(self.clients_per_round)

    def init(self, population: int, seed: int) -> Tree:
        self.check(population)
        return {"population": torch.tensor(population), "seed": torch.tensor(seed)}

    def plan(self, state: Tree, round: int) -> Plan:
        client = self.draw_clients(state, round, 0)
        return Plan(client, torch.full_like(client, round % self.modes))

    def draw_clients(self, state: Tree, round: int, mode: int) -> torch.Tensor:
        """M clients drawn from all N, in ascending order, [M]."""
        bits = prng.bits(
            prng.key(int(state["seed"]), "apart", round, mode), int(state["population"])
        )
        one_group = torch.zeros_like(bits)
        clients = sample_without_replacement(
            one_group, bits, torch.tensor([self.clients_per_round])
        )
        return torch.sort(clients).values


@schedules.register("independent-kfold")
@dataclass(frozen=True, kw_only=True)
class IndependentKFold(Independent):
    """K independent federated runs with M clients per round each, at K times the communication.

    Several runs may select the same client in one round.
    """

    one_mode_per_client: ClassVar[bool] = False

    def plan(self, state: Tree, round: int) -> Plan:
        client = torch.cat([self.draw_clients(state, round, mode) for mode in range(self.modes)])
        mode = torch.arange(self.modes).repeat_interleave(self.clients_per_round)
        order = torch.argsort(client, stable=True)
        return Plan(client[order], mode[order])
