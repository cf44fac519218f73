"""Predictions of an ensemble: the average over its modes, and how much they disagree."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from . import prng
from .arguments import require_bool, require_integer, require_one_of
from .data.checks import check_range, first_bad_row
from .data.convert import as_tensor
from .data.data_frame import from_frame
from .data.normalize import Standardise
from .display import (
    ensemble_facts,
    ensemble_line,
    html_table,
    prediction_line,
    prediction_table,
)
from .errors import DivergedError, InputError, UntrainedWarning, setting
from .modeling.factory import ModelFactory
from .modeling.functional_model import FunctionalModel
from .modeling.losses import Task
from .runtime.oom import raise_on_oom
from .uncertainty.abstention import (
    Abstention,
    abstain_above,
    check_threshold,
    coverage_threshold,
    is_wrong,
    require_share,
    risk_threshold,
)
from .uncertainty.calibration import Calibration
from .uncertainty.scores import (
    SCORES,
    Score,
    ensemble_energy,
    entropy,
    expected_entropy,
    mutual_information,
    probability_score,
)
from .uncertainty.targets import check_below, check_targets
from .uncertainty.temperature import (
    combine_members,
    mean_over_samples,
    scale_members,
    scaled_mean,
)

if TYPE_CHECKING:
    from .distillation.distill import Kind
    from .export.mode_ranking import ModeRanking
    from .export.write import ExportedFile

Combine = Literal["probabilities", "logits", "outputs"]
MAX_DROPOUT_SAMPLES = 10_000  # all members of a prediction are in memory at the same time


@dataclass(frozen=True)
class Prediction:
    """The prediction of K modes for B inputs.

    A member is the prediction of one model. Most modes have one member; a mode of FedBE-noKD has S
    members, one per posterior sample. For classification, `members` are class probabilities and
    `mean` is their combination. For regression, both are outputs.

    Args:
        mean: the ensemble's prediction, [B, ..., C].
        members: the prediction of each model, [K * S, B, ..., C].
        mode_index: the mode of each member, [K * S] int64, from 0 to K - 1 in ascending order. By
            default each member is a mode.
        class_names: name of each class, or None.
        member_energy: -logsumexp of the logits of each member, [K * S, B, ...]; None if they are
            not known. Probabilities do not contain it.
        calibration: of the ensemble, if it has one.
        client: that the inputs belong to, see `Ensemble.predict`.
        dirichlet: whether each member predicts a distribution over class probabilities, of which
            `members` is the mean; see `Ensemble.distill`.
    """

    mean: Tensor
    members: Tensor
    task: Task = "classification"
    combine: Combine = "probabilities"
    mode_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    class_names: tuple[str, ...] | None = None
    member_energy: Tensor | None = None
    calibration: Calibration | None = None
    client: Any = None
    dirichlet: bool = False

    def __post_init__(self) -> None:
        if not len(self.mode_index):
            object.__setattr__(self, "mode_index", torch.arange(len(self.members)))
        if self.mode_index.shape != self.members.shape[:1]:
            raise InputError(
                "Prediction needs one mode_index per member; "
                f"got {tuple(self.mode_index.shape)} for {len(self.members)} members."
            )

    def __repr__(self) -> str:
        """The number of examples, classes and modes, and the mean uncertainty, on one line."""
        return prediction_line(self)

    def _repr_html_(self) -> str:
        return prediction_table(self)

    @cached_property
    def modes(self) -> Tensor:
        """The prediction of each mode, [K, B, ..., C]: the combination of its members."""
        sizes = torch.unique_consecutive(self.mode_index, return_counts=True)[1].tolist()
        if max(sizes) == 1:
            return self.members
        return torch.stack(
            [self._combine_members(part) for part in torch.split(self.members, sizes)]
        )

    def _combine_members(self, members: Tensor) -> Tensor:
        """The combination of the members of one mode, [S, B, ..., C] -> [B, ..., C]."""
        # Averages logits: log-probabilities are logits up to a constant, which softmax ignores.
        if self.combine == "logits":
            smallest = torch.finfo(members.dtype).tiny
            return members.clamp(min=smallest).log().mean(0).softmax(-1)
        return members.mean(0)

    @cached_property
    def label(self) -> Tensor:
        """The most probable class, [B, ...]."""
        self._require_classification("label")
        return self.mean.argmax(-1)

    @cached_property
    def label_names(self) -> NDArray[np.str_]:
        """The name of the most probable class, [B, ...]; its number as text without class names."""
        self._require_classification("label_names")
        names = self.class_names or [str(number) for number in range(self.mean.shape[-1])]
        named: NDArray[np.str_] = np.array(names)[self.label.numpy(force=True)]
        return named

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the ensemble's prediction in nats, [B, ...]: the total uncertainty."""
        self._require_classification("entropy")
        return entropy(self.mean)

    @cached_property
    def member_entropy(self) -> Tensor:
        """Mean entropy of the members, [B, ...]: uncertainty that more members cannot reduce.

        For members that predict Dirichlet distributions, the entropy that is expected of them.
        """
        self._require_classification("member_entropy")
        if self.dirichlet and self.member_energy is not None:
            return expected_entropy(self.members, self.member_energy).mean(0)
        return entropy(self.members).mean(0)

    @cached_property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean minus mean entropy, [B, ...]: how much members disagree; >= 0."""
        self._require_classification("mutual_information")
        return mutual_information(self.members, self.member_entropy)

    @cached_property
    def variance(self) -> Tensor:
        """Unbiased variance over members, [B, ..., C]; zero for one member.

        For regression, it is no estimate of the error: the spread of the members is not a
        prediction interval.
        """
        return self.members.var(0) if len(self.members) > 1 else torch.zeros_like(self.mean)

    @cached_property
    def sets(self) -> Tensor:
        """Which classes the true one is among, bool [B, C]; a calibrated ensemble has them.

        A set can be empty: no class fits as well as the true ones of the calibration rows did.
        """
        self._require_classification("sets")
        return self._calibrated("sets").sets(self.mean, self.client)

    @cached_property
    def set_names(self) -> list[list[str]]:
        """The names of the classes in each prediction set, most probable first, B lists."""
        names = self.class_names or [str(number) for number in range(self.mean.shape[-1])]
        order = self.mean.argsort(dim=-1, descending=True, stable=True)
        inside = self.sets.gather(-1, order)
        return [
            [names[label] for label, has in zip(labels, row, strict=True) if has]
            for labels, row in zip(order.tolist(), inside.tolist(), strict=True)
        ]

    @cached_property
    def interval(self) -> Tensor:
        """Lower and upper end of each target's interval, [B, 2]; a calibrated ensemble has them."""
        if self.task != "regression":
            raise InputError("'interval' is for regression; prediction sets are in .sets.")
        return self._calibrated("intervals").interval(self.mean, self.client).to(self.mean.dtype)

    def _calibrated(self, what: str) -> Calibration:
        """The calibration; raises if it does not make prediction sets or intervals."""
        if self.calibration is None or not self.calibration.has_sets:
            raise InputError(
                f"There are no prediction {what} without calibration: call Federation.calibrate(), "
                "or `fedensemble calibrate` with the folder of the run."
            )
        return self.calibration

    def uncertainty(self, score: Score = "entropy") -> Tensor:
        """A score of uncertainty of each input, [B, ...]; the higher, the less certain.

        Args:
            score: "entropy" and "mutual_information" are the properties of these names.
                "max_probability" is 1 less the probability of the most probable class,
                "variation_ratio" the share of members with another label than most members.
                "energy" is -log sum exp of the logits: of the mean logits if the ensemble averages
                logits, and otherwise the mean over members.
        """
        require_one_of("uncertainty()", "score", score, SCORES)
        self._require_classification(score)
        if score in ("entropy", "mutual_information"):  # cached
            values: Tensor = getattr(self, score)
            return values
        if score != "energy":
            return probability_score(score, self.mean, self.members)
        if self.member_energy is None:
            raise InputError(
                "'energy' needs the logits of the members, which this prediction does not have. "
                "Use what Ensemble.predict returns, or another score."
            )
        by_logits = self.combine == "logits"
        return ensemble_energy(self.members, self.member_energy, by_logits=by_logits)

    def abstain(
        self,
        *,
        risk: float | None = None,
        coverage: float | None = None,
        threshold: float | None = None,
        calibration: tuple[Prediction, Any] | Prediction | None = None,
        score: Score = "entropy",
        confidence: float = 0.95,
    ) -> Abstention:
        """Which rows are sure enough to be answered, and their labels.

        Exactly one of `risk`, `coverage` and `threshold` decides it.

        Args:
            risk: largest share of errors among the answered rows. Calibration data are required,
                and certify it with the probability `confidence`; if no threshold is certified,
                nothing is answered.
            coverage: share of the rows to answer: of the calibration data, or without them of this
                prediction. Ties can make it more.
            threshold: largest uncertainty to answer.
            calibration: a prediction of the same ensemble for data that it was not trained on, and
                its labels. `coverage` needs no labels: it also takes the prediction alone. None
                takes the clients' calibration rows, if the ensemble was calibrated.
            score: measure of uncertainty; see `uncertainty`.
            confidence: probability that the risk is kept, over calibration data.
        """
        if sum(value is not None for value in (risk, coverage, threshold)) != 1:
            raise InputError("abstain() needs one of risk, coverage and threshold, and only one.")
        values = self.uncertainty(score)
        if threshold is not None:
            if calibration is not None:
                raise InputError("abstain(threshold=...) does not use calibration: leave it out.")
            largest = check_threshold(threshold)
        elif coverage is not None:
            coverage = require_share("coverage", coverage, or_one=True)
            reference = self if calibration is None else self._calibration(calibration)[0]
            known_values = (
                self.calibration.abstention_rows(score)[0]
                if calibration is None and self.calibration is not None
                else reference.uncertainty(score)
            )
            largest = coverage_threshold(known_values, coverage)
        else:
            risk = require_share("risk", risk)
            confidence = require_share("confidence", confidence)
            if calibration is None and self.calibration is not None:
                known_values, wrong = self.calibration.abstention_rows(score)
            else:
                known, target = self._calibration(calibration, labels=True)
                known_values, wrong = known.uncertainty(score), is_wrong(known.label, target)
            largest = risk_threshold(known_values, wrong, risk, confidence)
        return abstain_above(largest, values, self.label, score)

    def _calibration(self, given: Any, *, labels: bool = False) -> tuple[Prediction, Any]:
        """The prediction of `abstain(calibration=...)` and its checked labels, or None."""
        pair = isinstance(given, tuple) and len(given) == 2
        known, target = given if pair else (given, None)
        if not isinstance(known, Prediction) or (labels and target is None):
            raise InputError(
                "abstain() needs calibration=(prediction, labels): what the same ensemble predicts "
                "for data that it was not trained on, and their true labels."
            )
        known._require_classification("calibration")
        shape, other = ((len(p.members), p.mean.shape[-1]) for p in (self, known))
        if shape != other:
            raise InputError(
                "abstain() needs a calibration by the same ensemble: this prediction has (members, "
                f"classes) = {shape}, and the calibration {other}."
            )
        if target is None:
            return known, None
        names = known.class_names
        target = check_targets(known.mean, target, regression=False, class_names=names)
        check_below(target, known.mean.shape[-1])
        return known, target

    def _require_classification(self, name: str) -> None:
        if self.task != "classification":
            raise InputError(
                f"'{name}' needs class probabilities, and this is {self.task}; "
                "use .mean and .variance."
            )


