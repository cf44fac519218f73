"""Predictions of an ensemble: the average of its modes, and how far they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from . import prng
from .arguments import flag, whole
from .data.checks import check_range, first_bad_row
from .data.convert import as_tensor
from .data.normalize import Standardise
from .errors import DivergedError, InputError
from .modeling.functional_model import FunctionalModel
from .modeling.losses import Task
from .runtime.oom import raise_on_oom

Combine = Literal["probabilities", "logits", "outputs"]
_SMALLER = (
    "lower batch_size (in a config, evaluation.batch_size), or predict fewer inputs at a time"
)


@dataclass(frozen=True)
class Prediction:
    """What K modes predict for B inputs.

    A mode may predict with S models (FedBE-noKD's samples); they are kept apart as members. For
    classification `members` are class probabilities and `mean` their combination; for regression
    both are outputs.

    Args:
        mean: the ensemble's prediction, [B, ..., C].
        members: the prediction of each model, [K * S, B, ..., C].
        mode_index: the mode that each member belongs to, [K * S] int64, from 0 to K - 1 in
            ascending order. Left out, every member is a mode of its own.
    """

    mean: Tensor
    members: Tensor
    task: Task = "classification"
    combine: Combine = "probabilities"
    mode_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        if not len(self.mode_index):
            object.__setattr__(self, "mode_index", torch.arange(len(self.members)))
        if self.mode_index.shape != self.members.shape[:1]:
            raise InputError(
                f"Prediction needs one mode_index per member; got {tuple(self.mode_index.shape)} for "
                f"{len(self.members)} members."
            )

    @cached_property
    def modes(self) -> Tensor:
        """The prediction of each mode, [K, B, ..., C]: its only member, or the combination of its
        members.
        """
        sizes = torch.unique_consecutive(self.mode_index, return_counts=True)[1].tolist()
        if max(sizes) == 1:
            return self.members
        return torch.stack([self._joined(part) for part in torch.split(self.members, sizes)])

    def _joined(self, members: Tensor) -> Tensor:
        # softmax of the mean logits: logits are log-probabilities up to a constant
        if self.combine == "logits":
            smallest = torch.finfo(members.dtype).tiny
            return members.clamp(min=smallest).log().mean(0).softmax(-1)
        return members.mean(0)

    @cached_property
    def label(self) -> Tensor:
        """The most probable class, [B, ...]."""
        self._need("classification", "label")
        return self.mean.argmax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the averaged prediction in nats: total uncertainty, [B, ...]."""
        self._need("classification", "entropy")
        return entropy(self.mean)

    @cached_property
    def member_entropy(self) -> Tensor:
        """Mean over members of their own entropy: uncertainty that more members cannot lessen, [B,
        ...].
        """
        self._need("classification", "member_entropy")
        return entropy(self.members).mean(0)

    @cached_property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean less the mean entropy: how far the members disagree, [B, ...]; never
        negative.
        """
        self._need("classification", "mutual_information")
        return (entropy(self.members.mean(0)) - self.member_entropy).clamp(min=0)

    @cached_property
    def variance(self) -> Tensor:
        """Variance over members (unbiased; zero for one member), [B, ..., C]."""
        return self.members.var(0) if len(self.members) > 1 else torch.zeros_like(self.mean)

    def _need(self, task: Task, what: str) -> None:
        if self.task != task:
            raise InputError(
                f"'{what}' needs class probabilities, and this is {self.task}; use .mean and .variance."
            )


class Ensemble:
    """K trained modes of one model, ready to predict.

    Args:
        theta, buffers: weights [K, P] and running statistics [K, R].
        predictors: models whose predictions a mode averages, [K, S, P], where they are not its own
            weights alone.
        standardise: what the training inputs went through, or None.
        combine: average class "probabilities" or "logits"; "outputs" for regression.
        input_shape: shape of one input, where it is to be checked.
        seed: of dropout, where it is kept active.
        tokens: whether inputs are whole numbers that stay so; None where it is not known, and the
            model must take them.
    """

    def __init__(
        self,
        learner: FunctionalModel,
        theta: Tensor,
        buffers: Tensor,
        *,
        standardise: Standardise | None = None,
        combine: Combine | None = None,
        input_shape: Sequence[int] | None = None,
        seed: int = 0,
        predictors: Tensor | None = None,
        tokens: bool | None = None,
    ) -> None:
        self.learner, self.theta, self.buffers = learner, theta, buffers
        self.predictors = theta.unsqueeze(1) if predictors is None else predictors
        self.standardise, self.seed, self.tokens = standardise, seed, tokens
        self.input_shape = None if input_shape is None else tuple(input_shape)
        default: Combine = "probabilities" if learner.task == "classification" else "outputs"
        self.combine: Combine = default if combine is None else combine
        if (
            not isinstance(self.combine, str)
            or self.combine not in get_args(Combine)
            or (self.combine == "outputs") != (learner.task == "regression")
        ):
            raise InputError(
                "combine is 'probabilities' or 'logits' for classification and 'outputs' for regression; "
                f"got {self.combine!r} for {learner.task}."
            )

    def __len__(self) -> int:
        """Number of modes, K."""
        return len(self.theta)

    @property
    def prediction_models(self) -> int:
        """Number of models that a prediction takes: K, or K times S where a mode predicts with S
        models.
        """
        return self.predictors.shape[0] * self.predictors.shape[1]

    @property
    def prediction_bytes(self) -> int:
        """Bytes of everything that a device must receive to predict: the models and each mode's
        running statistics.
        """
        return sum(
            tensor.numel() * tensor.element_size() for tensor in (self.predictors, self.buffers)
        )

    def module(self, mode: int) -> nn.Module:
        """A mode as a plain nn.Module of its own, in eval mode, on the CPU.

        It takes inputs as models see them: after `standardise`, where there is one. Raises
        IndexError as a list does.
        """
        model = self.learner.build(0)
        weights = self.learner.theta_layout.unflatten(self.theta[mode])
        rest = self.learner.buffer_layout.unflatten(self.buffers[mode])
        model.load_state_dict({**model.state_dict(), **weights, **rest})
        return model.eval()

    def predict(
        self,
        x: Any,
        *,
        batch_size: int = 1024,
        dropout: bool = False,
        batch_statistics: bool = False,
        on_device: bool = False,
    ) -> Prediction:
        """The ensemble's prediction for stored-format inputs [B, ...] (as given in training, not
        standardised).

        Args:
            dropout: keep dropout active.
            batch_statistics: with `dropout`, BatchNorm also normalises by the statistics of each
                batch of `batch_size` inputs, not by its running statistics. Both together are the
                model in train mode, in which the authors' published code tested, with batches of
                16.
            on_device: leave the result where the modes are, in place of the CPU.
        """
        batch_size = min(whole("predict()", "batch_size", batch_size, minimum=1), 2**62)
        dropout, on_device = (
            flag("predict()", "dropout", dropout),
            flag("predict()", "on_device", on_device),
        )
        inputs = as_tensor(x)
        inputs = (
            inputs.long() if inputs.dtype == torch.uint8 and self.standardise is None else inputs
        )
        if inputs.dim() == 0 or not len(inputs):
            raise InputError("There is nothing to predict: the input has no rows.")
        if self.input_shape is not None and tuple(inputs.shape[1:]) != self.input_shape:
            got = tuple(inputs.shape[1:])
            raise InputError(
                f"Inputs have shape {got} an example, but the modes were trained on {self.input_shape}."
            )
        if (row := first_bad_row(inputs)) is not None:
            raise InputError(
                f"Inputs contain nan or infinity (first in row {row}); there is no prediction for them. "
                "Clean or drop such rows."
            )
        check_range(inputs, "Inputs", self.learner.dtype)
        if self.tokens and inputs.is_floating_point():
            raise InputError(
                f"The modes were trained on whole numbers (tokens); got inputs of type {inputs.dtype}."
            )
        if self.tokens is False and self.standardise is None:
            inputs = inputs.to(self.learner.dtype)
        if batch_statistics and (not dropout or len(inputs) < 2 or batch_size < 2):
            raise InputError(
                "batch_statistics needs dropout=True, at least 2 inputs and batch_size >= 2; "
                f"got dropout={dropout}, {len(inputs)} inputs and batch_size={batch_size}."
            )
        # No smaller batches by itself: the same call must give the same numbers, whatever else
        # takes memory.
        with raise_on_oom(
            f"Evaluation in batches of {batch_size} does", self.learner.device, _SMALLER
        ):
            pieces = torch.split(inputs, batch_size)
            # one input has no variance: it joins the batch before it
            if batch_statistics and len(pieces[-1]) == 1:
                pieces = (*pieces[:-2], torch.cat(pieces[-2:]))
            parts = (
                self._members(piece, at, dropout, batch_statistics)
                for at, piece in enumerate(pieces)
            )
            # [K, S, B, ..., C]
            raw = torch.cat([part if on_device else part.cpu() for part in parts], dim=2)
            check_predictions(raw)
            return self._combined(raw)

    def _combined(self, raw: Tensor) -> Prediction:
        mode_index = torch.arange(len(raw)).repeat_interleave(raw.shape[1])
        if self.learner.task == "regression":
            return Prediction(
                _mean(raw).mean(0), raw.flatten(0, 1), "regression", "outputs", mode_index
            )
        members = torch.softmax(raw, dim=-1)
        by_logits = self.combine == "logits"
        mean = torch.softmax(_mean(raw).mean(0), dim=-1) if by_logits else _mean(members).mean(0)
        return Prediction(mean, members.flatten(0, 1), "classification", self.combine, mode_index)

    def _members(self, x: Tensor, piece: int, dropout: bool, batch_statistics: bool) -> Tensor:
        learner = self.learner
        x = x.to(learner.device)
        x = self.standardise(x, learner.dtype) if self.standardise is not None else x
        x = x.to(learner.dtype) if x.is_floating_point() else x
        outputs = []
        for mode in range(len(self)):
            key = prng.key(self.seed, "evaluation", mode, piece) if dropout else None
            for theta in self.predictors[mode]:
                given = x.clone()  # a model may write into its inputs
                outputs.append(
                    learner.outputs(theta, self.buffers[mode], given, key, batch_statistics)
                )
        stacked = torch.stack(outputs)
        return stacked.reshape(*self.predictors.shape[:2], *stacked.shape[1:])


def _mean(values: Tensor) -> Tensor:
    """The mean over what a mode averages, [K, S, ...] -> [K, ...]; nothing is computed where that
    is one.
    """
    return values.mean(1) if values.shape[1] > 1 else values.squeeze(1)


def check_predictions(raw: Tensor) -> None:
    """Raises if an output is nan or infinity, [K, S, B, ..., C]: averages and entropies of it would
    mean nothing.
    """
    if not raw.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(raw))).all()):
        return
    bad = ~torch.isfinite(raw)
    mode, row = (int(torch.nonzero(bad.transpose(0, axis).flatten(1).any(1))[0]) for axis in (0, 2))
    raise DivergedError(
        f"Mode {mode} predicts nan or infinity (first for row {row}): its weights have diverged, or the inputs are far "
        "larger than those it was trained on. Check the inputs, or train with a lower learning rate."
    )


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy over the last dimension, in nats."""
    terms: Tensor = torch.special.xlogy(probabilities, probabilities)
    return -terms.sum(-1)
