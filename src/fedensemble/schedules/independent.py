"""K models trained apart: the deep-ensemble reference, at equal and at K-fold communication."""

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
    """K separate federated runs that take turns, so that they cost together what one run costs.

    In round r all M clients, drawn from everybody, train mode r mod K: after R rounds each model
    has had R / K rounds of its own. Strata play no part.
    """

    @property
    def clients_per_mode(self) -> float:
        """All M clients train the mode whose turn it is."""
        return float(self.clients_per_round)

    def init(self, population: int, seed: int) -> Tree:
        self.check(population)
        return {"population": torch.tensor(population), "seed": torch.tensor(seed)}

    def plan(self, state: Tree, round: int) -> Plan:
        client = self.drawn(state, round, 0)
        return Plan(client, torch.full_like(client, round % self.modes))

    def drawn(self, state: Tree, round: int, mode: int) -> torch.Tensor:
        """M clients out of all, in ascending order."""
        drawn = prng.bits(
            prng.key(int(state["seed"]), "apart", round, mode), int(state["population"])
        )
        everybody = torch.zeros_like(drawn)
        return torch.sort(
            sample_without_replacement(everybody, drawn, torch.tensor([self.clients_per_round]))
        ).values


@schedules.register("independent-kfold")
@dataclass(frozen=True, kw_only=True)
class IndependentKFold(Independent):
    """K separate federated runs, each with M clients in every round: K times the communication of
    one run.

    A client may be drawn by several of them in one round.
    """

    one_mode_a_client: ClassVar[bool] = False

    def plan(self, state: Tree, round: int) -> Plan:
        client = torch.cat([self.drawn(state, round, mode) for mode in range(self.modes)])
        mode = torch.arange(self.modes).repeat_interleave(self.clients_per_round)
        order = torch.argsort(client, stable=True)
        return Plan(client[order], mode[order])
