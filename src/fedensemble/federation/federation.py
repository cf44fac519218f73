"""A federation: clients' data, a model and an algorithm, trained round by round."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import require_integer
from ..client_metrics import ClientMetrics
from ..core.aggregator import Aggregator, check_aggregator, few_clients, gathering
from ..core.algorithm import Algorithm, algorithms
from ..core.attack import Attack, corrupt
from ..core.average import NO_AVERAGE, Average, NoAverage, check_average, prediction_models
from ..core.parameters.shared import check_patterns
from ..core.participation import Costs, Everybody, Participation
from ..core.probe import probe
from ..core.round import Request, run_round, start_round
from ..core.schedule import Schedule
from ..core.types import EnsembleState, Outcome, Plan, RoundReport, RoundResult
from ..core.visits.batches import LastBatch
from ..core.visits.joint import check_joint, join_modes, join_plan, visit_vectors
from ..data.federated import FederatedData
from ..display import federation_table
from ..errors import (
    AggregatorWarning,
    EngineWarning,
    FedEnsembleError,
    InputError,
    StoreError,
    first_line,
    setting,
)
from ..flat_params import Tree, select_rows
from ..modeling.factory import ModelFactory
from ..modeling.functional_model import FunctionalModel
from ..modeling.losses import Loss
from ..predict import Ensemble, check_dropout_samples
from ..prediction import Combine, Prediction
from ..runtime.oom import out_of_memory
from ..uncertainty.calibration import Calibration
from ..uncertainty.calibration_settings import CalibrationSettings
from . import (
    calibration,
    memory_limits,
    named_models,
    personal_models,
    preflight,
    resolve,
    run_files,
    serialization,
    training,
)
from .history import History
from .mode_bank import ModeBank, own_models


class Federation:
    """Trains K modes on N clients with a federated algorithm.

    Args:
        model: a callable that returns a new nn.Module, or a registered model: its name, or a dict
            with the name and options, {"name": "mlp", "hidden": [64]}.
        data: the clients' examples.
        algorithm: registered name, an Algorithm such as `FedAvg(lr=0.1)`, or a dict with the name
            and options, {"name": "fedavg", "lr": 0.1}. The arguments participation, aggregator,
            attack and average take such a dict, too.
        modes: K, the number of models in the ensemble.
        strata: Q, the number of strata. None gives each client of a round a stratum of its own, and
            takes 1 stratum for one mode.
        clients_per_round: M, the number of clients per round; None takes all clients.
        schedule: registered name, or a Schedule. A Schedule has `modes`, `strata` and
            `clients_per_round` of its own, and the arguments above are ignored.
        shared: patterns of the names of parameters that all modes have in common, such as
            ["body.*"]; they are averaged over all visits of a round. None shares nothing.
        personal: patterns of the names of parameters that each client keeps for itself, such as
            ["head.*"], or of BatchNorm layers; they never travel. None for none.
        alternate: with `personal`, a visit trains the personal parameters first, for all its local
            steps, and then the others (FedRep); otherwise both together (FedPer).
        participation: which clients reply and when: registered name, or a Participation such as
            `Devices(ask=130)`.
        aggregator: how the uploads of a mode are combined: registered name, or an Aggregator such
            as `Median()`.
        attack: a simulated attack: registered name, or an Attack such as `SignFlip(share=0.1)`;
            None if all clients are honest.
        average: which models predict: registered name, or an Average such as `EMA(decay=0.9)`. It
            changes predictions only, not training; by default, the current modes predict.
        epochs, steps, batch_size, last_batch: local work per round, see `LocalWork`. With
            `last_batch=None`, models with BatchNorm use "wrap", because padding must not enter
            batch statistics; other models use "keep".
        loss: "cross_entropy", "bce" (two classes, one output), "mse" or a callable of outputs and
            targets.
        engine: "vector" (many clients at once) or "loop" (one client after another). Both give the
            same results up to rounding.
        engine_options: options of the engine, such as `block` for "vector".
        combine: how the predictions of the modes are averaged, see `Ensemble`.
        dropout_samples: MC-dropout: number of predictions of each model with dropout active; 0
            predicts without dropout. It changes predictions only, not training.
        device: "cpu", "cuda" or "auto".
        dtype: of parameters and arithmetic, torch.float32 or torch.float64.
        seed: of all random values.

    >>> from torch import nn
    >>> from fedensemble.algorithms import FedAvg
    >>> clients = [([[0.0], [0.1]], [0, 0]), ([[1.0], [0.9]], [1, 1])]
    >>> data = FederatedData.from_clients(clients)
    >>> federation = Federation(lambda: nn.Linear(1, 2), data, FedAvg(lr=1.0), modes=2)
    >>> [report.age for report in federation.rounds(4)]
    [1, 1, 2, 2]
    """

    def __init__(
        self,
        model: ModelFactory | resolve.Spec,
        data: FederatedData,
        algorithm: Algorithm | resolve.Spec = "fedavg",
        *,
        modes: int = 5,
        strata: int | None = None,
        clients_per_round: int | None = None,
        schedule: str | Schedule = "balanced",
        shared: Sequence[str] | None = None,
        personal: Sequence[str] | None = None,
        alternate: bool | None = None,
        participation: resolve.Spec | Participation = "everybody",
        aggregator: resolve.Spec | Aggregator = "mean",
        attack: resolve.Spec | Attack | None = None,
        average: resolve.Spec | Average = "none",
        epochs: int = 1,
        steps: int | None = None,
        batch_size: int = 32,
        last_batch: LastBatch | None = None,
        loss: str | Loss = "cross_entropy",
        engine: str = "vector",
        engine_options: Mapping[str, Any] | None = None,
        combine: Combine | None = None,
        dropout_samples: int = 0,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        # The order of the checks is part of the interface: of several mistakes, the error message
        # names the first. `preflight` lists all checks.
        started = time.perf_counter()
        preflight.check_arguments(data, seed)
        self.data, self.seed, self.combine = data, seed, combine
        self.shared, self.dropout_samples = (
            check_patterns(shared),
            check_dropout_samples("Federation", dropout_samples),
        )
        self.personal = check_patterns(personal, setting("ensemble.personal"))
        self.alternate = resolve.resolve_alternate(alternate, self.personal)
        self.algorithm = resolve.resolve_algorithm(algorithm)
        self.schedule = resolve.resolve_schedule(
            schedule, modes, strata, clients_per_round, len(data)
        )
        self.participation = resolve.resolve_participation(participation, self.algorithm)
        self.aggregator = resolve.resolve_aggregator(aggregator)
        self.attack = resolve.resolve_attack(attack)
        self.average = resolve.resolve_average(average)
        forges = check_joint(self.algorithm, self.schedule, self.attack)
        # bool [N]
        self.malicious = None if self.attack is None else self.attack.malicious(len(data), seed)
        participation_state = self.participation.init(len(data), seed)
        schedule_state = self.participation.selection_schedule(self.schedule).init(len(data), seed)

        # The model: its size is checked before it is built, its outputs and loss afterwards.
        torch_device = resolve.select_device(device)
        model = named_models.resolve_model(model, data, loss)
        memory_limits.check_recipe(model, self.schedule.modes, torch_device, dtype)
        self.model = FunctionalModel(model, loss, data.y[:1], torch_device, dtype)
        preflight.check_model(self.model, data, self.schedule.modes, self.dropout_samples)
        self.algorithm = self.algorithm.bind(
            resolve.resolve_server_context(self.model, data, self.schedule)
        )

        # Local work and the engine that runs it.
        work = resolve.resolve_work(self.model, epochs, steps, batch_size, last_batch)
        self.work = replace(work, batch_size=min(batch_size, int(data.size.max())))
        preflight.check_training(self.model, data, self.work.batch_size)
        self._engine = (engine, resolve.resolve_engine_options(engine_options))
        self.engine = resolve.resolve_engine(
            *self._engine,
            self.model,
            resolve.poison_labels(data, self.attack, self.malicious),
            self.work,
            seed,
            self.schedule,
        )
        for note in self.engine.notes:
            warnings.warn(note, EngineWarning, stacklevel=2)

        # The modes and the server.
        initial = self.model.init_params(seed, self.schedule.modes)
        theta, buffers = self.algorithm.start_modes(*initial)
        visit_theta, visit_buffers = visit_vectors(self.algorithm, theta, buffers)
        check_aggregator(self.aggregator, self.algorithm, visit_theta)
        check_average(self.average, self.algorithm)
        memory_limits.check_average_memory(self.average, theta, buffers)
        if self.aggregator.gathers or forges:
            self.algorithm = gathering(self.algorithm)
        if self.aggregator_note:
            warnings.warn(self.aggregator_note, AggregatorWarning, stacklevel=2)
        if self.personal:
            self.algorithm = resolve.resolve_personal(
                self.personal, self.alternate, self.shared, self.model, self.algorithm, initial
            )
            theta, buffers = self.algorithm.start_modes(*initial)
        probe(self.algorithm, visit_theta)
        self._shared = resolve.resolve_shared(
            self.shared, self.model, self.algorithm, self.schedule, theta[0]
        )
        if self._shared is not None:
            theta, buffers = self._shared.copy_first(theta, buffers)
        self.costs = Costs(
            self.algorithm,
            visit_theta,
            self.algorithm.buffer_bytes(visit_buffers),
            data.size,
            self.work,
            seed,
        )
        self.state = EnsembleState(
            0,
            self.algorithm.init_mode(theta),
            buffers,
            schedule_state,
            participation_state,
            self.average.init(theta, buffers),
        )
        self._start_records()
        # Raises now, not after training, if `combine` is wrong.
        self._make_ensemble(NO_AVERAGE)
        preflight.log_checks(self.schedule.modes, time.perf_counter() - started, self.visit_memory)

    def _start_records(self) -> None:
        """Sets the history and what is kept between rounds, none of which changes training."""
        # The outcome of the next round, with the state that it was computed from.
        self._outcome: tuple[EnsembleState, Outcome] | None = None
        # The plan of a later round, with the schedule's state and the round that it is for.
        self._prefetched: tuple[Tree, int, Plan] | None = None
        # The models of all clients, with the state that they belong to.
        self._own: tuple[EnsembleState, ModeBank] | None = None
        self.history = History()
        # The last calibration, with the state that it is for.
        self._calibrated: tuple[EnsembleState, Calibration] | None = None
        # Settings of the run folder that this federation was loaded from; `save` keeps them.
        self.run_settings: dict[str, Any] = {}
        # Wall-clock time of the rounds; of runs that advance together, this run's share.
        self.seconds = 0.0
        self.trained_together = 1  # runs in the largest batch so far, this one included

    def __repr__(self) -> str:
        """The algorithm, the modes, the clients and the round, on one line."""
        return (
            f"Federation({self._algorithm_name()}, {self.schedule.modes} modes, "
            f"{len(self.data)} clients, round {self.round})"
        )

    def _repr_html_(self) -> str:
        return federation_table(self, self._algorithm_name())

    def _algorithm_name(self) -> str:
        kind = type(self.algorithm.base)
        return algorithms.name_of(kind) or kind.__name__

    @property
    def aggregator_note(self) -> str:
        """A warning if too few clients train a mode per round for the aggregator; empty if not."""
        schedule = self.schedule
        modes_sharing_clients = schedule.modes if schedule.one_mode_per_client else 1
        clients = min(schedule.clients_per_round, len(self.data))
        return few_clients(self.aggregator, clients / modes_sharing_clients)

    @property
    def visit_memory(self) -> memory_limits.VisitMemory:
        """Bytes of the parts of a visit, and the size of a block; as text, one line."""
        return memory_limits.visit_memory(
            self.engine, self.algorithm, self.costs.messages, self.model.frozen_bytes
        )

    @property
    def round(self) -> int:
        """Number of completed rounds."""
        return self.state.round

    def rounds(self, count: int) -> Iterator[RoundReport]:
        """Trains `count` more rounds lazily: each report that the caller takes runs one round."""
        return training.Rounds(self, count)

    def train(
        self,
        count: int,
        callback: training.Callback | None = None,
        *,
        test_every: int | None = None,
    ) -> list[RoundReport]:
        """Trains `count` more rounds; returns their reports.

        A progress bar is shown on a terminal and in a notebook.

        Args:
            callback: called with the report of each round; training stops if it returns True.
            test_every: rounds between tests on the data's test set, which `history` records; the
                last round has one, too. None tests nothing.
        """
        return training.train(self, count, callback, test_every)

    def predict(self, x: Any, **options: Any) -> Prediction:
        """The prediction of the current modes for inputs; the options of `Ensemble.predict`."""
        return self.ensemble.predict(x, **options)

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        *,
        ood: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """All metrics of the current modes by name, on the data's test set or on x and y.

        `history` records metrics on the test set.

        Args:
            x, y: inputs and targets; None for the test set.
            ood: inputs out of distribution, by a name for them; how well each score of uncertainty
                finds them is added as "ood/<name>/<score>/<metric>", see `ood_metrics`.
            options: of `Ensemble.predict`.
        """
        return training.evaluate_federation(self, x, y, ood, **options)

    def evaluate_clients(
        self, *, new: bool = False, own: bool | None = None, **options: Any
    ) -> ClientMetrics:
        """Metrics of each client on its own test rows, `data.test_owner`.

        Args:
            new: whether to test the clients that are not trained on, `data.new_clients`. They have
                no models of their own.
            own: whether each client predicts with its own models, see `personal_models`; by
                default, if there are personal parameters.
            options: of `Ensemble.predict`.
        """
        return training.evaluate_federation_clients(self, new=new, own=own, **options)

    def personal_ensemble(self, client: int) -> Ensemble:
        """The ensemble of a client's own K models; see `personal_models`."""
        index = require_integer("personal_ensemble()", "client", client, 0)
        if index >= len(self.data):
            raise InputError(
                f"personal_ensemble() needs a client below {len(self.data)}; got {index}."
            )
        return own_models(self).of_client(index)

    def calibrate(self, alpha: float = 0.1, **settings: Any) -> Calibration:
        """Calibrates the current modes by the clients' calibration rows; returns the result.

        Clients evaluate all modes on rows that were not trained on (`FederatedData.calibration`),
        and send sums and histograms. Predictions then have calibrated probabilities, and
        `Prediction.sets` or `Prediction.interval`, until the modes are trained further.

        Args:
            alpha: share of targets that may be outside of prediction sets or intervals.
            settings: method, temperature, scope and others; see `CalibrationSettings`.
        """
        if self.personal:
            raise InputError(
                "calibrate() calibrates one ensemble for all clients, and with personal parameters "
                "each client has another."
            )
        try:
            chosen = CalibrationSettings(alpha=alpha, **settings)
        except TypeError as error:
            raise InputError(f"calibrate(): {first_line(error)}.") from None
        made = calibration.calibrate(self, chosen)
        self.restore_calibration(made)
        return made

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the current modes; None if there is none."""
        calibrated = self._calibrated
        return calibrated[1] if calibrated and calibrated[0] is self.state else None

    def restore_calibration(self, made: Calibration | None) -> None:
        """Takes over a calibration of the current modes, such as a saved one."""
        self._calibrated = None if made is None else (self.state, made)

    def run_round(self, result: RoundResult | None = None) -> RoundReport:
        """Runs one round; returns its report. `rounds` is the usual way to train.

        Args:
            result: what the engine returned for `next_request()`, if the round's clients were
                trained already, as in a batch of several runs.
        """

        def train_clients(request: Request) -> RoundResult:
            trained = self._run_visits(request) if result is None else result
            return self._simulate_attack(request, trained)

        state, report = run_round(
            self.state,
            algorithm=self.algorithm,
            schedule=self.schedule,
            engine=self.engine,
            aggregator=self.aggregator,
            average=self.average,
            outcome=self.outcome(),
            request=self.next_request(),
            train_clients=train_clients,
            shared=self._shared,
        )
        self.accept_round(state, report)
        return report

    def accept_round(self, state: EnsembleState, report: RoundReport) -> None:
        """Continues from the state after a round, which may have been computed elsewhere."""
        self.state, self._outcome = state, None
        self.history.add(report)

    def next_request(self) -> Request:
        """The next round's request to the engine; changes nothing."""
        return start_round(self.state, self.algorithm, self.schedule, self.outcome())

    def _run_visits(self, request: Request) -> RoundResult:
        """Trains the request's clients; passes new notes of the engine on as warnings."""
        notes_before = len(self.engine.notes)
        result = self.engine.run_visits(*request)
        for note in self.engine.notes[notes_before:]:
            warnings.warn(note, EngineWarning, stacklevel=6)
        # Kernels run asynchronously: while the GPU works, the CPU prepares the next round.
        if self.model.device.type == "cuda":
            self.prefetch_round()
        return result

    def prefetch_round(self) -> None:
        """Lets the engine prefetch the round after the current one, if its plan is known.

        The plan is known if all clients reply and the schedule does not depend on losses.
        """
        if (
            type(self.participation) is Everybody
            and not self.participation.stragglers
            and type(self.schedule).observe is Schedule.observe
            and not self.algorithm.joint  # whose visits have another plan
        ):
            plan = self.schedule.plan(self.state.schedule, self.round + 1)
            self._prefetched = (self.state.schedule, self.round + 1, plan)
            self.engine.prefetch(plan, self.round + 1)

    def _simulate_attack(self, request: Request, result: RoundResult) -> RoundResult:
        """The result with the uploads of malicious clients replaced, if an attack is simulated."""
        if self.attack is None or self.malicious is None or not self.attack.forges:
            return result
        algorithm, sent, buffers, _, round = request
        return corrupt(
            self.attack, self.malicious, self.seed, round, algorithm, sent, buffers, result
        )

    def outcome(self) -> Outcome:
        """The visits of the next round whose replies count; cached until the state changes."""
        state, prefetched = self.state, self._prefetched
        if self._outcome is None or self._outcome[0] is not state:
            if (
                prefetched is not None
                and prefetched[0] is state.schedule
                and prefetched[1] == state.round
            ):
                outcome = Outcome(prefetched[2], state.participation)
            else:
                outcome = self.participation.outcome(
                    state.participation,
                    self.schedule,
                    state.schedule,
                    state.round,
                    self.costs.seeing(self._look_up_messages),
                )
                if not self.participation.limits_steps:
                    plan = self.participation.limit_steps(outcome.plan, state.round, self.costs)
                    outcome = outcome._replace(plan=plan)
            self._outcome = (state, outcome)
        return self._outcome[1]

    def _look_up_messages(self, plan: Plan) -> tuple[Tree, Tree]:
        """What the next round sends to each visit of a plan, and its client state, [J, ...]."""
        sent = self.algorithm.broadcast(self.state.modes)
        if self.algorithm.joint:
            sent, plan = join_modes(sent), join_plan(plan)
        mode = plan.mode.to(self.model.device)
        fresh = self.algorithm.init_client_state(sent["theta"])
        return select_rows(sent, mode), self.engine.read_client_state(
            plan, select_rows(fresh, mode)
        )

    @property
    def ensemble(self) -> Ensemble:
        """The K modes, or their averages over rounds if there is an `average`, ready to predict."""
        return self._make_ensemble(self.average, self.calibration)

    @property
    def uncalibrated(self) -> Ensemble:
        """The ensemble without its calibration."""
        return self._make_ensemble(self.average)

    @property
    def last_ensemble(self) -> Ensemble | None:
        """The K modes in their current state, without the average; None if there is no average."""
        return None if isinstance(self.average, NoAverage) else self._make_ensemble(NO_AVERAGE)

    def _make_ensemble(self, average: Average, calibration: Calibration | None = None) -> Ensemble:
        models = prediction_models(self.state, self.algorithm, average, self.seed)
        return Ensemble(
            self.model,
            **models._asdict(),
            standardise=self.data.standardise,
            combine=self.combine,
            input_shape=self.data.x.shape[1:],
            seed=self.seed,
            tokens=not self.data.x.is_floating_point() and self.data.standardise is None,
            class_names=self.data.class_names,
            feature_names=self.data.feature_names,
            shared=None if self._shared is None else self._shared.parameters,
            trained=self.round > 0,
            calibration=calibration,
            dropout_samples=self.dropout_samples,
        )

    def personal_models(self, clients: Sequence[int] | Tensor) -> personal_models.PersonalModels:
        """Parameters [n, K, P] and running statistics [n, K, R] of n clients' own models.

        A client that has never trained a mode has the model with which it would start. For
        algorithms without personal models, all clients have the modes themselves. With torchrun it
        is a collective call, on every rank.
        """
        return personal_models.personal_models(self, clients)

    def personal_weights(self, clients: Sequence[int] | Tensor) -> Tensor:
        """The weights of the K modes in the predictions of n clients, [n, K]; they sum to 1.

        `fedem` learns them, and `ifca` has one mode per client. They are equal for clients that
        were never trained on, and for all other algorithms. With torchrun it is a collective call,
        on every rank.
        """
        return personal_models.personal_weights(self, clients)

    def tensors(self) -> Tree:
        """All tensors that training changes, by name."""
        return self.state.tensors(self.engine.client_state_tensors())

    def checkpoint_tensors(self) -> Tree:
        """`tensors()` and the engine's numerical choices; a collective call, on every rank.

        The choices, such as the block size, affect the last bits of results.
        """
        tensors = {
            **self.tensors(),
            **{f"engine/{name}": value for name, value in self.engine.numerics().items()},
        }
        return serialization.with_frozen(tensors, self.model)

    def restore(self, tensors: Mapping[str, Tensor], round: int) -> None:
        """Restores the tensors that `tensors` or `checkpoint_tensors` returned.

        Raises StoreError if they do not fit this federation; the federation is then unchanged.

        Args:
            round: number of completed rounds at that time.
        """
        tensors = serialization.check_frozen(tensors, self.model)
        state, memory, numerics = serialization.read_state(
            tensors, round, self.state, self.algorithm, self.schedule, len(self.data)
        )
        before, self.state = self.state, state
        try:
            serialization.check_plan(self.outcome().plan, len(self.data), self.schedule.modes)
            self.engine.load_client_state(memory)
            self.engine.load_numerics(numerics)
        except (LookupError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            self.state = before
            if isinstance(error, FedEnsembleError) or out_of_memory(error):
                raise
            raise StoreError(f"The checkpoint does not fit: {first_line(error)}.") from error
        except StoreError:
            self.state = before
            raise

    def save(self, folder: str | Path) -> Path:
        """Writes a run folder, without model and data; returns its path.

        `Federation.load` continues from it, `load_ensemble` and `fedensemble predict` predict with
        it, and `report` and `fedensemble report` show it. A federation that was saved there before
        is replaced. Checkpoints, which may hold client state, can be read by this user only.
        """
        return run_files.save(self, folder)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        model: ModelFactory | resolve.Spec | None = None,
        data: FederatedData | None = None,
        **changes: Any,
    ) -> Federation:
        """A saved federation, or a run of the command line; training continues where it stopped.

        Args:
            model, data: those of the training; None builds them from the settings in the folder, if
                they have names there.
            changes: arguments that a file cannot hold, such as a loss or an algorithm that is not
                registered, or a new engine or device.
        """
        return run_files.load(cls, folder, model, data, changes)

    def settings(self) -> dict[str, Any]:
        """The arguments without model and data, as values that a file can hold."""
        return serialization.settings_of(
            self.algorithm.base,
            self.schedule,
            self.participation,
            self.aggregator,
            self.attack,
            self.average,
            self.work,
            self.model,
            self._engine,
            shared=self.shared,
            personal=self.personal,
            alternate=self.alternate,
            combine=self.combine,
            dropout_samples=self.dropout_samples,
            seed=self.seed,
        )
