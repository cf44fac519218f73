"""Clients as devices: some are slow, some drop out, some are asleep; more are asked than needed.

A visit takes   bytes down / bandwidth + examples x ms a sample x factor + bytes up / bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import prng
from ..core.hyperparameters import check_hyperparameters
from ..core.participation import Costs, Participation, participations
from ..core.schedule import Schedule
from ..core.types import Outcome, ParticipationStats, Plan
from ..errors import InputError
from ..flat_params import Tree
from .availability import seconds_left, stand_in, windows
from .device_speeds import from_trace, log_normal, read_trace
from .quotas import first_to_finish, quotas

# seconds until the server gives up a round to which nobody answers, where there is no deadline
_NOBODY = 600.0
_KILOBIT = 125  # bytes


@participations.register("devices")
@dataclass(frozen=True, kw_only=True)
class Devices(Participation):
    """Devices of unlike speed on a simulated clock: over-selection, drop-outs, hours of the day.

    Of `ask` clients the first M to finish count, with places for each mode in proportion to how
    many were asked to train it, so that no mode starves. The others' work is lost, and their memory
    stays as it was.

    Args:
        ask: clients asked in a round (the paper's OpenImage runs ask 130 and take 100); None asks
            M.
        compute_ms, compute_spread: milliseconds a sample: the median, and the standard deviation of
            its logarithm.
        bandwidth_kbps, bandwidth_spread: likewise for kbit/s, down and up alike.
        trace: a CSV file of measured devices in place of these, see `read_trace`; each client draws
            one of them.
        factor: a training step takes so many times the milliseconds (FedScale: 3, its times are
            forward passes).
        drop: probability that a client who was asked never answers.
        least_hours, most_hours: every client is there so many hours a day, from a time of its own;
            24 is always. Who is away is not asked, another of the same stratum is. Whose window
            closes before the visit ends drops out.
        deadline: seconds after which a round ends with whoever has answered.
    """

    ask: int | None = None
    # The defaults are those of 2,289 devices of FedScale's trace, rounded.
    compute_ms: float = 50.0
    compute_spread: float = 0.9
    bandwidth_kbps: float = 7000.0
    bandwidth_spread: float = 1.1
    trace: str | None = None
    factor: float = 3.0
    drop: float = 0.0
    least_hours: float = 24.0
    most_hours: float = 24.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        check_hyperparameters(self)
        if self.trace is not None and (not isinstance(self.trace, str) or "\0" in self.trace):
            raise InputError(
                f"Participation 'devices' needs the path of a CSV file for trace; got {self.trace!r}."
            )
        for name in ("compute_ms", "bandwidth_kbps", "factor", "deadline"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"Participation 'devices' needs {name} > 0; got {value}.")
        for name in ("compute_spread", "bandwidth_spread"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"Participation 'devices' needs {name} >= 0; got {getattr(self, name)}."
                )
        if not 0 <= self.drop <= 1:
            raise InputError(f"Participation 'devices' needs 0 <= drop <= 1; got {self.drop}.")
        if not 0 < self.least_hours <= self.most_hours <= 24:
            raise InputError(
                f"Participation 'devices' needs 0 < least_hours <= most_hours <= 24; got {self.least_hours} and "
                f"{self.most_hours}."
            )

    def asking(self, schedule: Schedule) -> Schedule:
        if self.ask is None:
            return schedule
        if self.ask < schedule.clients_per_round:
            raise InputError(
                f"Participation 'devices' needs ask >= clients_per_round; got ask={self.ask}, clients_per_round="
                f"{schedule.clients_per_round}. Raise participation.ask or lower ensemble.clients_per_round."
            )
        return replace(schedule, clients_per_round=self.ask)

    def init(self, population: int, seed: int) -> Tree:
        if self.ask is not None and self.ask > population:
            raise InputError(
                f"Participation 'devices' needs ask <= clients; got ask={self.ask}, clients={population}. "
                "Lower participation.ask."
            )
        state = {"clock": torch.zeros((), dtype=torch.float64), "seed": torch.tensor(seed)}
        return state if self.trace is None else {**state, "trace": read_trace(self.trace)}

    def outcome(
        self, state: Tree, schedule: Schedule, planned: Tree, round: int, costs: Costs
    ) -> Outcome:
        seed, clock = int(state["seed"]), float(state["clock"])
        wanted = self.asking(schedule).plan(planned, round)
        left = self.seconds_left(len(costs.samples), clock, seed)
        asked = wanted
        if left is not None:
            stratum = schedule.stratum(planned)
            asked = stand_in(wanted, stratum, left > 0, seed, round, schedule.one_mode_a_client)
        down, up = costs.of_visits(round, asked)
        finish = self.finish(state, asked, down + up, costs.samples)
        dropped = prng.uniform(prng.key(seed, "drop-out", round, asked.client), 1)[:, 0] < self.drop
        if left is not None:
            dropped |= finish > left[asked.client]
        answers = ~dropped if self.deadline is None else ~dropped & (finish <= self.deadline)

        keep = schedule.clients_per_round * (1 if schedule.one_mode_a_client else schedule.modes)
        places = quotas(torch.bincount(asked.mode, minlength=schedule.modes), keep, seed, round)
        # devices of one kind finish at the same time
        ties = prng.bits(prng.key(seed, "ties", round), len(finish))
        kept = first_to_finish(asked.mode, finish, answers, places, ties)
        seconds = self.seconds(finish, kept, late=~dropped & ~kept, full=int(kept.sum()) == keep)
        turnout = ParticipationStats(
            asked=len(asked.client),
            late=int((~dropped & ~kept).sum()),
            dropped=int(dropped.sum()),
            away=len(wanted.client) - len(asked.client),
            seconds=seconds,
            clock=clock + seconds,
            bytes_down=int(down.sum()),
        )
        after = {**state, "clock": torch.tensor(turnout.clock, dtype=torch.float64)}
        return Outcome(Plan(asked.client[kept], asked.mode[kept]), after, turnout)

    def seconds_left(self, population: int, clock: float, seed: int) -> Tensor | None:
        """How long each client is still there, [N]; None where everybody always is."""
        if self.least_hours == self.most_hours == 24:
            return None
        return seconds_left(*windows(population, self.least_hours, self.most_hours, seed), clock)

    def finish(self, state: Tree, asked: Plan, traffic: Tensor, samples: Tensor) -> Tensor:
        """Seconds after which each visit is done, [J]; a client trains its modes one after another.

        Args:
            traffic: bytes down and up together, [J].
            samples: examples each client goes through, [N].
        """
        seed = int(state["seed"])
        if self.trace is None:
            median, spread = (
                (self.compute_ms, self.bandwidth_kbps),
                (self.compute_spread, self.bandwidth_spread),
            )
            speed = log_normal(asked.client, median, spread, seed)
        else:
            speed = from_trace(asked.client, state["trace"], seed)
        seconds = samples[asked.client] * speed[:, 0] * self.factor / 1000 + traffic / (
            speed[:, 1] * _KILOBIT
        )
        _, visits = torch.unique_consecutive(asked.client, return_counts=True)
        if len(visits) == len(seconds):
            return seconds
        return torch.cat([part.cumsum(0) for part in torch.split(seconds, visits.tolist())])

    def seconds(self, finish: Tensor, kept: Tensor, late: Tensor, full: bool) -> float:
        """How long the round takes: until the last answer that counts, or until the deadline if
        some are missing.
        """
        if self.deadline is not None and not full and bool(late.any() | ~kept.any()):
            return self.deadline
        return float(finish[kept].max()) if bool(kept.any()) else _NOBODY
