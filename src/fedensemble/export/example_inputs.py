"""Inputs as an exported file takes them, and examples to trace and check it with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import prng
from ..data.convert import as_tensor
from ..data.data_frame import from_frame
from ..errors import InputError

if TYPE_CHECKING:
    from ..predict import Ensemble

ROWS = 7  # of the examples; not 1, which torch.export would take for a constant


def to_file_inputs(ensemble: Ensemble, x: Any) -> Tensor:
    """Inputs in the type that the file takes: floating point as the model's, tokens as int64.

    A file has one type of input. Bytes of images become floating point; `predict` converts them in
    the same way before it normalizes them.
    """
    inputs = as_tensor(from_frame(x, ensemble.feature_names, "the inputs")).cpu()
    takes_numbers = ensemble.tokens is False or ensemble.standardise is not None
    if takes_numbers or inputs.is_floating_point():
        return inputs.to(ensemble.model.dtype)
    return inputs.long()


def example_inputs(ensemble: Ensemble, given: Any = None) -> Tensor:
    """At least `ROWS` inputs, [n, ...]: repetitions of those given, or random ones.

    Random tokens are below the size of the smallest embedding.
    """
    if given is not None:
        inputs = to_file_inputs(ensemble, given)
        if inputs.dim() == 0 or not len(inputs):
            raise InputError("export() needs at least one example of the inputs; got none.")
        return inputs[torch.arange(max(ROWS, len(inputs))) % len(inputs)]
    shape = ensemble.input_shape
    if shape is None or (ensemble.tokens is None and ensemble.standardise is None):
        raise InputError(
            "The shape or the type of the inputs of this ensemble is not known: pass some inputs, "
            "export(path, examples=x)."
        )
    key = prng.key(0, "export")
    uniform = prng.uniform(key, ROWS * max(1, torch.Size(shape).numel())).reshape(ROWS, *shape)
    if ensemble.tokens:
        sizes = [
            part.num_embeddings
            for part in ensemble.model.eval_model.modules()
            if isinstance(part, nn.Embedding)
        ]
        return (uniform * min(sizes, default=2)).long()
    inputs = 4 * uniform.to(ensemble.model.dtype) - 2
    rule = ensemble.standardise
    if rule is None:
        return inputs
    # Two standard deviations around the mean, as the model's own inputs.
    columns = (-1, *(1,) * (len(shape) - 1))
    mean, std = (
        torch.tensor(values, dtype=inputs.dtype).reshape(columns)
        for values in (rule.mean, rule.std)
    )
    return inputs * std + mean
