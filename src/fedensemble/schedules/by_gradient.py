"""Assigns modes by gradient: modes with large gradients get more visits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .. import prng
from ..core.sampling import sample_without_replacement
from ..core.schedule import schedules
from ..core.types import Plan, VisitReports
from ..errors import InputError
from ..flat_params import Tree
from .balanced import Balanced


@schedules.register("by-gradient")
@dataclass(frozen=True, kw_only=True)
class ByGradient(Balanced):
    """Modes with larger gradients, which have more to learn, get more of the visits of a round.

    After each visit the server knows the norm of the gradient at the mode as the client received
    it. The visits of an age are in proportion to the last mean norm of each mode.

    Args:
        once_per_age: whether each stratum trains every mode exactly once in an age, as in the
            paper; the number of clients that a stratum provides in a round then depends on its
            mode. If not, all clients are equally likely, and each trains a random mode.
        least: share of visits that every mode has at least, relative to equal shares.
    """

    needs_reports: ClassVar[bool] = True

    once_per_age: bool = False
    least: float = 0.5

    def check(self, population: int) -> None:
        super().check(population)
        if not 0 < self.least <= 1:
            raise InputError(f"Schedule 'by-gradient' needs 0 < least <= 1; got {self.least}.")

    def init(self, population: int, seed: int) -> Tree:
        state = super().init(population, seed)
        # The last mean norm of each mode, 0 if unknown, and the shares of visits in this age.
        ones = torch.ones(self.modes, dtype=torch.float64)
        return {**state, "norm": 0 * ones, "share": ones / self.modes}

    def plan(self, state: Tree, round: int) -> Plan:
        seed, stratum = int(state["seed"]), state["stratum"]
        age, round_of_age = divmod(round, self.modes)
        bits = prng.bits(prng.key(seed, "clients", round), len(stratum))
        start = float(prng.uniform(prng.key(seed, "start", round), 1))
        if self.once_per_age:
            mode = self.permutations(state, age)[:, round_of_age]
            sizes = torch.bincount(stratum, minlength=self.strata)
            slots = divide_slots(sizes * state["share"][mode], sizes, self.clients_per_round, start)
            client = torch.sort(sample_without_replacement(stratum, bits, slots)).values
            return Plan(client, mode[stratum[client]])
        total = torch.tensor([self.clients_per_round])
        everyone = torch.zeros_like(stratum)
        client = torch.sort(sample_without_replacement(everyone, bits, total)).values
        slots = divide_slots(state["share"], total.expand(self.modes), int(total), start)
        mode = torch.repeat_interleave(torch.arange(self.modes), slots)
        order = prng.permutation(prng.key(seed, "order of visits", round), len(mode))
        return Plan(client, mode[order])

    def observe(
        self, state: Tree, plan: Plan, loss: Tensor, reports: VisitReports | None = None
    ) -> Tree:
        if reports is None:
            return state
        one_hot = (plan.mode == torch.arange(self.modes).unsqueeze(1)).double()  # [K, J]
        count = one_hot.sum(1)
        sums = one_hot @ torch.nan_to_num(reports.gradient_norm)
        norm = torch.where(count > 0, sums / count.clamp(min=1), state["norm"])
        share = state["share"]
        # Shares change between ages only: within one, every stratum then provides the same number
        # of clients in total, whatever the order of its modes.
        if (reports.round + 1) % self.modes == 0 and bool((norm > 0).all()):
            share = torch.clamp(norm / norm.mean(), min=self.least)
            share = share / share.sum()
        return {**state, "norm": norm, "share": share}


@schedules.register("by-gradient-once-per-age")
@dataclass(frozen=True, kw_only=True)
class ByGradientOncePerAge(ByGradient):
    """`by-gradient` with `once_per_age`: strata provide more clients for some modes."""

    once_per_age: bool = True


def divide_slots(weight: Tensor, most: Tensor, total: int, start: float) -> Tensor:
    """Divides `total` slots in proportion to weights [G], rounded up or down, [G].

    Systematic sampling: if `start` is uniform on (0, 1), the expected number of slots is exactly in
    proportion. A group whose share exceeds `most` gets that many; the others share the rest.

    >>> divide_slots(torch.tensor([1.0, 3.0]), torch.tensor([4, 4]), 4, 0.5).tolist()
    [1, 3]
    >>> divide_slots(torch.tensor([1.0, 9.0]), torch.tensor([4, 2]), 4, 0.5).tolist()
    [2, 2]
    """
    weight, most = weight.double(), most.double()
    share = torch.zeros_like(weight)
    full = torch.zeros_like(weight, dtype=torch.bool)
    while True:
        rest = total - most[full].sum()
        share = torch.where(full, most, weight * rest / weight[~full].sum().clamp(min=1e-300))
        over = ~full & (share > most)
        if not bool(over.any()):
            break
        full |= over
    marks = torch.floor(torch.cumsum(share, 0) + start)
    marks[-1] = total + torch.floor(torch.tensor(start))  # exact, whatever the sums are rounded to
    return torch.diff(marks, prepend=marks.new_zeros(1)).long()
