"""Trains rounds of several runs whose modes are the rows of one matrix.

An algorithm is arithmetic on [..., P]: whether the K rows of the server's state belong to one run
or R * K rows belong to R runs makes no difference to it, as long as no row depends on another. So
plans, local training, means and the server's step are computed once for all runs, and the Python
code of a round no longer takes R times as long. On a GPU this is most of the time of small models.

Runs fit together if their plans have the same shape and the rows of their modes are independent
(`stack_key`), and if a round fits into one block. All other groups of runs train in one batch, too,
but each run has a server's step of its own (`run_groups.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.algorithm import Algorithm
from ...core.average import NoAverage, update_average
from ...core.engine import Engine
from ...core.participation import Everybody
from ...core.round import check_losses_finite, update_modes
from ...core.schedule import Schedule
from ...core.types import EnsembleState, RoundReport, RoundResult
from ...core.visits.traffic import bytes_down, bytes_up, takes_optional_argument
from ...core.visits.visit_keys import shared_uniform
from ...engines.local.block import with_hyperparameters
from ...engines.local.device_cache import to_device_async
from ...engines.local.local_engine import LocalEngine
from ...engines.local.oom_retry import fits_in_memory
from ...engines.local.run_visits import NOT_PASSED_PER_VISIT
from ...engines.local.stacked_runs import (
    StackedPlan,
    StackedResult,
    make_stacked_plan,
    train_stacked,
    write_memory,
)
from ...errors import DivergedError, FedEnsembleError
from ...federation.federation import Federation
from ...flat_params import Tree

FEWEST = 3  # runs of a stack; two runs gain little


def stack_key(federation: Federation) -> Hashable | None:
    """Returns a key that is equal for runs which may be stacked; None for a run that may not.

    The runs must also be in the same batch (`run_groups.batch_key`).
    """
    algorithm, schedule, engine = federation.algorithm, federation.schedule, federation.engine
    kind = type(algorithm)
    gathers = algorithm.gathers or kind.gathers_uploads is not Algorithm.gathers_uploads
    rows_depend = algorithm.couples or algorithm.joint or gathers
    # What an algorithm was bound to belongs to one run.
    bound = kind.bind is not Algorithm.bind
    # Sizes of messages that differ between visits are read from the GPU for each run.
    sizes_vary = any(
        takes_optional_argument(kind, name) for name in ("upload_bytes", "download_bytes")
    )
    participation = federation.participation
    # The next plan is known, and equal for equal seeds.
    plans_vary = (
        type(participation) is not Everybody
        or bool(participation.stragglers)
        or type(schedule).observe is not Schedule.observe
        or schedule.needs_reports
    )
    own_step = (
        federation.aggregator.gathers
        or federation.attack is not None
        or bool(federation.shared)
        or bool(federation.personal)
        or algorithm.target_spread > 0
    )
    if (
        not isinstance(engine, LocalEngine)
        or type(engine).review is not Engine.review
        or engine.secret is not None
        or rows_depend
        or bound
        or sizes_vary
        or plans_vary
        or own_step
    ):
        return None
    settings = [
        (field.name, value)
        for field in fields(algorithm)
        if not isinstance(value := getattr(algorithm, field.name), float)
    ]
    population = len(federation.data)
    key = kind, tuple(settings), schedule, population, federation.average, federation.round
    try:
        hash(key)
    except TypeError:  # a part of the user's own with a list among its fields
        return None
    return key


class DoesNotFit(Exception):  # noqa: N818 (no error: the runs then train without a stack)
    """The runs cannot train as one stack in this round."""


class NotStackable(Exception):  # noqa: N818 (the same)
    """Runs with this algorithm cannot train as one stack."""


class Computed(NamedTuple):
    """A round of all runs that none of them has accepted yet."""

    state: EnsembleState  # after the round, with the modes of all runs
    plan: StackedPlan
    result: RoundResult
    memory: Tree  # new client state of all visits
    lr: list[float]  # of each run
    trained: list[tuple[int, ...]]  # modes with clients, of each run
    losses: Tensor  # [R, J]
    means: list[float]  # of the losses of each run
    finite: list[bool]  # whether all losses of a run are
    bad_steps: Tensor | None  # [R, J] if any loss is not finite
    bytes_down: list[int]
    bytes_up: list[int]


class RunStack:
    """Runs with equal `stack_key`, which train round by round.

    Args:
        federations: of the runs.
    """

    def __init__(self, federations: Sequence[Federation]) -> None:
        self.federations = list(federations)
        first = self._first = federations[0]
        self.runs, self.modes = len(federations), first.schedule.modes
        self._engines = [_local(federation) for federation in federations]
        # Runs with the same seed, clients and schedule have the same plans and batches.
        streams: dict[Hashable, int] = {}
        self._stream = [
            streams.setdefault(_stream_key(federation), len(streams)) for federation in federations
        ]
        self._sources = [self._stream.index(stream) for stream in range(len(streams))]
        device = first.model.device
        algorithms = [federation.algorithm for federation in federations]
        differing = {
            field.name: values
            for field in fields(algorithms[0])
            if len(set(values := [getattr(each, field.name) for each in algorithms])) > 1
        }
        columns = {
            name: torch.tensor(values, dtype=first.model.dtype).unsqueeze(1).to(device)
            for name, values in differing.items()
        }
        self._hyperparameters = {
            name: column for name, column in columns.items() if name not in NOT_PASSED_PER_VISIT
        }
        # Of the server's step, one value per mode.
        self._server = with_hyperparameters(
            algorithms[0],
            {name: value.repeat_interleave(self.modes, 0) for name, value in columns.items()},
        )
        totals = [
            len(engine.host_sizes)
            if algorithms[0].weighting == "uniform"
            else int(engine.host_sizes.sum())
            for engine in self._engines
        ]
        self._totals = (
            torch.tensor(totals, dtype=first.model.dtype)
            .repeat_interleave(self.modes)
            .unsqueeze(1)
            .to(device)
        )
        self._states: list[EnsembleState] = []
        self._stacked = first.state  # of all runs
        self._next: StackedPlan | None = None

    def train_round(self) -> list[RoundReport | DivergedError]:
        """Trains one round of each run; returns their reports, or the errors of diverged runs.

        Raises:
            DoesNotFit: the visits do not fit into one block; no run has changed.
            NotStackable: the algorithm cannot be computed for all runs at once; the same.
        """
        try:
            computed = self._compute_round()
        except FedEnsembleError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            # Python control flow on a hyperparameter that differs ("if self.tau > 0"), on the
            # server or on clients, or not enough memory.
            raise NotStackable(str(error)) from error
        self._stacked = computed.state
        self._states = [self._state_of(run) for run in range(self.runs)]
        return [self._accept(run, computed) for run in range(self.runs)]

    def _compute_round(self) -> Computed:
        """Computes the round of all runs, and changes none of them."""
        engine, state = self._engines[0], self._stack_states()
        plan = self._plan(state.round)
        lr = [federation.algorithm.learning_rate(state.round) for federation in self.federations]
        rates = self._column(lr)
        with engine.round_threads(len(plan.mode)):
            result = self._train(state, plan, rates)
        draws = self._shared_draws(state.round)
        done = self._collect(result, state.round, draws, lr, rates)
        trained = [tuple(sorted(set(plan.plans[run].mode.tolist()))) for run in self._sources]
        idle = any(len(modes) < self.modes for modes in trained)
        modes, buffers = update_modes(state, self._server, done, idle)
        down, up = self._count_bytes(state, result, plan, draws)
        # While the GPU works through the kernels of this round, the CPU prepares the next one.
        if engine.model.device.type == "cuda":
            self._next = self._make_plan(state.round + 1)
        # Reading the losses waits for the GPU.
        losses = result.loss.detach().cpu().reshape(self.runs, -1)
        finite = losses.isfinite().all(1).tolist()
        bad_steps = None
        if not all(finite):
            bad_steps = result.first_bad_step.cpu().reshape(self.runs, -1)
        return Computed(
            state=replace(state, round=state.round + 1, modes=modes, buffers=buffers),
            plan=plan,
            result=done,
            memory=result.memory,
            lr=lr,
            trained=[trained[stream] for stream in self._stream],
            losses=losses,
            means=losses.mean(1).tolist(),
            finite=finite,
            bad_steps=bad_steps,
            bytes_down=down,
            bytes_up=up,
        )

    def _accept(self, run: int, computed: Computed) -> RoundReport | DivergedError:
        """Lets a run continue from its new state; returns its report, or the error if diverged."""
        federation, new = self.federations[run], self._states[run]
        plan, losses, round = computed.plan.plans[run], computed.losses[run], new.round - 1
        if not computed.finite[run]:
            assert computed.bad_steps is not None
            result = computed.result._replace(first_bad_step=computed.bad_steps[run])
            try:
                check_losses_finite(losses, result, plan, round)
            except DivergedError as error:
                return error
        if not isinstance(federation.average, NoAverage):
            average = update_average(
                federation.average, new, computed.trained[run], computed.lr[run]
            )
            new = self._states[run] = replace(new, average=average)
        report = RoundReport(
            round=new.round,
            age=round // self.modes + 1,
            plan=plan,
            loss=computed.means[run],
            losses=losses,
            bytes_up=computed.bytes_up[run],
            bytes_down=computed.bytes_down[run],
            trained=computed.trained[run],
        )
        if computed.memory:
            write_memory(self._engines[run], plan, computed.memory, run)
        federation.accept_round(new, report)
        return report

    def _collect(
        self,
        result: StackedResult,
        round: int,
        draws: Tensor,
        lr: Sequence[float],
        rates: Tensor,
    ) -> RoundResult:
        """The result of all visits as that of one run; bytes are counted for each run."""
        cohort = replace(
            result.cohort(
                self._totals, len(self._first.data), to_device_async(draws, self._totals.device)
            ),
            round=round,
            lr=lr[0] if len(set(lr)) == 1 else rates.repeat_interleave(self.modes, 0),
        )
        uncounted = torch.empty(0)
        return RoundResult(
            result.uploads,
            result.buffers,
            cohort,
            result.loss,
            result.first_bad_step,
            uncounted,
            uncounted,
        )

    def _stack_states(self) -> EnsembleState:
        """The states of all runs as one, with the rows of their modes one below the other."""
        states = [federation.state for federation in self.federations]
        # The stacked state of the last round, unless somebody else has changed a run since.
        known = len(states) == len(self._states)
        if known and all(a is b for a, b in zip(states, self._states, strict=True)):
            return self._stacked
        return replace(
            states[0],
            modes={
                name: torch.cat([state.modes[name] for state in states]) for name in states[0].modes
            },
            buffers=torch.cat([state.buffers for state in states]),
        )

    def _state_of(self, run: int) -> EnsembleState:
        """The state of a run: views of the rows of its modes."""
        before, rows = self.federations[run].state, slice(run * self.modes, (run + 1) * self.modes)
        return EnsembleState(
            self._stacked.round,
            {name: value[rows] for name, value in self._stacked.modes.items()},
            self._stacked.buffers[rows],
            before.schedule,
            before.participation,
            before.average,
        )

    def _plan(self, round: int) -> StackedPlan:
        prepared, self._next = self._next, None
        known = prepared is not None and prepared.round == round
        return prepared if known and prepared is not None else self._make_plan(round)

    def _make_plan(self, round: int) -> StackedPlan:
        sources = [self.federations[run] for run in self._sources]
        plans = [source.schedule.plan(source.state.schedule, round) for source in sources]
        if len({len(plan.client) for plan in plans}) > 1 or not len(plans[0].client):
            raise DoesNotFit
        engines = [self._engines[run] for run in self._sources]
        return make_stacked_plan(engines, plans, self._stream, self.modes, round)

    def _train(self, state: EnsembleState, plan: StackedPlan, rates: Tensor) -> StackedResult:
        """Trains all visits in one block; raises DoesNotFit if they are too many.

        Args:
            rates: learning rate of each run, [R, 1].
        """
        engine, results = self._engines[0], list[StackedResult]()
        if len(plan.mode) > engine.block:
            raise DoesNotFit
        counts = torch.cat(
            [self._engines[run].count_steps(plan.plans[run]) for run in self._sources]
        )

        def train() -> None:
            results.append(
                train_stacked(
                    self._engines,
                    self._first.algorithm,
                    self._server.broadcast(state.modes),
                    state.buffers,
                    plan,
                    rates,
                    self._hyperparameters,
                    ragged=bool(counts.min() < counts.max()),
                )
            )

        if not fits_in_memory(engine, train, len(plan.mode), state.round):
            raise DoesNotFit
        return results[0]

    def _column(self, values: Sequence[float]) -> Tensor:
        """One value per run as a tensor on the device, [R, 1]."""
        column = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
        return to_device_async(column.to(self._first.model.dtype), self._first.model.device)

    def _shared_draws(self, round: int) -> Tensor:
        """The random draw that each mode's clients share, on the CPU, [R * K, 1]."""
        modes = torch.arange(self.modes)
        draws = [
            shared_uniform(self._engines[run].seed, round, modes).to(self._first.model.dtype)
            for run in self._sources
        ]
        return torch.cat([draws[stream] for stream in self._stream])

    def _count_bytes(
        self, state: EnsembleState, result: StackedResult, plan: StackedPlan, draws: Tensor
    ) -> tuple[list[int], list[int]]:
        """Bytes that the clients of each run received and sent."""
        sent = self._server.broadcast(state.modes)
        statistics = self._server.buffer_bytes(state.buffers)
        sizes: Any = (
            bytes_down(self._server, sent, {}, draws),
            bytes_up(self._server, result.uploads, sent, draws),
        )
        rows = len(state.buffers), 1
        down, up = (
            (statistics + torch.as_tensor(size).cpu().expand(rows)).reshape(self.runs, -1)
            for size in sizes
        )
        counts = torch.stack(
            [torch.bincount(each.mode, minlength=self.modes) for each in plan.plans]
        )
        return (down * counts).sum(1).tolist(), (up * counts).sum(1).tolist()


def _local(federation: Federation) -> LocalEngine:
    assert isinstance(federation.engine, LocalEngine)
    return federation.engine


def _stream_key(federation: Federation) -> Hashable:
    """A key that is equal for runs with the same plans and batches in every round."""
    engine = _local(federation)
    tensors: Tree = {
        **federation.state.schedule,
        "sizes": engine.host_sizes,
        "first": engine.starts,
    }
    arrays = tuple((name, value.cpu().numpy().tobytes()) for name, value in tensors.items())
    return federation.schedule, engine.seed, arrays
