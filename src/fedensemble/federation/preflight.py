"""Checks before round 1, so that a mistake raises a clear error before training starts.

`Federation` calls the checks in this order:

1. `check_arguments`: the types of the data and the seed.
2. `memory_limits.check_recipe`: the size of a registered model, built without memory.
3. `check_model`: free memory for all modes, the range of the data's values, token ids, and one
   forward pass and one loss on 8 examples. For MC-dropout, also that the model has dropout.
4. `check_training`: one training step on 2 examples, or on a full batch if that fails.
5. The engine's own checks, when it is constructed.
6. `check_aggregator` and `probe` of `core`: the aggregator suits the algorithm, and
   `local_training` returns two dictionaries. `resolve_shared`: there are shared parameters of
   these names, and the algorithm can train them.
7. `Ensemble`: `combine` suits the task.

`log_checks` then writes one line to the logger "fedensemble", at level DEBUG.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

import torch
from torch import Tensor, nn

from ..data.checks import note_channels_last
from ..data.federated import FederatedData
from ..data.labels.label_checks import advise_labels, check_whole
from ..errors import InputError, first_line, setting
from ..modeling.factory import ModelSpec
from ..modeling.functional_model import FunctionalModel
from ..modeling.losses import Loss, check_loss
from ..modeling.model_checks import check_training_step
from ..runtime.num_threads import num_threads
from ..runtime.oom import advise_smaller_visit, memory_report, out_of_memory, raise_on_oom
from .memory_limits import check_memory, check_range
from .token_ids import check_tokens

_TRAINABLE: set[Hashable] = set()  # keys of what has passed `check_training`

logger = logging.getLogger("fedensemble")

CHECKS = (
    "arguments",
    "model size",
    "memory for the modes",
    "value range of the data",
    "token ids",
    "model outputs and loss",
    "training step",
    "engine",
    "aggregator",
    "messages of the algorithm",
    "shared parameters",
    "combination of predictions",
)
# What a model, a loss or torch raises on inputs that do not fit.
_MODEL_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)


def log_checks(modes: int, seconds: float, memory: object) -> None:
    """Logs the checks that have passed.

    Args:
        modes: K.
        seconds: time since the first check, including the construction of model and engine.
        memory: what a visit costs, see `memory_limits.VisitMemory`.
    """
    logger.debug(
        "Pre-flight checks for %d modes passed in %.2f s: %s; %s.",
        modes,
        seconds,
        ", ".join(CHECKS),
        memory,
    )


def check_arguments(data: FederatedData, seed: int) -> None:
    """Raises unless `data` is a FederatedData and `seed` is an integer of at most 63 bits."""
    if not isinstance(data, FederatedData):
        raise InputError(
            "data must be a FederatedData, as from_clients([...]) makes; "
            f"got {type(data).__name__}."
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise InputError(f"seed must be an integer of at most 63 bits; got {seed!r}.")


def check_model(
    functional_model: FunctionalModel, data: FederatedData, modes: int, dropout_samples: int = 0
) -> None:
    """Raises unless K modes fit into memory, the model accepts the data, and MC-dropout works."""
    check_memory(functional_model, modes)
    check_range(data, functional_model.dtype)
    check_outputs(functional_model, data)
    if dropout_samples:
        check_dropout(functional_model, data, dropout_samples)


@num_threads(1)
def check_dropout(functional_model: FunctionalModel, data: FederatedData, samples: int) -> None:
    """Raises unless the model has dropout, without which all samples of MC-dropout are equal."""
    x, _ = first_examples(functional_model, data, 2)
    if not functional_model.has_dropout(x):
        name = type(functional_model.mc_dropout_model).__name__
        raise InputError(
            f"dropout_samples={samples} is MC-dropout, and {name} has no active dropout: all "
            "samples would be equal. Give the model dropout, such as model.dropout = 0.1 in a "
            f"config, or leave out {setting('ensemble.dropout_samples')}."
        )


@num_threads(1)
def check_outputs(functional_model: FunctionalModel, data: FederatedData) -> None:
    """Raises unless the model and the loss accept the first 8 examples."""
    model = functional_model.build(0).eval()
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "model() returned a scripted module (torch.jit), which cannot be run with external "
            "parameters. Return the plain nn.Module; engine 'vector' makes it fast."
        )
    check_tokens(model, data)
    model = model.to(functional_model.device)
    x, y = first_examples(functional_model, data, 8)
    try:
        with torch.no_grad():
            outputs = model(x)
    except _MODEL_ERRORS as error:
        raise InputError(
            f"The model cannot take inputs of shape {tuple(x.shape)} {x.dtype}: "
            f"{_explain_failure(model, x, error)}"
        ) from None
    if not isinstance(outputs, Tensor):
        raise InputError(f"The model must return one tensor; got {type(outputs).__name__}.")
    if functional_model.task == "classification":
        _check_labels(functional_model.user_loss, outputs, y, data)
    try:
        functional_model.loss(outputs, y)
        check_loss(functional_model.user_loss, functional_model.loss, outputs, y)
    except _MODEL_ERRORS as error:
        if isinstance(error, InputError) or out_of_memory(error):
            raise
        raise InputError(
            f"The loss cannot take outputs of shape {tuple(outputs.shape)} {outputs.dtype} and "
            f"targets of shape {tuple(y.shape)} {y.dtype}: {first_line(error)}"
        ) from error


def _check_labels(loss: str | Loss, outputs: Tensor, y: Tensor, data: FederatedData) -> None:
    """Raises unless the data's labels are classes for which the model has outputs.

    Args:
        loss: as the user passed it.
        outputs: of the model for the first examples, [B, ..., C].
        y: labels of the first examples, [B, ...].
    """
    if data.y.is_floating_point():
        advice = advise_labels(data.y) or "For regression use loss='mse'."
        raise InputError(
            f"Loss '{loss}' needs integer labels, and the targets are floats. {advice}"
        )
    if loss == "bce":
        return _check_binary_labels(outputs, y, data)
    if outputs.shape[:-1] != y.shape:
        if (advice_on_shape := advise_labels(data.y)) is not None:
            raise InputError(
                f"Labels must be one integer per example; got shape {tuple(data.y.shape)}. "
                f"{advice_on_shape}"
            )
        raise InputError(
            "The model must return one value per class, [B, ..., C], classes last; got shape "
            f"{tuple(outputs.shape)} for labels {tuple(y.shape)}."
        )
    if data.y_test is not None:
        check_whole(data.y_test, "Test labels")
    if outputs.shape[-1] < 2:
        raise InputError(
            "Classification needs two classes or more, and the model has one output per example. "
            "Give it one output per class, or use loss='bce' for two classes; for regression use "
            "loss='mse'."
        )
    classes, highest = outputs.shape[-1], int(data.y.max())
    if highest >= classes:
        raise InputError(
            f"Labels go up to {highest}, but the model has {classes} outputs; "
            f"it needs at least {highest + 1}."
        )


def _check_binary_labels(outputs: Tensor, y: Tensor, data: FederatedData) -> None:
    """Raises unless labels are 0 and 1, one per example, and the model has one output for each."""
    if y.dim() != 1:
        raise InputError(
            f"Loss 'bce' needs one label per example; got labels of shape {tuple(data.y.shape)}. "
            f"{advise_labels(data.y) or ''}".strip()
        )
    if outputs.shape not in (y.shape, (*y.shape, 1)):
        raise InputError(
            f"Loss 'bce' needs a model with one output per example, the logit of class 1; got "
            f"outputs of shape {tuple(outputs.shape)} for {len(y)} examples. Give it one output, "
            "or use loss='cross_entropy'."
        )
    if data.y_test is not None:
        check_whole(data.y_test, "Test labels")
    labels = [values for values in (data.y, data.y_test) if values is not None and len(values)]
    highest = max(int(values.max()) for values in labels)
    if highest > 1 or (data.classes or 2) > 2:
        raise InputError(
            f"Loss 'bce' is for two classes, 0 and 1; got {max(data.classes or 0, highest + 1)} "
            "classes. Use loss='cross_entropy' and a model with one output per class."
        )


def _explain_failure(model: nn.Module, x: Tensor, error: Exception) -> str:
    """The reason why a model failed on `x`: out of memory, the wrong dtype, or torch's message."""
    if out_of_memory(error):
        return (
            f"there is not enough memory{memory_report(error, x.device)}. Use a smaller model, or "
            "a GPU or host with more memory."
        )
    embeds = any(isinstance(module, nn.Embedding) for module in model.modules())
    if embeds and x.is_floating_point():
        return (
            "it embeds tokens, which are integers. Give x as integers, or use a model that takes "
            "floats."
        )
    if (note := _explain_image_layout(x)) is not None:
        return f"{first_line(error)}. {note}"
    if not embeds and not x.is_floating_point():
        return (
            "integers stay integers (tokens), and this model computes with floats. "
            "Give x as floats, x.float()."
        )
    return first_line(error)


