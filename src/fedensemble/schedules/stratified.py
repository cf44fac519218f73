"""The paper's schedule: in every age each stratum trains all modes, in its own random order.

For each age, P[q, .] is a random permutation of the K modes. In round r of the age, stratum q
trains mode P[q, r].
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

    In one round several strata may train the same mode, and some mode may have no stratum. With
    K = 1 and Q = 1 this is plain client sampling.

    Every client is selected in a round with probability M / N, for all N, Q and M. If Q divides N,
    every stratum provides M / Q clients (rounded) in every round. If Q does not divide N, larger
    strata provide more clients on average, and a stratum with M * size < N provides none in some
    rounds. A few clients of a round then train another mode than the rest of their stratum, so that
    each mode has M / Q clients (rounded) per stratum.

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
            f"With {self.modes} modes and {self.clients_per_round} clients per round, "
            f"at most {self.strata} of the modes are trained in a round; the others wait.",
        )

    def init(self, population: int, seed: int) -> Tree:
        self.check(population)
        return {"stratum": divide(population, self.strata, seed), "seed": torch.tensor(seed)}

    def permutations(self, state: Tree, age: int) -> Tensor:
        """The matrix P of an age (counted from 0), [Q, K]."""
        keys = prng.key(int(state["seed"]), "permutation", age, torch.arange(self.strata))
        return prng.permutation(keys, self.modes)

    def plan(self, state: Tree, round: int) -> Plan:
        age, round_of_age = divmod(round, self.modes)
        mode = self.permutations(state, age)[:, round_of_age]
        return draw_plan(
            state["stratum"], mode, self.modes, self.clients_per_round, int(state["seed"]), round
        )
