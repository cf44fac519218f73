"""What passes between the rooms of the house: a plan, what came back, the state, a report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .. import prng
from ..flat_params import Tree


class Plan(NamedTuple):
    """One round's J visits: visit j is client `client[j]` training mode `mode[j]`."""

    client: Tensor  # [J] int64
    mode: Tensor  # [J] int64


class Members(NamedTuple):
    """What each visit of a round sent up, in ascending order of (client, mode); only for methods
    that gather.
    """

    client: Tensor  # [J] int64
    mode: Tensor  # [J] int64
    weight: Tensor  # [J]
    uploads: Tree  # [J, P]
    buffers: Tensor  # [J, R] running statistics the client ended with

    def shares(self, modes: int) -> Tensor:
        """The share of each visit in its mode, [K, J]: rows add up to 1, or to 0 where nobody
        trained the mode.
        """
        own = (self.mode == torch.arange(modes, device=self.mode.device).unsqueeze(1)) * self.weight
        total = own.sum(1, keepdim=True)
        return own / torch.where(total > 0, total, torch.ones_like(total))


@dataclass(frozen=True, slots=True)
class Cohort:
    """Who stands behind each mode's update."""

    count: Tensor  # [K, 1] clients that trained the mode this round
    weight: Tensor  # [K, 1] sum of their aggregation weights
    share: Tensor  # [K, 1] that sum over the one of all N clients; M/N with uniform weights
    population: int  # N
    # [K, 1] a number in (0, 1) that the server shares with a mode's clients in a round
    coin: Tensor
    members: Members | None = None  # what each client sent, where the method gathers it
    round: int = 0  # counted from 0; every engine fills it in
    lr: float = math.nan  # learning rate of local training in this round; every engine fills it in

    def key(self, word: int) -> Tensor:
        """A key for random numbers of the server, one a mode and word, [K].

        It is made of the first 53 bits of the coin (24 where the coin is float32), so every engine
        finds it.
        """
        return torch.as_tensor(prng.fold((self.coin.double() * 2.0**53).long().squeeze(-1), word))

    def uniform(self, like: Tensor) -> Tensor:
        """Random numbers in (0, 1) for the server, shaped like `like`, [K, P]: new each round, the
        same each call.
        """
        return prng.uniform(self.key(0), like.shape[-1]).to(like.dtype)


class RoundResult(NamedTuple):
    """What an engine hands back after a round of visits."""

    uploads: Tree  # weighted mean of the uploads of each mode, [K, P]; zero where nobody trained it
    buffers: Tensor  # likewise for running statistics, [K, R]
    cohort: Cohort
    loss: Tensor  # mean training loss of each visit, [J]
    first_bad_step: Tensor  # [J] first local step whose loss was not finite, or -1
    bytes_up: Tensor  # [J]
    bytes_down: Tensor  # [J]
    # the J visits that count, where real clients were asked and some did not answer
    answered: Plan | None = None


@dataclass(frozen=True, slots=True)
class EnsembleState:
    """All the server knows: nothing a client keeps is in here."""

    round: int  # rounds done
    modes: Tree  # server state of each mode, [K, P]; "theta" is the model
    buffers: Tensor  # running statistics of each mode, [K, R]
    schedule: Tree = field(default_factory=dict)
    participation: Tree = field(default_factory=dict)  # the simulated clock, where there is one

    def tensors(self, memory: Tree) -> Tree:
        """Everything that training changes, by name, for a file: this state, and what clients
        remember.
        """
        groups = {
            "modes": self.modes,
            "schedule": self.schedule,
            "memory": memory,
            "participation": self.participation,
        }
        named = {
            f"{group}/{name}": tensor
            for group, tree in groups.items()
            for name, tensor in tree.items()
        }
        return {**named, "buffers": self.buffers}

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], round: int, device: torch.device | str
    ) -> tuple[EnsembleState, Tree]:
        """The state after `round` rounds, and the clients' memory, that `tensors` gave."""

        def group(prefix: str) -> Tree:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        modes = {name: tensor.to(device) for name, tensor in group("modes/").items()}
        state = cls(
            round, modes, tensors["buffers"].to(device), group("schedule/"), group("participation/")
        )
        return state, group("memory/")


class ParticipationStats(NamedTuple):
    """How many of those asked in a round answered in time; asked = visits that count + late +
    dropped.
    """

    asked: int
    late: int  # finished after the places were taken, or after the deadline
    dropped: int  # began and never answered
    away: int  # places for which nobody could be asked
    seconds: float  # simulated time of the round
    clock: float  # simulated time since the start, this round included
    bytes_down: int  # to everybody who was asked


class Outcome(NamedTuple):
    """Whose answers count in a round."""

    plan: Plan
    state: Tree  # of the participation, after the round
    turnout: ParticipationStats | None = None  # None where everybody asked answers at once


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What happened in one round."""

    round: int  # counted from 1
    age: int  # counted from 1; an age is K rounds
    plan: Plan
    loss: float | None  # mean over visits; None where nobody answered
    losses: Tensor  # [J], on the CPU
    bytes_up: int  # all visits together
    bytes_down: int
    trained: tuple[int, ...]  # modes that had at least one client
    # who answered and how long it took, where that is simulated
    turnout: ParticipationStats | None = None
