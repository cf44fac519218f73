"""A block of visits that are trained together: its inputs, its local steps and its results."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ... import prng
from ...core.algorithm import Algorithm
from ...data.federated import FederatedData
from ...flat_params import Tree, select_rows
from ...modeling.functional_model import GradientFn
from ..stacked.aligned_rows import gather_rows


class BlockInputs(NamedTuple):
    """All inputs of the local training of J visits.

    Only tensors and dicts of tensors, so that a CUDA graph can read them from fixed addresses.
    """

    sent: Tree  # [K, P], one row per mode
    mode: Tensor  # [J] row of `sent` that each visit gets
    memory: Tree  # [J, P] client state
    buffers: Tensor  # [J, R]
    batch_index: Tensor  # [S, J, B] examples of each local step, as rows of the data
    weight: Tensor  # [S, J, B] True for examples, False for padding
    model_key: Tensor  # [J] keys of random layers such as dropout
    algorithm_key: Tensor  # [J] keys of the algorithm's own random numbers
    shared_draw: Tensor  # [J, 1] random number that all visits of a mode share
    sizes: Tensor  # [J, 1] examples of the client
    counts: Tensor  # [J, 1] local steps of the visit
    lr: Tensor  # [J, 1]
    hyperparameters: Tree  # [J, 1] each; those that differ between runs trained together
    # "first", the first row of the client's data, [J]; empty if nothing needs all rows of a client
    rows: Tree
    # "key", "first" (row of the client's data) and "scale" of each visit's noise of the targets,
    # [J]; empty without noise
    target_noise: Tree


class BatchPlan(NamedTuple):
    """The part of `BlockInputs` that follows from seed, round and plan alone.

    It does not depend on the result of any earlier round, so it can be made in advance.
    """

    batch_index: Tensor
    weight: Tensor
    model_key: Tensor
    algorithm_key: Tensor
    shared_draw: Tensor
    sizes: Tensor
    counts: Tensor


class BlockResult(NamedTuple):
    """The results of the local training of J visits."""

    uploads: Tree  # [J, P]
    memory: Tree  # [J, P] new client state
    buffers: Tensor  # [J, R]
    losses: Tensor  # [S, J]


class Minibatches:
    """The local steps of a block: gathers the batch of each step and computes its gradient.

    Args:
        gradient: computes gradient, loss and new buffers on a batch.
        ragged: whether the visits have different numbers of local steps.
    """

    def __init__(
        self,
        data: FederatedData,
        dtype: torch.dtype,
        gradient: GradientFn,
        inputs: BlockInputs,
        ragged: bool,
    ) -> None:
        self.data, self.dtype, self._gradient, self.inputs = data, dtype, gradient, inputs
        self.count = len(inputs.batch_index)
        # A batch of padding only marks a visit that has finished its local steps.
        self.active = inputs.weight.any(-1, keepdim=True) if ragged else None

    def gradient(
        self, step: int, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gradient, loss and new buffers on the batch of a local step."""
        inputs = self.inputs
        return self.on_batch(
            inputs.batch_index[step], inputs.weight[step], self._step_keys[step], theta, buffers
        )

    @cached_property
    def _step_keys(self) -> Tensor:
        """Keys of the random layers in each step, [S, ...]."""
        key = self.inputs.model_key
        steps = torch.arange(self.count, device=key.device).reshape(-1, *(1,) * key.dim())
        return torch.as_tensor(prng.fold_in(key, steps))

    def on_batch(
        self, index: Tensor, weight: Tensor, key: Tensor, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Gradient, loss and new buffers on the examples in rows `index` of the data, [..., B]."""
        x, y = self.examples(index)
        return self._gradient(theta, buffers, x, y, weight, key)

    def examples(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the examples in rows `index` of the data, [..., B, ...]."""
        x = self.data.inputs(self.data.x[index.flatten()], self.dtype)
        x, y = x.reshape(*index.shape, *x.shape[1:]), self.data.y[index]
        y = y.to(self.dtype) if y.is_floating_point() else y
        if self.inputs.target_noise:
            y = y + self._target_noise(index, y)
        return x, y

    def _target_noise(self, index: Tensor, y: Tensor) -> Tensor:
        """The noise that the visits' modes add to the targets of rows `index`, like `y`.

        It is a function of mode, client and the example's place in the client's data, so that a
        mode sees the same noisy targets in every round.
        """
        key, first, scale = (self.inputs.target_noise[n] for n in ("key", "first", "scale"))
        keys = prng.fold_in(key.unsqueeze(-1), index - first.unsqueeze(-1))  # [..., B]
        noise = prng.normal(torch.as_tensor(keys), y.numel() // index.numel())
        noise = noise.reshape(y.shape).to(y.dtype)
        return noise * scale.reshape(*scale.shape, *(1,) * (y.dim() - scale.dim()))


def gather_sent(inputs: BlockInputs) -> Tree:
    """The broadcast as each visit receives it, [J, P]: the row of its mode."""
    return {name: gather_rows(value, inputs.mode) for name, value in inputs.sent.items()}


def squeeze_single_visit(inputs: BlockInputs) -> BlockInputs:
    """The inputs of a block of one visit, without the dimension of length J = 1."""
    values = inputs._asdict()
    for name in ("memory", "hyperparameters", "rows", "target_noise"):
        values[name] = select_rows(values[name], 0)
    per_visit = (
        "mode",
        "buffers",
        "model_key",
        "algorithm_key",
        "shared_draw",
        "sizes",
        "counts",
        "lr",
    )
    for name in per_visit:
        values[name] = values[name][0]
    for name in ("batch_index", "weight"):
        values[name] = values[name][:, 0]
    return BlockInputs(**values)


def with_hyperparameters(algorithm: Algorithm, hyperparameters: Tree) -> Algorithm:
    """A copy of the algorithm in which tensors [..., 1] replace some of its hyperparameters.

    Visits of different runs can then be trained in one block: `self.mu * x` broadcasts over the
    visits and gives each of them the value of its run.
    """
    if not hyperparameters:
        return algorithm
    changed = copy(algorithm)
    # A cached property may have been computed from the hyperparameters of one run. Without this,
    # all runs of the block would use the value of the first.
    cached = [
        name
        for name in vars(changed)
        if isinstance(getattr(type(changed), name, None), cached_property)
    ]
    for name in cached:
        del changed.__dict__[name]
    for name, value in hyperparameters.items():
        object.__setattr__(changed, name, value)  # algorithms are frozen dataclasses
    return changed


def summarize_losses(result: BlockResult, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
    """Mean loss and index of the first bad step (-1 if there is none) of each visit, [J] each.

    The loss is NaN if the upload or the new client state is not finite.
    """
    active = inputs.weight[: len(result.losses)].any(-1)  # [S, J]
    loss = torch.where(active, result.losses, 0).sum(0) / active.sum(0)
    bad = active & ~torch.isfinite(result.losses)
    # The sum of a row is finite only if all its values are, so that one pass over the uploads is
    # enough. Values near 1e38 can overflow the sum, but a model with such weights has diverged.
    # Client state is checked as well: the state of Ditto can diverge while the upload is fine.
    tensors = [*result.uploads.values(), *result.memory.values()]
    finite = torch.stack([value.sum(-1).isfinite() for value in tensors]).all(0)
    # If all losses are finite and a tensor is not, the last step was the bad one.
    last = torch.where(finite, -1, active.sum(0) - 1)
    return torch.where(finite, loss, torch.nan), torch.where(bad.any(0), bad.long().argmax(0), last)
