"""A federation: clients' data, a model and a method, put together and trained round by round."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import read_checkpoint, write_checkpoint
from .core.algorithm import Algorithm, algorithms
from .core.batches import LastBatch
from .core.engine import engines
from .core.learner import Learner, ModelFactory
from .core.losses import Loss
from .core.participation import Costs, Everybody, Participation, participations
from .core.probe import probe
from .core.round import Request, begin_round, finish_round
from .core.schedule import Schedule
from .core.types import EnsembleState, Outcome, Returned, RoundReport
from .data.federated import FederatedData
from .data.options import check_names, whole
from .errors import InputError, StoreError
from .fitting import (
    check_batch_statistics,
    check_outputs,
    find_device,
    find_schedule,
    find_work,
    find_workshop,
)
from .parts import describe, revive
from .predict import Combine, Ensemble
from .vectors import Tree

FILE = "federation.safetensors"
_BY_NAME = ("algorithm", "schedule", "participation")
_CHANGEABLE = (*_BY_NAME, "loss", "engine", "engine_options", "device", "combine")  # by load()


class Federation:
    """Trains K modes on N clients with a federated method.

    Args:
        model: a callable that returns a new nn.Module.
        data: the clients' examples.
        algorithm: the method, such as `FedAvg(lr=0.1)`, or its registered name.
        modes: K.
        strata: Q; None gives each of a round's clients a stratum of its own (and 1 for one mode).
        clients_per_round: M; None takes everybody.
        schedule: registered name, or a Schedule (then `modes`, `strata` and `clients_per_round` are its own).
        participation: who answers and when: registered name, or such as `Devices(ask=130)`, see `participation`.
        epochs, steps, batch_size, last_batch: local work, see `LocalWork`; `last_batch` None is "keep", but "wrap" for
            models with BatchNorm (filler must not enter batch statistics).
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
        if not isinstance(data, FederatedData):
            raise InputError(f"data must be a FederatedData, as from_clients([...]) makes; got {type(data).__name__}.")
        self.data, self.seed, self.combine = data, seed, combine
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise InputError(f"seed must be a whole number of at most 63 bits; got {seed!r}.")
        self.algorithm = algorithms[algorithm]() if isinstance(algorithm, str) else algorithm
        if not isinstance(self.algorithm, Algorithm):
            raise InputError(f"algorithm must be an Algorithm or a registered name; got {type(algorithm).__name__}.")
        self.schedule = find_schedule(schedule, modes, strata, clients_per_round, len(data))
        self.participation = participations[participation]() if isinstance(participation, str) else participation
        if not isinstance(self.participation, Participation):
            raise InputError(f"participation must be one such as Devices(ask=130), or a registered name; "
                             f"got {type(participation).__name__}.")  # fmt: skip
        answering = self.participation.init(len(data), seed)
        planned = self.participation.asking(self.schedule).init(len(data), seed)
        self.learner = Learner(model, loss, data.y[:1], find_device(device), dtype)
        check_outputs(self.learner, data)
        self.algorithm = self.algorithm.bind(find_workshop(self.learner, data))
        work = find_work(self.learner, epochs, steps, batch_size, last_batch)
        self.work = replace(work, batch_size=min(batch_size, int(data.size.max())))
        if self.learner.has_batch_statistics:
            check_batch_statistics(self.learner, data, self.work.batch_size)
        self._engine = (engine, dict(engine_options or {}))
        self._loss = loss if isinstance(loss, str) else None
        check_names(f"engine '{engine}'", engines[engine], self._engine[1], given=("learner", "data", "work", "seed"))
        self.engine = engines[engine](self.learner, data, self.work, seed, **self._engine[1])  # type: ignore[call-arg]
        theta, buffers = self.learner.initial(seed, self.schedule.modes)
        probe(self.algorithm, theta[0])  # what does not return what it must is told so before training
        self.costs = Costs(
            self.algorithm, theta[0], buffers[0].numel() * buffers.element_size(), data.size, self.work, seed
        )
        self.state = EnsembleState(0, self.algorithm.init_mode(theta), buffers, planned, answering)
        self._outcome: tuple[EnsembleState, Outcome] | None = None
        self.seconds = 0.0  # that its rounds have taken here; where runs advance together, its share of them
        _ = self.ensemble  # a wrong `combine` is said before training, not after

    def __repr__(self) -> str:
        """What it is, on one line."""
        name = algorithms.name_of(type(self.algorithm)) or type(self.algorithm).__name__
        return f"Federation({name}, {self.schedule.modes} modes, {len(self.data)} clients, round {self.round})"

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
            request = self.ask()
            returned = self.engine.visit(*request)
            self.foresee()
            report = self.conclude(request, returned)
            self.seconds += time.perf_counter() - started
            yield report

    def ask(self) -> Request:
        """What the next round asks of an engine; changes nothing."""
        return begin_round(self.state, self.algorithm, self.schedule, self.outcome())

    def foresee(self) -> None:
        """Lets the engine prepare the round after the one it is in, where everybody who is asked answers."""
        if self.learner.device.type == "cuda" and isinstance(self.participation, Everybody):
            self.engine.foresee(self.schedule.plan(self.state.schedule, self.round + 1), self.round + 1)

    def conclude(self, request: Request, returned: Returned) -> RoundReport:
        """Ends the round that `ask` began."""
        self.state, report = finish_round(self.state, request, returned, self.schedule, self.outcome())
        if self.algorithm.gathers:
            self.state = replace(self.state, modes=self.engine.agree(self.state.modes))
        self._outcome = None
        return report

    def outcome(self) -> Outcome:
        """Whose answers will count in the next round: a function of the state, and kept until that changes."""
        state = self.state
        if self._outcome is None or self._outcome[0] is not state:
            found = self.participation.outcome(
                state.participation, self.schedule, state.schedule, state.round, self.costs
            )
            self._outcome = (state, found)
        return self._outcome[1]

    @property
    def ensemble(self) -> Ensemble:
        """The K modes as they are now."""
        return Ensemble(
            self.learner, self.state.modes["theta"], self.state.buffers,
            standardise=self.data.standardise, combine=self.combine, input_shape=self.data.x.shape[1:], seed=self.seed,
            predictors=self.algorithm.predictors(self.state.modes),
            tokens=not self.data.x.is_floating_point() and self.data.standardise is None,
        )  # fmt: skip

    def tensors(self) -> Tree:
        """Everything that training changes, by name."""
        return self.state.tensors(self.engine.memory_tensors())

    def restore(self, tensors: Mapping[str, Tensor], round: int) -> None:
        """Puts back what `tensors` gave after `round` rounds."""
        state, memory = EnsembleState.of(tensors, round, self.learner.device)
        expected = {name: tuple(tensor.shape) for name, tensor in self.state.modes.items()}
        got = {name: tuple(tensor.shape) for name, tensor in state.modes.items()}
        if expected != got:
            raise StoreError(f"The checkpoint does not fit: this federation has modes {expected}, the file {got}.")
        self.engine.load_memory(memory)
        self.state = state

    def save(self, folder: str | Path) -> Path:
        """Writes the whole federation, less model and data, to a folder; returns the file."""
        path = Path(folder) / FILE
        facts = {"round": self.round, "settings": self._settings(), "data": _size_of(self.data)}
        tensors = self.tensors()
        if self.engine.writes:
            write_checkpoint(path, tensors, facts)
        return path

    @classmethod
    def load(cls, folder: str | Path, *, model: ModelFactory, data: FederatedData, **changes: Any) -> Federation:
        """A saved federation with its model and data; it continues as if it had never stopped.

        Args:
            changes: arguments that a file cannot hold (a loss or an algorithm that is not registered), or a new engine
                or device.
        """
        tensors, facts = read_checkpoint(Path(folder) / FILE)
        settings = dict(facts["settings"])
        fixed = sorted(set(changes) - set(_CHANGEABLE))
        if fixed:
            raise InputError(f"{', '.join(fixed)} cannot change when a federation is loaded; make a new one instead.")
        if facts["data"] != _size_of(data):
            raise InputError(
                f"The federation in {folder} has {facts['data'][0]} clients with {facts['data'][1]} examples; "
                f"these data have {len(data)} with {len(data.x)}."
            )
        settings.setdefault("participation", {"name": "everybody"})  # files from before there was any other
        for name in (*_BY_NAME, "loss"):
            if settings[name] is None and name not in changes:
                raise InputError(f"The {name} saved in {folder} is not a registered one: pass {name}=... to load().")
        settings["dtype"] = getattr(torch, settings["dtype"])
        for name in _BY_NAME:
            if name not in changes:
                settings[name] = revive(settings[name])
        federation = cls(model, data, **{**settings, **changes})
        federation.restore(tensors, facts["round"])
        return federation

    def _settings(self) -> dict[str, Any]:
        return {
            "algorithm": describe(self.algorithm),
            "schedule": describe(self.schedule),
            "participation": describe(self.participation),
            "epochs": self.work.epochs,
            "steps": self.work.steps,
            "batch_size": self.work.batch_size,
            "last_batch": self.work.last_batch,
            "loss": self._loss,
            "engine": self._engine[0],
            "engine_options": self._engine[1],
            "combine": self.combine,
            "device": str(self.learner.device),
            "dtype": str(self.learner.dtype).removeprefix("torch."),
            "seed": self.seed,
        }


def _size_of(data: FederatedData) -> list[int]:
    """Clients and examples: enough to notice other data without reading all of them."""
    return [len(data), len(data.x)]
