"""The outputs of many models for the same inputs: one stacked pass for a block of models.

A prediction runs K * S models, each with its own dropout masks if there are any. Models that are
small run mostly on the cost of calling functions (CPU) or of launching kernels (GPU), so a block of
them runs as one pass. A check on a few examples compares the pass with single ones first, in
float64; models that it rejects, and models that fill the machine on their own, run one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import InputError
from ...flat_params import tensor_leaves
from ...modeling.factory import ModelSpec
from ...modeling.functional_model import FunctionalModel
from ...modeling.losses import class_logits
from ...modeling.parameter_swap import swap_parameters
from ...runtime.oom import out_of_memory
from ...runtime.torch_compat import has_forward_hooks
from .call_log import Call, record_calls
from .errors import PATH_CHANGED, NotStackable
from .stacked_params import FrozenParams

# "eval": no randomness; "dropout": dropout as in training; "mc-dropout": dropout masks of samples;
# "batch statistics": all layers in train mode, which is never stacked.
How = Literal["eval", "dropout", "mc-dropout", "batch statistics"]
# Bytes of the largest tensors of a block of models, by device. Results hardly depend on it, but it
# is a constant all the same, so that the same call gives the same bits on every start.
_BLOCK_BYTES = {"cpu": 1 << 20, "cuda": 1 << 30}
# A model whose largest tensor has more bytes than this fills a CPU by itself.
_LARGEST_ON_CPU = 32 << 10
# The models and examples of the check; their product is no dimension that models have.
_MODELS, _EXAMPLES = 3, 5
_TOLERANCE = 1e-9


class _Stackable(NamedTuple):
    """The result of the check of a model that can be stacked."""

    bytes_per_example: int  # of the largest tensor of a pass
    calls: tuple[Call | None, ...] | None  # as `StackedForward` takes them


# The results of checks; None for models that run one by one. Runs of one command share them.
_BY_SPEC: dict[Hashable, _Stackable | None] = {}
_BY_MODEL: WeakKeyDictionary[FunctionalModel, dict[Hashable, _Stackable | None]] = (
    WeakKeyDictionary()
)


def member_outputs(
    model: FunctionalModel,
    theta: Tensor,
    buffers: Tensor,
    x: Tensor,
    how: How = "eval",
    keys: Sequence[int | None] | None = None,
) -> Tensor:
    """The outputs of J members for the inputs, [J, B, ..., C].

    Args:
        theta, buffers: of the models, [M, P] and [M, R].
        x: normalized inputs on the model's device, [B, ...].
        keys: of the dropout masks of each member, J of them. J is a multiple of M: the first J / M
            members are the first model with its masks. None is one member per model, no masks.
    """
    keys = [None] * len(theta) if keys is None else keys
    owners = torch.arange(len(keys)) // (len(keys) // len(theta))
    found = _find_stackable(model, x, how) if len(keys) > 1 else None
    block = 1 if found is None else _block_size(found, theta, x)
    if found is None or block < 2:
        return torch.stack(
            [
                _single(model, theta[owner], buffers[owner], key, x, how)
                for owner, key in zip(owners.tolist(), keys, strict=True)
            ]
        )
    all_keys = torch.tensor([key or 0 for key in keys]).to(x.device)
    parts = []
    each_block = zip(
        torch.split(owners.to(x.device), block), torch.split(all_keys, block), strict=True
    )
    for rows, part in each_block:
        examples = x.expand(len(rows), *x.shape)
        parts.append(_stacked(model, theta[rows], buffers[rows], examples, part, how, found.calls))
    return torch.cat(parts)


def _single(
    model: FunctionalModel,
    theta: Tensor,
    buffers: Tensor,
    key: int | None,
    x: Tensor,
    how: How,
) -> Tensor:
    """The outputs of one model, [B, ..., C]."""
    inputs = x.clone()  # a model may write into its inputs
    if how == "mc-dropout" and key is not None:
        return model.outputs_with_dropout(theta, buffers, inputs, key)
    mask = None if how == "eval" else key
    return model.outputs(theta, buffers, inputs, mask, how == "batch statistics")


def _stacked(
    model: FunctionalModel,
    theta: Tensor,
    buffers: Tensor,
    x: Tensor,
    keys: Tensor,
    how: How,
    calls: Sequence[Call | None] | None,
    needed: set[int] | None = None,
) -> Tensor:
    """The outputs of J models for their inputs [J, B, ...] from one pass, [J, B, ..., C]."""
    from .forward import StackedForward

    tensors = {
        **model.theta_layout.unflatten(theta),
        **model.buffer_layout.unflatten(buffers.clone()),
    }
    frozen = FrozenParams(model.frozen, {})
    forward = StackedForward(keys, tensors, model.dtype, calls=calls, frozen=frozen)
    module, examples = _module(model, how), x.flatten(0, 1)
    examples = examples.clone() if len(theta) == 1 else examples  # a model may write into them
    others = {name: value.clone() for name, value in model.non_float_buffers.items()}
    others |= frozen.tensors
    with torch.no_grad():
        with forward, swap_parameters(module, {**tensors, **others}):
            outputs = module(examples)
        if not isinstance(outputs, Tensor) or outputs.shape[:1] != examples.shape[:1]:
            raise NotStackable("the outputs have no batch")
        if forward.direct is not None:
            if forward.direct.unfinished:
                raise InputError(PATH_CHANGED)
            if needed is not None:
                needed.update(forward.direct.needed)
        outputs = class_logits(model.user_loss, outputs)
    return outputs.reshape(len(theta), -1, *outputs.shape[1:])


def _module(model: FunctionalModel, how: How) -> nn.Module:
    """The module that predicts in this way, in the modes of its layers."""
    if how == "mc-dropout":
        return model.mc_dropout_model
    return model.eval_model if how == "eval" else model.dropout_model


def _block_size(found: _Stackable, theta: Tensor, x: Tensor) -> int:
    """How many members run in one pass over the inputs; 1 if a stack gains nothing."""
    needed = found.bytes_per_example * len(x)
    if x.device.type == "cpu" and needed > _LARGEST_ON_CPU:
        return 1
    needed += theta.shape[1] * theta.element_size()
    return _BLOCK_BYTES.get(x.device.type, 0) // needed


def _find_stackable(model: FunctionalModel, x: Tensor, how: How) -> _Stackable | None:
    """The result of the check, which is made once for a model and the shape of an input."""
    too_large = x.device.type == "cpu" and x.nbytes > _LARGEST_ON_CPU
    if how == "batch statistics" or too_large:
        return None
    key: Hashable = (tuple(x.shape[1:]), x.dtype, how)
    cache: dict[Hashable, _Stackable | None] = _BY_MODEL.setdefault(model, {})
    if isinstance(model.factory, ModelSpec) and isinstance(model.user_loss, str):
        cache, key = _BY_SPEC, (model.factory.key, model.user_loss, str(model.device), key)
    if key not in cache:
        try:
            cache[key] = _check(model, x, how)
        except Exception as error:  # a module may raise anything; single passes show what is wrong
            if out_of_memory(error):
                raise
            cache[key] = None
    return cache[key]


def _check(model: FunctionalModel, x: Tensor, how: How) -> _Stackable:
    """Compares a stacked pass with single passes on a few examples; raises if they differ."""
    from .data_dependence import detect_data_dependence

    if has_forward_hooks(_module(model, how)):
        raise NotStackable("a hook sees the outputs of a layer")
    targets = torch.zeros(1, dtype=torch.float64 if model.task == "regression" else torch.int64)
    exact = FunctionalModel(model.factory, model.user_loss, targets, model.device, torch.float64)
    start, statistics = exact.flatten_module(exact.training_model)
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)

    # Models and statistics differ, and statistics of variance stay positive.
    theta = start.repeat(_MODELS, 1)
    theta = theta + 0.1 * start.square().mean().sqrt() * noise(theta)
    buffers = statistics.repeat(_MODELS, 1)
    buffers = buffers * (1 + 0.1 * noise(buffers).tanh())
    # Each model has examples of its own here. If all had the same, a mean over the batch would be
    # that of each model's examples. Noise makes them differ, and tokens are shuffled.
    size = _MODELS * _EXAMPLES
    rows = x[torch.arange(size, device=x.device) % len(x)]
    if rows.is_floating_point():
        scale = torch.linspace(1, 3, size, dtype=torch.float64, device=x.device)
        rows = (rows.double() + noise(rows.double())) * scale.reshape(-1, *(1,) * (x.dim() - 1))
    else:
        order = torch.rand(rows.shape, generator=generator).argsort(0).to(x.device)
        rows = rows.gather(0, order)
    rows = rows.reshape(_MODELS, _EXAMPLES, *x.shape[1:])
    keys = torch.arange(1, 1 + _MODELS, device=x.device)
    with _LargestTensor(theta) as largest:
        expected = [
            _single(exact, theta[j], buffers[j], None if how == "eval" else 1 + j, rows[j], how)
            for j in range(_MODELS)
        ]
    calls: tuple[Call | None, ...] | None = None
    try:
        with detect_data_dependence((theta, buffers, rows), size) as detector:
            outputs = _stacked(exact, theta, buffers, rows, keys, how, None)
    except NotStackable:
        # A second try, in which calls that use parameters outside of layers run for each model.
        seen = copy(exact)
        seen.training_model = _module(exact, how)
        made = record_calls(seen, theta[0], buffers[0], rows.flatten(0, 1), _EXAMPLES)
        needed: set[int] = set()
        with detect_data_dependence(
            (theta, buffers, rows), size, constant_lookups=True
        ) as detector:
            outputs = _stacked(exact, theta, buffers, rows, keys, how, made, needed)
        calls = tuple(call if n in needed else None for n, call in enumerate(made))
    if detector.reason:
        raise NotStackable(detector.reason)
    for got, wanted in zip(outputs, expected, strict=True):
        limit = _TOLERANCE * (1 + float(wanted.abs().max()))
        if got.shape != wanted.shape or not float((got - wanted).abs().max()) <= limit:
            raise NotStackable("a stacked pass gives other outputs")
    elements = max(largest.elements, outputs[0].numel()) // _EXAMPLES
    return _Stackable(elements * model.dtype.itemsize, calls)


class _LargestTensor(TorchFunctionMode):
    """Finds the number of elements of the largest tensor while active.

    Args:
        theta: parameters, whose views do not count.
    """

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.elements, self._known = 0, theta.untyped_storage().data_ptr()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensor_leaves(out):
            if tensor.untyped_storage().data_ptr() != self._known:
                self.elements = max(self.elements, tensor.numel())
        return out
