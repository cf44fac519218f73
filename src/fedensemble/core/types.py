"""What passes between the rooms of the house: a plan, what came back, the state, a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from .. import draws
from ..vectors import Tree


class Plan(NamedTuple):
    """One round's J visits: visit j is client `client[j]` training mode `mode[j]`."""

    client: Tensor  # [J] int64
    mode: Tensor  # [J] int64


@dataclass(frozen=True, slots=True)
class Cohort:
    """Who stands behind each mode's update."""

    count: Tensor  # [K, 1] clients that trained the mode this round
    weight: Tensor  # [K, 1] sum of their aggregation weights
    share: Tensor  # [K, 1] that sum over the one of all N clients; M/N with uniform weights
    population: int  # N
    coin: Tensor  # [K, 1] a number in (0, 1) that the server shares with a mode's clients in a round

    def uniform(self, like: Tensor) -> Tensor:
        """Random numbers in (0, 1) for the server, shaped like `like`, [K, P]: new each round, the same at each call.

        They are drawn at the first 53 bits of the coin (24 where the coin is float32), so every engine finds them.
        """
        key = draws.fold((self.coin.double() * 2.0**53).long().squeeze(-1), 0)
        return draws.uniform(key, like.shape[-1]).to(like.dtype)


class Returned(NamedTuple):
    """What an engine hands back after a round of visits."""

    uploads: Tree  # weighted mean of the uploads of each mode, [K, P]; zero where nobody trained it
    buffers: Tensor  # likewise for running statistics, [K, R]
    cohort: Cohort
    loss: Tensor  # mean training loss of each visit, [J]
    first_bad_step: Tensor  # [J] first local step whose loss was not finite, or -1
    bytes_up: Tensor  # [J]
    bytes_down: Tensor  # [J]


@dataclass(frozen=True, slots=True)
class EnsembleState:
    """All the server knows: nothing a client keeps is in here."""

    round: int  # rounds done
    modes: Tree  # server state of each mode, [K, P]; "theta" is the model
    buffers: Tensor  # running statistics of each mode, [K, R]
    schedule: Tree = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What happened in one round."""

    round: int  # counted from 1
    age: int  # counted from 1; an age is K rounds
    plan: Plan
    loss: float  # mean over visits
    losses: Tensor  # [J], on the CPU
    bytes_up: int  # all visits together
    bytes_down: int
    trained: tuple[int, ...]  # modes that had at least one client
