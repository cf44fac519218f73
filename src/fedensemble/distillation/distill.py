"""Trains one model, the student, to predict what an ensemble predicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .. import prng
from ..arguments import (
    require_bool,
    require_integer,
    require_one_of,
    require_positive,
)
from ..core.optimizer import Adam
from ..errors import DivergedError, InputError
from ..export.example_inputs import to_file_inputs
from ..modeling.factory import ModelFactory
from ..modeling.functional_model import FunctionalModel
from .objectives import DirichletLikelihood, Objective, SoftCrossEntropy, SquaredError

if TYPE_CHECKING:
    from ..predict import Ensemble

Kind = Literal["plain", "dirichlet"]
KINDS: tuple[Kind, ...] = ("plain", "dirichlet")
# Of "dirichlet" at the start, by default, if the student starts from random parameters: the almost
# certain predictions of the members are then too far from it. A trained mode is near.
FIRST_TEMPERATURE = 10.0
_MIN_INPUTS = 2  # BatchNorm has no variance of one input
OnEpoch = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """How a student is trained; the arguments of `Ensemble.distill`."""

    kind: Kind = "plain"
    epochs: int = 100
    batch_size: int = 32
    lr: float = 0.003
    temperature: float | None = None
    mixup: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        where = "distill()"
        require_one_of(where, "kind", self.kind, KINDS)
        for name in ("epochs", "batch_size"):
            require_integer(where, name, getattr(self, name), minimum=1)
        require_integer(where, "seed", self.seed)
        require_positive(where, "lr", self.lr)
        require_bool(where, "mixup", self.mixup)
        if self.temperature is not None:
            require_positive(where, "temperature", self.temperature)
            if self.kind == "dirichlet" and self.temperature < 1:
                raise InputError(
                    "distill(kind='dirichlet') needs temperature >= 1, because it falls to 1; got "
                    f"{self.temperature}."
                )


@dataclass(frozen=True)
class Distilled:
    """A student, and how it was trained.

    Args:
        ensemble: of the student alone.
        losses: mean loss of each epoch.
        start: the mode that the student started from; None if it is another model.
    """

    ensemble: Ensemble
    losses: tuple[float, ...]
    start: int | None


def distill(
    ensemble: Ensemble,
    x: Any,
    settings: DistillSettings,
    model: ModelFactory | None = None,
    on_epoch: OnEpoch = lambda epoch, loss: None,
) -> Distilled:
    """Trains a student; see `Ensemble.distill`.

    Args:
        on_epoch: called after each epoch with the number of epochs so far and the mean loss.
    """
    inputs = _check(ensemble, x, settings)
    student, start = ensemble.model, None
    if model is None:
        start = _closest_mode(ensemble, inputs)
        theta, buffers = ensemble.theta[start], ensemble.buffers[start]
    else:
        student = _new_student(ensemble, model)
        theta, buffers = (part[0] for part in student.init_params(settings.seed, 1))
        _check_outputs(ensemble, student, theta, buffers, inputs)
    objective = _objective(ensemble, settings, is_new=model is not None)
    training = _Training(ensemble, inputs, settings, student, objective)
    theta, buffers, losses = training.run(theta, buffers, on_epoch)
    distilled = copy(ensemble)
    distilled.model = student
    distilled.theta, distilled.buffers = theta.unsqueeze(0), buffers.unsqueeze(0)
    distilled.predictors = distilled.theta.unsqueeze(1)
    distilled.predictor_buffers = distilled.buffers.unsqueeze(1)
    distilled.shared = distilled.calibration = None
    distilled.dirichlet = settings.kind == "dirichlet"
    distilled.dropout_samples = 0  # the student has learned the mean over the masks
    return Distilled(distilled, losses, start)


def _check(ensemble: Ensemble, x: Any, settings: DistillSettings) -> Tensor:
    """The inputs in the type that the model takes; raises if there is nothing to distil."""
    if ensemble.prediction_models < 2:
        raise InputError(
            "There is nothing to distil: this ensemble predicts with one model. Use it as it is."
        )
    if settings.kind == "dirichlet" and ensemble.model.task == "regression":
        raise InputError(
            "A Dirichlet distribution is over class probabilities, and this is regression: use "
            "kind='plain'."
        )
    inputs = to_file_inputs(ensemble, x)
    if inputs.dim() == 0 or len(inputs) < _MIN_INPUTS:
        count = 0 if inputs.dim() == 0 else len(inputs)
        raise InputError(f"distill() needs at least {_MIN_INPUTS} inputs; got {count}.")
    ensemble.predict(inputs[:1])  # rejects inputs that do not fit, in words of its own
    return inputs


def _closest_mode(ensemble: Ensemble, inputs: Tensor) -> int:
    """The mode that predicts most like the ensemble, which is the student's start.

    It is the best start that needs no labels. With the few inputs that a server has, a student that
    starts from random parameters is several points worse.
    """
    prediction = ensemble.predict(inputs)
    if prediction.task == "regression":
        distance = (prediction.modes - prediction.mean).square().flatten(1).mean(1)
    else:
        smallest = torch.finfo(prediction.modes.dtype).tiny
        cross_entropy = -(prediction.mean * prediction.modes.clamp(min=smallest).log()).sum(-1)
        distance = cross_entropy.flatten(1).mean(1)
    return int(distance.argmin())


def _new_student(ensemble: Ensemble, model: ModelFactory) -> FunctionalModel:
    """A model that was passed, with the task of the modes."""
    modes = ensemble.model
    # FunctionalModel takes the task of a loss of one's own from the type of the targets.
    dtype = torch.float32 if modes.task == "regression" else torch.int64
    targets = torch.zeros(1, dtype=dtype)
    return FunctionalModel(model, modes.user_loss, targets, modes.device, modes.dtype)


def _objective(ensemble: Ensemble, settings: DistillSettings, *, is_new: bool) -> Objective:
    """What the student learns; `is_new` says that it starts from random parameters."""
    if ensemble.model.task == "regression":
        return SquaredError()
    if settings.kind == "dirichlet":
        first = settings.temperature or (FIRST_TEMPERATURE if is_new else 1.0)
        return DirichletLikelihood(ensemble.model.user_loss, first)
    return SoftCrossEntropy(ensemble.model.user_loss, settings.temperature or 1.0)


def _check_outputs(
    ensemble: Ensemble, student: FunctionalModel, theta: Tensor, buffers: Tensor, inputs: Tensor
) -> None:
    """Raises unless a model that was passed has the outputs of the modes."""
    expected = ensemble.predict(inputs[:1]).mean.shape
    rule = ensemble.standardise
    x = inputs[:1].to(student.device)
    got = student.outputs(theta, buffers, x if rule is None else rule(x, student.dtype)).shape
    if got != expected:
        raise InputError(
            f"The model to distil into returns shape {tuple(got)} for one input, and the ensemble "
            f"{tuple(expected)}. Give it the same outputs."
        )


class _Training:
    """Adam with a cosine learning rate on the student's objective.

    The student is in train mode, as on a client: dropout is active and keyed, and BatchNorm learns
    its running statistics from the server's inputs.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        inputs: Tensor,
        settings: DistillSettings,
        student: FunctionalModel,
        objective: Objective,
    ) -> None:
        self.ensemble, self.inputs, self.settings = ensemble, inputs, settings
        # The same model with the objective as its loss.
        self.student, self.objective = copy(student), objective
        self.student.loss = self.objective
        self.first_temperature = self.objective.temperature
        # Tokens have no weighted mean.
        self.mixes = settings.mixup and inputs.is_floating_point()
        self.batch_size = min(settings.batch_size, len(inputs))
        self.teacher = None if self.mixes else self._predict(inputs)
        self.key = prng.key(settings.seed, "distillation")

    def run(
        self, theta: Tensor, buffers: Tensor, on_epoch: OnEpoch
    ) -> tuple[Tensor, Tensor, tuple[float, ...]]:
        """Parameters [P] and buffers [R] of the trained student, and the loss of each epoch."""
        gradient = self.student.gradient_function(batched=False)
        optimizer, count = Adam(), len(self.inputs) // self.batch_size
        state, losses = optimizer.init_state(theta), []
        for epoch in range(self.settings.epochs):
            order = prng.permutation(prng.fold_in(self.key, epoch, 0), len(self.inputs))
            total = 0.0
            # Batches have one size; the inputs that are left over come in other epochs.
            batches = order[: count * self.batch_size].reshape(count, self.batch_size)
            for at, rows in enumerate(batches):
                progress = (epoch * count + at) / (self.settings.epochs * count)
                self.objective.temperature = self._temperature(progress)
                key = prng.fold_in(self.key, epoch, 1, at)
                x, target = self._batch(rows, key)
                weight = torch.ones(len(rows), dtype=theta.dtype, device=theta.device)
                dropout_key = torch.tensor(prng.fold_in(key, 2), device=theta.device)
                update, (loss, buffers) = gradient(theta, buffers, x, target, weight, dropout_key)
                lr = self.settings.lr * 0.5 * (1 + math.cos(math.pi * progress))
                theta, state = optimizer.step(theta, update, state, lr)
                total += float(loss)
            if not math.isfinite(total):
                raise DivergedError(
                    f"The loss of the distillation is not finite in epoch {epoch + 1}. Use a lower "
                    f"lr; it is {self.settings.lr:g}."
                )
            losses.append(total / count)
            on_epoch(epoch + 1, losses[-1])
        return theta.detach(), buffers.detach(), tuple(losses)

    def _temperature(self, progress: float) -> float:
        """The temperature at a share of the steps; that of "dirichlet" falls to 1.

        It is constant in the first quarter, falls linearly in the next two, and is 1 in the last.
        """
        first = self.first_temperature
        if self.settings.kind != "dirichlet":
            return first
        return first - (first - 1) * min(max(2 * progress - 0.5, 0.0), 1.0)

    def _batch(self, rows: Tensor, key: prng.Key) -> tuple[Tensor, Tensor]:
        """Normalized inputs of the student and what the teacher says about them."""
        x = self.inputs[rows]
        if self.teacher is None:
            # Weighted means of two inputs each, which the teacher labels (mixup without labels): a
            # server has few inputs, and on them alone the student learns them by heart.
            share = prng.uniform(prng.fold_in(key, 0), len(rows)).to(x.dtype)
            share = share.reshape(-1, *[1] * (x.dim() - 1))
            partner = prng.bits(prng.fold_in(key, 1), len(rows)) % len(self.inputs)
            x = share * x + (1 - share) * self.inputs[partner]
            target = self._predict(x)
        else:
            target = self.teacher[rows]
        device, rule = self.student.device, self.ensemble.standardise
        x = x.to(device)
        x = x if rule is None else rule(x, self.student.dtype)
        return x, target.to(device)

    def _predict(self, x: Tensor) -> Tensor:
        """The teacher's mean [B, ..., C], or its members [B, M, ..., C]."""
        prediction = self.ensemble.predict(x)
        if self.settings.kind == "dirichlet":
            return prediction.members.transpose(0, 1).contiguous()
        return prediction.mean
