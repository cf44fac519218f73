"""An ensemble that predicts: the outputs of its modes become one prediction."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from . import prng
from .arguments import require_bool, require_integer
from .data.checks import check_range, first_bad_row
from .data.convert import as_tensor
from .data.data_frame import from_frame
from .data.normalize import Standardise
from .display import (
    ensemble_facts,
    ensemble_line,
    html_table,
)
from .errors import DivergedError, InputError, UntrainedWarning, setting
from .modeling.factory import ModelFactory
from .modeling.functional_model import FunctionalModel
from .prediction import Combine, Prediction
from .runtime.oom import raise_on_oom
from .uncertainty.calibration import Calibration
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

MAX_DROPOUT_SAMPLES = 10_000  # all members of a prediction are in memory at the same time


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
