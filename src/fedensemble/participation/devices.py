"""Clients as devices that may be slow, drop out or be away; the server over-selects clients.

A visit takes bytes down / bandwidth + examples * ms per sample * factor + bytes up / bandwidth.
`clients_per_round` (M) is the number of replies that count; `ask` is the number of clients that are
selected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import prng
from ..core.participation import Costs, Participation, participations
from ..core.schedule import Schedule
from ..core.types import Outcome, ParticipationStats, Plan
from ..errors import InputError, setting
from ..flat_params import Tree
from .availability import replace_unavailable_clients, seconds_left, windows
from .device_speeds import from_trace, log_normal, read_trace
from .quotas import first_to_finish, quotas

# Seconds after which the server ends a round without any reply, if there is no deadline.
_EMPTY_ROUND_SECONDS = 600.0
_BYTES_PER_KILOBIT = 125


@participations.register("devices")
@dataclass(frozen=True, kw_only=True)
class Devices(Participation):
    """Devices of different speed on a simulated clock: over-selection, drop-outs, hours of the day.

    Of `ask` selected clients the first M to finish count. The M slots are divided among the modes
    in proportion to the clients selected for each, so that every mode is trained. The work of the
    other clients is lost, and their client state does not change.

    Args:
        ask: number of clients that are selected per round (over-selection); None selects M. The
            paper's OpenImage runs select 130 and use 100.
        compute_ms, compute_spread: compute time in milliseconds per sample: the median, and the
            standard deviation of its logarithm.
        bandwidth_kbps, bandwidth_spread: the same for the bandwidth in kbit/s, down and up.
        trace: path of a CSV file of measured devices, which replaces these four; each client draws
            one device. The columns are compute_ms_per_sample and bandwidth_kbps.
        factor: the compute time is multiplied by it. FedScale uses 3, because its times are those
            of forward passes.
        drop: dropout probability: how likely it is that a selected client never replies.
        least_hours, most_hours: minimum and maximum hours per day that a client is available, from
            a random time of the day on; 24 is always. A client that is away is replaced by another
            of its stratum. A client whose window closes before its visit ends drops out.
        deadline: seconds after which a round ends with the replies received so far.
        partial: clients that would not finish by the deadline, or before they become unavailable,
            train fewer local steps, as many as they have time for and at least one. None is False.
        stragglers: probability that a visit stops early, see `Participation`.
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
    partial: bool | None = None

    limits_steps = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is not None and (not isinstance(self.trace, str) or "\0" in self.trace):
            raise InputError(
                "Participation 'devices' needs the path of a CSV file for trace; "
                f"got {self.trace!r}."
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
                "Participation 'devices' needs 0 < least_hours <= most_hours <= 24; "
                f"got {self.least_hours} and {self.most_hours}."
            )

    def selection_schedule(self, schedule: Schedule) -> Schedule:
        if self.ask is None:
            return schedule
        if self.ask < schedule.clients_per_round:
            raise InputError(
                f"Participation 'devices' needs ask >= clients_per_round; got ask={self.ask}, "
                f"clients_per_round={schedule.clients_per_round}. "
                f"Raise {setting('participation.ask')} or lower "
                f"{setting('ensemble.clients_per_round')}."
            )
        return replace(schedule, clients_per_round=self.ask)

    def init(self, population: int, seed: int) -> Tree:
        if self.ask is not None and self.ask > population:
            raise InputError(
                f"Participation 'devices' needs ask <= clients; got ask={self.ask}, "
                f"clients={population}. Lower {setting('participation.ask')}."
            )
        state = {"clock": torch.zeros((), dtype=torch.float64), "seed": torch.tensor(seed)}
        return state if self.trace is None else {**state, "trace": read_trace(self.trace)}

    def outcome(
        self, state: Tree, schedule: Schedule, planned: Tree, round: int, costs: Costs
    ) -> Outcome:
        seed, clock = int(state["seed"]), float(state["clock"])
        planned_visits = self.selection_schedule(schedule).plan(planned, round)
        available_seconds = self.seconds_left(len(costs.samples), clock, seed)
        selected = planned_visits
        if available_seconds is not None:
            selected = replace_unavailable_clients(
                planned_visits,
                schedule.stratum(planned),
                available_seconds > 0,
                seed,
                round,
                schedule.one_mode_per_client,
            )
        selected = self.limit_steps(selected, round, costs)
        down, up = costs.of_visits(round, selected)
        if self.partial:
            selected = self.fit_steps(state, selected, down + up, costs, available_seconds)
        finish = self.finish(state, selected, down + up, costs.examples(selected))
        draw = prng.uniform(prng.key(seed, "drop-out", round, selected.client), 1)[:, 0]
        dropped = draw < self.drop
        if available_seconds is not None:
            dropped |= finish > available_seconds[selected.client]
        replies = ~dropped if self.deadline is None else ~dropped & (finish <= self.deadline)

        total = schedule.clients_per_round * (1 if schedule.one_mode_per_client else schedule.modes)
        slots = quotas(torch.bincount(selected.mode, minlength=schedule.modes), total, seed, round)
        # Random tie-breaking, because equal devices of a trace finish at the same time.
        ties = prng.bits(prng.key(seed, "ties", round), len(finish))
        counted = first_to_finish(selected.mode, finish, replies, slots, ties)
        late = ~dropped & ~counted
        slots_left = total - int(counted.sum())
        seconds = self.seconds(finish, counted, late, slots_left)
        turnout = ParticipationStats(
            asked=len(selected.client),
            late=int(late.sum()),
            dropped=int(dropped.sum()),
            away=len(planned_visits.client) - len(selected.client),
            seconds=seconds,
            clock=clock + seconds,
            bytes_down=int(down.sum()),
        )
        new_state = {**state, "clock": torch.tensor(turnout.clock, dtype=torch.float64)}
        return Outcome(selected.select(counted), new_state, turnout)

    def seconds_left(self, population: int, clock: float, seed: int) -> Tensor | None:
        """Seconds until each client becomes unavailable, [N]; None if all are always available."""
        if self.least_hours == self.most_hours == 24:
            return None
        return seconds_left(*windows(population, self.least_hours, self.most_hours, seed), clock)

    def fit_steps(
        self,
        state: Tree,
        selected: Plan,
        traffic: Tensor,
        costs: Costs,
        available_seconds: Tensor | None,
    ) -> Plan:
        """The plan in which each visit has as many local steps as its client has time for.

        A visit has at least one step, and at most those it would have without the limit. A client
        with several visits divides its time equally among them.
        """
        limit = torch.full(traffic.shape, math.inf if self.deadline is None else self.deadline)
        limit = limit.double()
        if available_seconds is not None:
            limit = torch.minimum(limit, available_seconds[selected.client])
        _, which, visits = torch.unique(selected.client, return_inverse=True, return_counts=True)
        compute, transfer = self._seconds_per_visit(
            state, selected, traffic, costs.examples(selected)
        )
        steps = costs.steps(selected)
        share = ((limit / visits[which] - transfer) / compute).clamp(0, 1)
        return selected._replace(steps=torch.floor(share * steps).long().clamp(min=1))

    def finish(self, state: Tree, selected: Plan, traffic: Tensor, examples: Tensor) -> Tensor:
        """Seconds after which each visit finishes, [J]; a client trains its modes sequentially.

        Args:
            traffic: bytes down plus bytes up of each visit, [J].
            examples: number of examples that each visit processes, [J].
        """
        compute, transfer = self._seconds_per_visit(state, selected, traffic, examples)
        seconds = compute + transfer
        _, visits_per_client = torch.unique_consecutive(selected.client, return_counts=True)
        if len(visits_per_client) == len(seconds):
            return seconds
        per_client = torch.split(seconds, visits_per_client.tolist())
        return torch.cat([part.cumsum(0) for part in per_client])

    def _seconds_per_visit(
        self, state: Tree, selected: Plan, traffic: Tensor, examples: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Seconds of computation and of transfers of each visit, [J] each."""
        seed = int(state["seed"])
        if self.trace is None:
            median = (self.compute_ms, self.bandwidth_kbps)
            spread = (self.compute_spread, self.bandwidth_spread)
            speed = log_normal(selected.client, median, spread, seed)
        else:
            speed = from_trace(selected.client, state["trace"], seed)
        compute = examples * speed[:, 0] * self.factor / 1000
        return compute, traffic / (speed[:, 1] * _BYTES_PER_KILOBIT)

    def seconds(self, finish: Tensor, counted: Tensor, late: Tensor, slots_left: int) -> float:
        """Duration of the round: until the last reply that counts, or until the deadline.

        Args:
            finish: when each visit finishes, [J].
            counted, late: visits whose reply counts, and visits that finish too late, bool [J].
            slots_left: replies that are missing; for these the server waits until the deadline.
        """
        if self.deadline is not None and slots_left and bool(late.any() | ~counted.any()):
            return self.deadline
        return float(finish[counted].max()) if bool(counted.any()) else _EMPTY_ROUND_SECONDS
