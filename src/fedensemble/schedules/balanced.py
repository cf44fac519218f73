"""The default schedule: the paper's, with the modes spread evenly over the strata of a round.

P[q, r] = sigma[(pi[q] + rho[r]) mod K], with random permutations sigma of the modes, pi of the
strata and rho of the rounds, which are drawn again for each age: a random Latin rectangle.

Its closest relative is MFA-RR (multi-model federated averaging, round-robin; arXiv 2207.04330),
which trains K unrelated models: clients are split into K groups that train the models in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import prng
from ..core.schedule import schedules
from ..flat_params import Tree
from .stratified import Stratified


@schedules.register("balanced")
@dataclass(frozen=True, kw_only=True)
class Balanced(Stratified):
    """The paper's schedule with the modes spread evenly over the strata in every round.

    Each row of P is a permutation, as in the paper, and each column has every mode floor(Q/K) or
    ceil(Q/K) times. With Q >= K no mode is ever idle: in every round a mode has M / Q clients
    (rounded up or down) for each of its strata, even if a stratum provides no client. With Q < K
    each round trains Q different modes, and an age trains every mode in Q of its K rounds.
    """

    def permutations(self, state: Tree, age: int) -> Tensor:
        key = prng.key(int(state["seed"]), "latin square", age)
        sigma = prng.permutation(prng.fold_in(key, 0), self.modes)
        pi = prng.permutation(prng.fold_in(key, 1), self.strata)
        rho = prng.permutation(prng.fold_in(key, 2), self.modes)
        return sigma[(pi.unsqueeze(1) + rho) % self.modes]