class Ensemble:
    """K trained modes of one model, ready to predict.

    Args:
        functional_model: the model as a function of its parameters.
        theta, buffers: parameters [K, P] and running statistics [K, R].
        standardise: normalization of the training inputs, or None.
        combine: what is averaged over the modes: class "probabilities" or "logits", and "outputs"
            for regression.
        input_shape: shape of one input; None does not check it.
        seed: of dropout, if it is active in predictions.
        predictors: the models whose predictions a mode averages, [K, S, P]; None for the modes'
            own parameters.
        predictor_buffers: running statistics of the predictors, [K, S, R], or [K, 1, R] if those of
            a mode share them; None for those of the modes.
        tokens: whether inputs are integers that stay integers; None if this is not known, and
            inputs are passed to the model as they are.
        class_names: name of each class, or None.
        feature_names: name of each column of the inputs, which a DataFrame must have in this order;
            None does not check it.
        shared: True for the parameters that all modes have in common, bool [P]; None if there are
            none.
        trained: whether any round was trained; if not, predictions warn.
        calibration: by clients' calibration rows; predictions apply it. None if there is none.
        dirichlet: whether the outputs are logarithms of the concentrations of Dirichlet
            distributions over class probabilities; see `distill`.
        dropout_samples: MC-dropout: each model predicts that many times with dropout active, and
            each of its predictions is a member. 0 predicts without dropout.
    """

    def __init__(
        self,
        functional_model: FunctionalModel,
        theta: Tensor,
        buffers: Tensor,
        *,
        standardise: Standardise | None = None,
        combine: Combine | None = None,
        input_shape: Sequence[int] | None = None,
        seed: int = 0,
        predictors: Tensor | None = None,
        predictor_buffers: Tensor | None = None,
        tokens: bool | None = None,
        class_names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        shared: Tensor | None = None,
        trained: bool = True,
        calibration: Calibration | None = None,
        dirichlet: bool = False,
        dropout_samples: int = 0,
    ) -> None:
        self.shared, self.calibration, self.dirichlet = shared, calibration, dirichlet
        self.dropout_samples = check_dropout_samples("Ensemble", dropout_samples)
        self.model, self.theta, self.buffers = functional_model, theta, buffers
        self.predictors = theta.unsqueeze(1) if predictors is None else predictors
        # [K, S, R], or [K, 1, R] if the predictors of a mode have the same
        self.predictor_buffers = (
            buffers.unsqueeze(1) if predictor_buffers is None else predictor_buffers
        )
        self.standardise, self.seed, self.tokens = standardise, seed, tokens
        self.trained = trained
        self.input_shape = None if input_shape is None else tuple(input_shape)
        self.class_names = None if class_names is None else tuple(class_names)
        self.feature_names = None if feature_names is None else tuple(feature_names)
        default: Combine = (
            "probabilities" if functional_model.task == "classification" else "outputs"
        )
        self.combine: Combine = default if combine is None else combine
        if (
            not isinstance(self.combine, str)
            or self.combine not in get_args(Combine)
            or (self.combine == "outputs") != (functional_model.task == "regression")
        ):
            raise InputError(
                "combine is 'probabilities' or 'logits' for classification and 'outputs' for "
                f"regression; got {self.combine!r} for {functional_model.task}."
            )

    def __repr__(self) -> str:
        """The modes, their size, the task, the shape of an input and the classes, on one line."""
        return ensemble_line(self)

    def _repr_html_(self) -> str:
        return html_table("Ensemble", ensemble_facts(self))

    def __len__(self) -> int:
        """Number of modes, K."""
        return len(self.theta)

    @property
    def prediction_models(self) -> int:
        """Number of members of a prediction: K * S, where S is 1 for most algorithms.

        With MC-dropout, S is the number of models per mode times `dropout_samples`.
        """
        models = self.predictors.shape[0] * self.predictors.shape[1]
        return models * max(1, self.dropout_samples)

    @property
    def prediction_bytes(self) -> int:
        """Bytes that a device must receive to predict: all models and running statistics.

        Shared parameters count once. Frozen parameters do not count: a device has them with the
        model, as it has the model's code; see `frozen_bytes`.
        """
        size = sum(
            tensor.numel() * tensor.element_size()
            for tensor in (self.predictors, self.predictor_buffers)
        )
        if self.shared is None:
            return size
        # Predictors that differ in shared parameters, such as samples of a posterior, are all sent.
        models = self.predictors.flatten(0, 1)
        sent_once = int((self.shared & (models == models[:1]).all(0)).sum())
        return size - sent_once * (len(models) - 1) * models.element_size()

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the parameters that were not trained, which a device needs once."""
        return self.model.frozen_bytes

    def module(self, mode: int, predictor: int | None = None) -> nn.Module:
        """A mode as a plain nn.Module, in eval mode on the CPU.

        The module takes normalized inputs, that is after `standardise`. Raises IndexError if there
        is no such mode.

        Args:
            predictor: which of the S models that predict for the mode; None for the one that
                represents it, which for S = 1 is the same.
        """
        model = self.model.build(0)
        theta, statistics = self.theta[mode], self.buffers[mode]
        if predictor is not None:
            theta = self.predictors[mode, predictor]
            statistics = self._buffers_of_predictors()[mode, predictor]
        weights = self.model.theta_layout.unflatten(theta)
        buffers = self.model.buffer_layout.unflatten(statistics)
        # Not `load_state_dict`: a non-persistent buffer is not in the state dict.
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        with torch.no_grad():
            for name, value in {**weights, **buffers, **self.model.frozen}.items():
                tensors[name].copy_(value)
        return model.eval()

    def _buffers_of_predictors(self) -> Tensor:
        """Running statistics of all predictors, [K, S, R]."""
        return self.predictor_buffers.expand(-1, self.predictors.shape[1], -1)

    def predict(
        self,
        x: Any,
        *,
        batch_size: int = 1024,
        dropout: bool = False,
        dropout_samples: int | None = None,
        batch_statistics: bool = False,
        on_device: bool = False,
        client: Any = None,
    ) -> Prediction:
        """The ensemble's prediction for inputs [B, ...], in the format of the training data.

        Args:
            x: inputs as in training, before normalization.
            batch_size: inputs per forward pass.
            dropout: predict once per model as in training: dropout and random crops are active.
            dropout_samples: MC-dropout: number of predictions of each model with dropout active,
                each of which is a member; 0 turns it off. None takes that of the ensemble, or 0 if
                `dropout` is set. The masks follow from the seed and the place of a row among the
                inputs, so that the same call gives the same result.
            batch_statistics: with `dropout`, BatchNorm also normalizes by the statistics of each
                batch of `batch_size` inputs instead of its running statistics. Both options
                together are the model in train mode, in which the authors' published code
                evaluates, with batches of 16.
            on_device: leave the result on the device of the modes instead of the CPU.
            client: that the inputs belong to, if the ensemble was calibrated for each client: name
                or index, or a list of one per input; None or -1 if it did not take part.
        """
        raw = self.outputs(
            x,
            batch_size=batch_size,
            dropout=dropout,
            dropout_samples=dropout_samples,
            batch_statistics=batch_statistics,
            on_device=on_device,
        )
        return self._combine_outputs(raw, client)

    def outputs(
        self,
        x: Any,
        *,
        batch_size: int = 1024,
        dropout: bool = False,
        dropout_samples: int | None = None,
        batch_statistics: bool = False,
        on_device: bool = False,
    ) -> Tensor:
        """The outputs of all members, [K, S, B, ..., C]: logits, or values for regression.

        The arguments are those of `predict`.
        """
        if not self.trained:
            warnings.warn(
                "These modes are untrained: they predict with their initial parameters. Train the "
                "federation first, for example by train(20).",
                UntrainedWarning,
                stacklevel=2,
            )
        batch_size = min(require_integer("predict()", "batch_size", batch_size, minimum=1), 2**62)
        dropout, on_device = (
            require_bool("predict()", "dropout", dropout),
            require_bool("predict()", "on_device", on_device),
        )
        if dropout_samples is None:
            dropout_samples = 0 if dropout else self.dropout_samples
        samples = check_dropout_samples("predict()", dropout_samples)
        if dropout and samples:
            raise InputError(
                "dropout=True predicts once per model as in training, and dropout_samples="
                f"{samples} several times with dropout only: give one of them."
            )
        inputs = as_tensor(from_frame(x, self.feature_names, "the inputs"))
        inputs = (
            inputs.long() if inputs.dtype == torch.uint8 and self.standardise is None else inputs
        )
        if inputs.dim() == 0 or not len(inputs):
            raise InputError("There is nothing to predict: the input has no rows.")
        if self.input_shape is not None and tuple(inputs.shape[1:]) != self.input_shape:
            got = tuple(inputs.shape[1:])
            raise InputError(
                f"Inputs have shape {got} per example, but the modes were trained on "
                f"{self.input_shape}."
            )
        if (row := first_bad_row(inputs)) is not None:
            raise InputError(
                f"Inputs contain nan or infinity (first in row {row}); there is no prediction for "
                "them. Clean or drop such rows."
            )
        check_range(inputs, "Inputs", self.model.dtype)
        if self.tokens and inputs.is_floating_point():
            raise InputError(
                f"The modes were trained on integers (tokens); got inputs of type {inputs.dtype}."
            )
        if self.tokens is False and self.standardise is None:
            inputs = inputs.to(self.model.dtype)
        if batch_statistics and (not dropout or len(inputs) < 2 or batch_size < 2):
            raise InputError(
                "batch_statistics needs dropout=True, at least 2 inputs and batch_size >= 2; "
                f"got dropout={dropout}, {len(inputs)} inputs and batch_size={batch_size}."
            )
        # On out of memory, this raises instead of trying smaller batches: the same call must give
        # the same results, independent of the memory that other programs use.
        smaller = f"lower {setting('evaluation.batch_size')}, or predict fewer inputs at a time"
        with raise_on_oom(
            f"Evaluation in batches of {batch_size} does", self.model.device, smaller
        ):
            batches = torch.split(inputs, batch_size)
            # BatchNorm has no variance for one input, so a last single input joins the batch
            # before it.
            if batch_statistics and len(batches[-1]) == 1:
                batches = (*batches[:-2], torch.cat(batches[-2:]))
            outputs = (
                self._forward(batch, index, dropout, batch_statistics, samples)
                for index, batch in enumerate(batches)
            )
            # [K, S, B, ..., C]
            raw = torch.cat([part if on_device else part.cpu() for part in outputs], dim=2)
            check_predictions(raw)
            return raw

    def select(self, modes: Sequence[int]) -> Ensemble:
        """The ensemble of some of the modes, in the given order; without a calibration of all."""
        chosen = list(modes)
        known = all(type(mode) is int and 0 <= mode < len(self) for mode in chosen)
        if not chosen or not known or len(set(chosen)) < len(chosen):
            raise InputError(
                f"select() needs different modes from 0 to {len(self) - 1}, at least one; got "
                f"{chosen}."
            )
        part = copy(self)
        for name in ("theta", "buffers", "predictors", "predictor_buffers"):
            setattr(part, name, getattr(self, name)[chosen])
        if chosen != list(range(len(self))):
            part.calibration = None  # fewer modes are less or more confident
        return part

    def rank_modes(self, x: Any, y: Any) -> ModeRanking:
        """The modes in the order of a greedy selection, with accuracy and NLL of every prefix.

        Use rows that no mode was trained on, and not those of the final test: the selected modes
        look better on the rows that selected them.

        Args:
            x, y: inputs and targets.
        """
        # Imported here, because it builds on this module.
        from .export.mode_ranking import rank_modes

        return rank_modes(self, x, y)

    def distill(
        self,
        x: Any,
        *,
        kind: Kind = "plain",
        model: ModelFactory | None = None,
        epochs: int = 100,
        batch_size: int = 32,
        lr: float = 0.003,
        temperature: float | None = None,
        mixup: bool = True,
        seed: int = 0,
    ) -> Ensemble:
        """One model that predicts what all modes predict, as an ensemble of one mode.

        It learns from the ensemble's predictions for inputs without labels, by Adam with a cosine
        learning rate, and starts from the mode that predicts most like the ensemble.

        Args:
            x: inputs as in training, before normalization, such as `data.x_server`.
            kind: "plain" learns the mean prediction. "dirichlet" (EnD², Malinin et al. 2020) learns
                a distribution over class probabilities from the members' predictions, so that the
                one model has mutual information, too.
            model: a callable that returns the nn.Module, which then starts from random parameters;
                None for the architecture of the modes.
            epochs: passes over the inputs.
            batch_size: inputs per step.
            lr: learning rate at the start; it falls to 0.
            temperature: of both predictions while it learns: 1 by default. For "dirichlet" that at
                the start, which falls to 1; with `model` it is 10 by default.
            mixup: learn on weighted means of two inputs each, which the ensemble predicts in each
                step. Tokens are never mixed.
            seed: of all random choices.
        """
        # Imported here, because it builds on this module.
        from .distillation.distill import DistillSettings, distill

        settings = DistillSettings(
            kind=kind,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            temperature=temperature,
            mixup=mixup,
            seed=seed,
        )
        return distill(self, x, settings, model).ensemble

    def export(
        self,
        path: str | Path,
        *,
        modes: str | Sequence[int] | None = None,
        validation: tuple[Any, Any] | None = None,
        examples: Any = None,
        tolerance: float = 1e-5,
        client: str | int | None = None,
        risk: float | None = None,
    ) -> ExportedFile:
        """Writes all models as one file that runs without this package; returns facts about it.

        The file takes inputs as `predict` does, any number of them, and returns what `Prediction`
        has by these names: for classification mean, label, entropy, mutual_information and
        members, for regression mean, variance and members. A calibrated ensemble has calibrated
        probabilities, and adds sets or interval. The file is compared with `predict` before it is
        written. ONNX needs the extra "export".

        Args:
            path: a name that ends in .onnx, or in .pt2 for torch.export.
            modes: those to write: their numbers, or "best:3" for the first three of `rank_modes` on
                `validation`; None writes all.
            validation: inputs and targets that no mode was trained on.
            examples: some inputs to trace and compare with; None draws random ones.
            tolerance: largest difference to `predict`, relative to the largest value of an output
                where that is above 1.
            client: whose prediction sets or intervals the file makes, if the ensemble was
                calibrated for each client; None for a client that did not take part.
            risk: adds the output "answered": whether the entropy is low enough that at most this
                share of the answers is wrong, as `Prediction.abstain(risk=...)` finds it. The
                ensemble must be calibrated.
        """
        from .export.write import export_ensemble

        return export_ensemble(self, path, modes, validation, examples, tolerance, client, risk)

    def _combine_outputs(self, raw: Tensor, client: Any = None) -> Prediction:
        """The prediction from the raw outputs of all models, [K, S, B, ..., C]."""
        calibration = self.calibration
        mode_index = torch.arange(len(raw)).repeat_interleave(raw.shape[1])
        if self.model.task == "regression":
            return Prediction(
                mean_over_samples(raw).mean(0),
                raw.flatten(0, 1),
                "regression",
                "outputs",
                mode_index,
                calibration=calibration,
                client=client,
            )
        if calibration is not None and calibration.place == "member":
            raw = scale_members(raw, calibration.temperatures)
        members = torch.softmax(raw, dim=-1)
        # -logsumexp(raw) = log(p) - logit for each class. The most probable class loses no digits,
        # and two reductions need no temporary copy of all outputs, as logsumexp does.
        energy = members.amax(-1).log() - raw.amax(-1)
        by_logits = self.combine == "logits"
        if calibration is not None and calibration.place == "mean":
            mean = scaled_mean(raw, calibration.temperatures[0], by_logits=by_logits)
        else:
            mean = combine_members(raw, members, by_logits=by_logits)
        # A model may have more outputs than there are classes; the names would then not fit.
        fits = self.class_names is not None and len(self.class_names) == mean.shape[-1]
        return Prediction(
            mean,
            members.flatten(0, 1),
            "classification",
            self.combine,
            mode_index,
            self.class_names if fits else None,
            energy.flatten(0, 1),
            calibration,
            client,
            self.dirichlet,
        )

    def _forward(
        self, x: Tensor, batch: int, dropout: bool, batch_statistics: bool, samples: int
    ) -> Tensor:
        """The outputs of all members for one batch, [K, S, B, ..., C].

        Args:
            batch: index of the batch, which determines the dropout masks.
        """
        functional_model = self.model
        x = x.to(functional_model.device)
        x = self.standardise(x, functional_model.dtype) if self.standardise is not None else x
        x = x.to(functional_model.dtype) if x.is_floating_point() else x
        # Imported here, so that an ensemble that never predicts does not load the engines.
        from .engines.stacked.prediction import How, member_outputs

        theta, buffers = self.predictors, self._buffers_of_predictors()
        modes, models = theta.shape[:2]
        how: How = "mc-dropout" if samples else "dropout" if dropout else "eval"
        keys: list[int] | None = None
        if samples:
            # Not a function of the number of samples: more of them only add members.
            keys = [
                int(prng.key(self.seed, "mc-dropout", mode, model, batch, sample))
                for mode in range(modes)
                for model in range(models)
                for sample in range(samples)
            ]
        elif dropout:
            # The models of a mode share its masks.
            keys = [
                int(prng.key(self.seed, "evaluation", mode, batch))
                for mode in range(modes)
                for _ in range(models)
            ]
        how = "batch statistics" if batch_statistics else how
        theta, buffers = theta.flatten(0, 1), buffers.flatten(0, 1)
        outputs = member_outputs(functional_model, theta, buffers, x, how, keys)
        return outputs.reshape(modes, -1, *outputs.shape[1:])


def check_dropout_samples(owner: str, samples: Any) -> int:
    """The number of dropout masks per model; raises unless it is an integer in its range."""
    count = require_integer(owner, "dropout_samples", samples)
    if count > MAX_DROPOUT_SAMPLES:
        raise InputError(
            f"{owner} needs dropout_samples of at most {MAX_DROPOUT_SAMPLES:,}; got {count:,}."
        )
    return count


def check_predictions(raw: Tensor) -> None:
    """Raises DivergedError if an output is nan or infinity, [K, S, B, ..., C]."""
    if not raw.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(raw))).all()):
        return
    bad = ~torch.isfinite(raw)
    mode, row = (int(torch.nonzero(bad.transpose(0, axis).flatten(1).any(1))[0]) for axis in (0, 2))
    raise DivergedError(
        f"Mode {mode} predicts nan or infinity (first for row {row}): its weights have diverged, "
        "or the inputs are far larger than those it was trained on. Check the inputs, or train "
        "with a lower learning rate."
    )