def _explain_image_layout(x: Tensor) -> str | None:
    """Advice if inputs [n, ...] look like images without a channel, or with the channels last."""
    if x.dim() == 4:
        return note_channels_last(x)
    if x.dim() == 3 and x.is_floating_point() and min(x.shape[1:]) > 4:
        return "If these are gray images, give them a channel: x[:, None]."
    return None


@num_threads(1)
def check_training(functional_model: FunctionalModel, data: FederatedData, batch_size: int) -> None:
    """Raises unless the model can take a training step.

    The step has two examples, which is cheap. If it fails, a full batch decides: a model may need
    more than two examples. What has passed is not tried again for the next run with the same model
    spec and data of the same shape, such as the next trial of a search.
    """
    key = _training_key(functional_model, data, batch_size)
    if key in _TRAINABLE:
        return
    for count in sorted({min(2, batch_size), batch_size}):
        x, y = first_examples(functional_model, data, count)
        try:
            with raise_on_oom(
                f"A step on {count} examples does", functional_model.device, advise_smaller_visit()
            ):
                check_training_step(functional_model, x, y)
            if key is not None:
                _TRAINABLE.add(key)
            return
        except _MODEL_ERRORS as error:
            if isinstance(error, InputError) or out_of_memory(error):
                raise
            failure = error
    if functional_model.has_batch_statistics and isinstance(failure, ValueError):
        largest = int(data.size.max())
        advice = "Raise batch_size."
        if batch_size >= largest:
            most = f"{largest} example{'s' * (largest > 1)}"
            advice = (
                f"No client has more than {most}: use GroupNorm, or clients with more examples."
            )
        raise InputError(
            f"BatchNorm cannot train on batches of {len(x)}: {first_line(failure)}. {advice}"
        ) from None
    raise InputError(
        f"The model cannot be trained on inputs of shape {tuple(x.shape)} {x.dtype}: "
        f"{first_line(failure)}"
    ) from failure


def _training_key(
    functional_model: FunctionalModel, data: FederatedData, batch_size: int
) -> Hashable:
    """Equal if the training steps of two runs have equal shapes; None if that is not known.

    A user's own factory or loss may do something else in each call.
    """
    spec, loss = functional_model.factory, functional_model.user_loss
    if not isinstance(spec, ModelSpec) or not isinstance(loss, str):
        return None
    shapes = (data.x.shape[1:], data.x.dtype, data.y.shape[1:], data.y.dtype, data.classes)
    return spec.key, loss, shapes, batch_size, functional_model.device, functional_model.dtype


def first_examples(
    functional_model: FunctionalModel, data: FederatedData, count: int
) -> tuple[Tensor, Tensor]:
    """Copies of the first `count` inputs and targets; a model may write into its inputs."""
    x, y = data.inputs(data.x[:count].clone(), functional_model.dtype), data.y[:count].clone()
    target_dtype = functional_model.dtype if functional_model.task == "regression" else None
    return x.to(functional_model.device), y.to(functional_model.device, target_dtype)
