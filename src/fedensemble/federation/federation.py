"""A federation: clients' data, a model and a method, put together and trained round by round."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import whole
from ..checkpoint import write_checkpoint
from ..core.aggregator import STATISTICS, Aggregator, check_aggregator, few_clients, gathering
from ..core.algorithm import Algorithm, algorithms
from ..core.attack import Attack, corrupt
from ..core.batches import LastBatch
from ..core.participation import Costs, Everybody, Participation
from ..core.probe import probe
from ..core.round import Request, finish_round, start_round
from ..core.schedule import Schedule
from ..core.types import EnsembleState, Outcome, Plan, RoundReport, RoundResult
from ..data.federated import FederatedData
from ..errors import AggregatorWarning, EngineWarning, FedEnsembleError, StoreError, first_line
from ..flat_params import Tree, rows
from ..modeling.factory import ModelFactory
from ..modeling.functional_model import FunctionalModel
from ..modeling.losses import Loss
from ..predict import Combine, Ensemble
from ..runtime.oom import out_of_memory
from ..text import as_path
from . import memory_limits, resolve, serialization


class Federation:
    """Trains K modes on N clients with a federated method.

    Args:
        model: a callable that returns a new nn.Module.
        data: the clients' examples.
        algorithm: the method, such as `FedAvg(lr=0.1)`, or its registered name.
        modes: K.
        strata: Q; None gives each of a round's clients a stratum of its own (and 1 for one mode).
        clients_per_round: M; None takes everybody.
        schedule: registered name, or a Schedule (then `modes`, `strata` and `clients_per_round` are
            its own).
        participation: who answers and when: registered name, or such as `Devices(ask=130)`, see
            `participation`.
        aggregator: how a mode's uploads are combined: registered name, or such as `Median()`;
            "mean" is the default.
        attack: a simulated attack: registered name, or such as `SignFlip(share=0.1)`; None for
            honest clients only.
        epochs, steps, batch_size, last_batch: local work, see `LocalWork`; `last_batch` None is
            "keep", but "wrap" for models with BatchNorm (filler must not enter batch statistics).
        loss: "cross_entropy", "mse" or a callable of outputs and targets.
        engine: "vector" (all clients at once) or "loop" (one after another); the numbers agree.
        engine_options: such as `block` for "vector".
        combine: how modes are averaged in predictions.
        device: "cpu", "cuda" or "auto".
        dtype: of weights and arithmetic, torch.float32 or torch.float64.
        seed: of everything random.

    >>> from torch import nn
    >>> from fedensemble.algorithms import FedAvg
    >>> clients = [([[0.0], [0.1]], [0, 0]), ([[1.0], [0.9]], [1, 1])]
    >>> federation = Federation(lambda: nn.Linear(1, 2), FederatedData.from_clients(clients), FedAvg(lr=1.0), modes=2)
    >>> [report.age for report in federation.rounds(4)]
    [1, 1, 2, 2]
    """

    def __init__(
        self,
        model: ModelFactory,
        data: FederatedData,
        algorithm: Algorithm | str = "fedavg",
        *,
        modes: int = 5,
        strata: int | None = None,
        clients_per_round: int | None = None,
        schedule: str | Schedule = "stratified",
        participation: str | Participation = "everybody",
        aggregator: str | Aggregator = "mean",
        attack: str | Attack | None = None,
        epochs: int = 1,
        steps: int | None = None,
        batch_size: int = 32,
        last_batch: LastBatch | None = None,
        loss: str | Loss = "cross_entropy",
        engine: str = "vector",
        engine_options: Mapping[str, Any] | None = None,
        combine: Combine | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        resolve.check_data(data)
        resolve.check_seed(seed)
        self.data, self.seed, self.combine = data, seed, combine
        self.algorithm = resolve.resolve_algorithm(algorithm)
        self.schedule = resolve.resolve_schedule(
            schedule, modes, strata, clients_per_round, len(data)
        )
        self.participation = resolve.resolve_participation(participation)
        self.aggregator, self.attack = (
            resolve.find_aggregator(aggregator),
            resolve.find_attack(attack),
        )
        # bool [N]
        self.malicious = None if self.attack is None else self.attack.malicious(len(data), seed)
        answering = self.participation.init(len(data), seed)
        planned = self.participation.asking(self.schedule).init(len(data), seed)
        memory_limits.check_recipe(model, self.schedule.modes, resolve.find_device(device), dtype)
        self.learner = FunctionalModel(model, loss, data.y[:1], resolve.find_device(device), dtype)
        memory_limits.check_room(self.learner, self.schedule.modes)
        memory_limits.check_range(data, dtype)
        resolve.check_outputs(self.learner, data)
        self.algorithm = self.algorithm.bind(
            resolve.resolve_server_context(self.learner, data, self.schedule)
        )
        work = resolve.resolve_work(self.learner, epochs, steps, batch_size, last_batch)
        self.work = replace(work, batch_size=min(batch_size, int(data.size.max())))
        resolve.check_training(self.learner, data, self.work.batch_size)
        self._engine = (engine, resolve.find_options(engine_options))
        trained_on = resolve.poison(data, self.attack, self.malicious)
        self.engine = resolve.resolve_engine(
            *self._engine, self.learner, trained_on, self.work, seed
        )
        for note in self.engine.notes:
            warnings.warn(note, EngineWarning, stacklevel=2)
        theta, buffers = self.learner.initial(seed, self.schedule.modes)
        check_aggregator(self.aggregator, self.algorithm, theta[0])
        if self.aggregator.gathers or (self.attack is not None and self.attack.forges):
            self.algorithm = gathering(self.algorithm)
        if self.aggregator_note:
            warnings.warn(self.aggregator_note, AggregatorWarning, stacklevel=2)
        # what does not return what it must is told so before training
        probe(self.algorithm, theta[0])
        carried = buffers[0].numel() * buffers.element_size()
        self.costs = Costs(self.algorithm, theta[0], carried, data.size, self.work, seed)
        self.state = EnsembleState(0, self.algorithm.init_mode(theta), buffers, planned, answering)
        self._outcome: tuple[EnsembleState, Outcome] | None = None
        self._foreseen: tuple[Tree, int, Plan] | None = None
        # that its rounds have taken here; where runs advance together, its share of them
        self.seconds = 0.0
        _ = self.ensemble  # a wrong `combine` is said before training, not after

    def __repr__(self) -> str:
        """What it is, on one line."""
        name = algorithms.name_of(type(self.algorithm)) or type(self.algorithm).__name__
        return f"Federation({name}, {self.schedule.modes} modes, {len(self.data)} clients, round {self.round})"

    @property
    def aggregator_note(self) -> str:
        """What is to be said where too few clients train a mode per round for the aggregator; empty
        otherwise.
        """
        schedule = self.schedule
        apart = schedule.modes if schedule.one_mode_a_client else 1
        return few_clients(self.aggregator, min(schedule.clients_per_round, len(self.data)) / apart)

    @property
    def round(self) -> int:
        """Rounds done."""
        return self.state.round

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Trains `count` more rounds, one for each report taken."""
        return self._rounds(whole("rounds()", "count", count))

    def _rounds(self, count: int) -> Iterator[RoundReport]:
        for _ in range(count):
            started = time.perf_counter()
            request, told = self.ask(), len(self.engine.notes)
            returned = self.engine.visit(*request)
            for note in self.engine.notes[told:]:
                warnings.warn(note, EngineWarning, stacklevel=3)
            if self.learner.device.type == "cuda":  # which is busy now
                self.foresee()
            report = self.conclude(request, returned)
            self.seconds += time.perf_counter() - started
            yield report

    def ask(self) -> Request:
        """What the next round asks of an engine; changes nothing."""
        return start_round(self.state, self.algorithm, self.schedule, self.outcome())

    def foresee(self) -> None:
        """Lets the engine prepare the round after the one it is in, where it is known who that will
        ask.
        """
        if (
            type(self.participation) is Everybody
            and type(self.schedule).observe is Schedule.observe
        ):
            plan = self.schedule.plan(self.state.schedule, self.round + 1)
            self._foreseen = (self.state.schedule, self.round + 1, plan)
            self.engine.foresee(plan, self.round + 1)

    def conclude(self, request: Request, returned: RoundResult) -> RoundReport:
        """Ends the round that `ask` began."""
        if self.attack is not None and self.malicious is not None and self.attack.forges:
            algorithm, sent, buffers, _, round = request
            returned = corrupt(
                self.attack, self.malicious, self.seed, round, algorithm, sent, buffers, returned
            )
        state, report = finish_round(
            self.state, request, returned, self.schedule, self.outcome(), self.aggregator
        )
        if self.algorithm.gathers:
            agreed = self.engine.agree({**state.modes, STATISTICS: state.buffers})
            state = replace(state, buffers=agreed.pop(STATISTICS), modes=agreed)
        self.engine.commit()  # a round that fails leaves no trace: all stays as it was before it
        self.state, self._outcome = state, None
        return report

    def outcome(self) -> Outcome:
        """Whose answers will count in the next round: a function of the state, and kept until that
        changes.
        """
        state, foreseen = self.state, self._foreseen
        if self._outcome is None or self._outcome[0] is not state:
            if (
                foreseen is not None
                and foreseen[0] is state.schedule
                and foreseen[1] == state.round
            ):
                found = Outcome(foreseen[2], state.participation)
            else:
                found = self.participation.outcome(
                    state.participation,
                    self.schedule,
                    state.schedule,
                    state.round,
                    self.costs.seeing(self._look),
                )
            self._outcome = (state, found)
        return self._outcome[1]

    def _look(self, plan: Plan) -> tuple[Tree, Tree]:
        """What the next round sends to a plan's visits, and what their clients remember, [J, ...]
        each.
        """
        sent, mode = self.algorithm.broadcast(self.state.modes), plan.mode.to(self.learner.device)
        fresh = self.algorithm.init_memory(sent["theta"])
        return rows(sent, mode), self.engine.read_memory(plan, rows(fresh, mode))

    @property
    def ensemble(self) -> Ensemble:
        """The K modes as they are now."""
        return Ensemble(
            self.learner,
            self.state.modes["theta"],
            self.state.buffers,
            standardise=self.data.standardise,
            combine=self.combine,
            input_shape=self.data.x.shape[1:],
            seed=self.seed,
            predictors=self.algorithm.predictors(self.state.modes),
            tokens=not self.data.x.is_floating_point() and self.data.standardise is None,
        )

    def tensors(self) -> Tree:
        """Everything that training changes, by name."""
        return self.state.tensors(self.engine.memory_tensors())

    def checkpoint_tensors(self) -> Tree:
        """`tensors()`, and the engine's choices that decide the last bits of results; every rank
        must ask.
        """
        return {
            **self.tensors(),
            **{f"engine/{name}": value for name, value in self.engine.numerics().items()},
        }

    def restore(self, tensors: Mapping[str, Tensor], round: int) -> None:
        """Puts back what `tensors` or `checkpoint_tensors` gave after `round` rounds.

        Raises StoreError if they are not of this federation.
        """
        whole("restore()", "round", round)
        if "buffers" not in tensors:
            raise StoreError("The checkpoint does not fit: it has no entry 'buffers'.")
        read, memory = EnsembleState.of(tensors, round, self.learner.device)
        self.algorithm.check_state(read.modes)
        # Server state that a method did not have when the file was written is zero.
        new = {
            name: torch.zeros_like(t)
            for name, t in self.state.modes.items()
            if name not in read.modes
        }
        read = replace(read, modes={**read.modes, **new})
        before, state = (
            self.state,
            serialization.fitted(
                self.state, read, observes=type(self.schedule).observe is not Schedule.observe
            ),
        )
        memory = serialization.fitted_memory(
            memory, self.algorithm, state.modes["theta"], len(self.data)
        )
        choices = {
            n.removeprefix("engine/"): value
            for n, value in tensors.items()
            if n.startswith("engine/")
        }
        self.state = state
        try:
            serialization.check_plan(self.outcome().plan, len(self.data), self.schedule.modes)
            self.engine.load_memory(memory)
            self.engine.keep_numerics(choices)
        except (LookupError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            self.state = before
            if isinstance(error, FedEnsembleError) or out_of_memory(error):
                raise
            raise StoreError(f"The checkpoint does not fit: {first_line(error)}.") from error
        except StoreError:
            self.state = before
            raise

    def save(self, folder: str | Path) -> Path:
        """Writes the whole federation, less model and data, to a folder; returns the file.

        Where clients keep something between visits, only this user may read the file.
        """
        path = as_path(folder) / serialization.FILE
        facts = {
            "round": self.round,
            "settings": self._settings(),
            "data": serialization.size_of(self.data),
        }
        tensors = self.checkpoint_tensors()
        if self.engine.writes:
            write_checkpoint(
                path, tensors, facts, private=any(name.startswith("memory/") for name in tensors)
            )
        return path

    @classmethod
    def load(
        cls, folder: str | Path, *, model: ModelFactory, data: FederatedData, **changes: Any
    ) -> Federation:
        """A saved federation with its model and data; it continues as if it had never stopped.

        Args:
            changes: arguments that a file cannot hold (a loss or an algorithm that is not
                registered), or a new engine or device.
        """
        settings, tensors, round = serialization.read(folder, data, changes)
        federation = cls(model, data, **settings)
        # another engine, or other options, make their own choices
        if {"engine", "engine_options"} & set(changes):
            tensors = {
                name: value for name, value in tensors.items() if not name.startswith("engine/")
            }
        federation.restore(tensors, round)
        return federation

    def _settings(self) -> dict[str, Any]:
        return serialization.settings_of(
            self.algorithm,
            self.schedule,
            self.participation,
            self.aggregator,
            self.attack,
            self.work,
            self.learner,
            self._engine,
            combine=self.combine,
            seed=self.seed,
        )
