"""The paper's schedule: every age, each stratum goes through the modes in a random order of its
own.

P[q, .] = a random permutation of the K modes for each age;   in round r of the age, stratum q
trains P[q, r].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import prng
from ..core.schedule import Schedule, schedules
from ..core.types import Plan
from ..flat_params import Tree
from .strata import divide, draw_plan


@schedules.register("stratified")
@dataclass(frozen=True, kw_only=True)
class Stratified(Schedule):
    """Algorithm 1 of the paper: over one age every mode is trained on every stratum exactly once.

    In one round several strata may draw the same mode, and some mode none. With K = 1 and Q = 1 it
    is plain client sampling.

    Every client is asked in a round with probability M / N, for every N, Q and M. Where Q does not
    divide N, the larger strata therefore give more clients on average. A stratum with M * size < N
    gives none in some rounds, and a few clients of a round train another mode than the rest of
    their stratum, so that each mode has M / Q clients (rounded) per stratum. Where Q divides N,
    every stratum gives M / Q clients (rounded) in every round.

    >>> schedule = Stratified(modes=2, strata=2, clients_per_round=4)
    >>> state = schedule.init(population=8, seed=0)
    >>> schedule.permutations(state, age=0).shape
    torch.Size([2, 2])
    """

    @property
    def notes(self) -> tuple[str, ...]:
        if self.modes <= self.clients_per_round:
            return ()
        return (
            f"With {self.modes} modes and {self.clients_per_round} clients a round, at most {self.strata} of the modes "
            "are trained in a round; the others wait.",
        )

    def init(self, population: int, seed: int) -> Tree:
        self.check(population)
        return {"stratum": divide(population, self.strata, seed), "seed": torch.tensor(seed)}

    def permutations(self, state: Tree, age: int) -> Tensor:
        """The matrix P of an age (counted from 0), [Q, K]."""
        rows = prng.key(int(state["seed"]), "permutation", age, torch.arange(self.strata))
        return prng.permutation(rows, self.modes)

    def plan(self, state: Tree, round: int) -> Plan:
        age, place = divmod(round, self.modes)
        mode = self.permutations(state, age)[:, place]
        return draw_plan(
            state["stratum"], mode, self.modes, self.clients_per_round, int(state["seed"]), round
        )
