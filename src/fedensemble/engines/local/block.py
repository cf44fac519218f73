"""A block of visits that train together: what goes in, its local steps, and what comes out."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ... import prng
from ...core.algorithm import Algorithm
from ...data.federated import FederatedData
from ...flat_params import Tree, rows
from ...modeling.functional_model import GradientFn
from ..stacked.aligned_rows import gather_rows


class Inputs(NamedTuple):
    """What local training of a block of J visits needs; tensors only."""

    sent: Tree  # [K, P], a row a mode
    mode: Tensor  # [J] each visit's row of what is sent
    memory: Tree  # [J, P]
    buffers: Tensor  # [J, R]
    place: Tensor  # [S, J, B] rows of the data in each local step
    weight: Tensor  # [S, J, B] which of them count
    noise: Tensor  # [J] keys of random layers
    own: Tensor  # [J] keys of the algorithm
    coin: Tensor  # [J, 1]
    sizes: Tensor  # [J, 1]
    counts: Tensor  # [J, 1] local steps
    lr: Tensor  # [J, 1]
    hyper: Tree  # hyper-parameters that differ between visits of different runs, [J, 1]


class Tables(NamedTuple):
    """What a block of J visits needs that no other round can change."""

    place: Tensor  # all as in `Inputs`
    weight: Tensor
    noise: Tensor
    own: Tensor
    coin: Tensor
    sizes: Tensor
    counts: Tensor


class BlockResult(NamedTuple):
    """What a block of J visits gives."""

    uploads: Tree  # [J, P]
    memory: Tree  # [J, P]
    buffers: Tensor  # [J, R]
    losses: Tensor  # [S, J]


class Minibatches:
    """The local steps of a block: gathers each step's batch and asks for gradients."""

    def __init__(
        self,
        data: FederatedData,
        dtype: torch.dtype,
        gradient: GradientFn,
        given: Inputs,
        ragged: bool,
    ) -> None:
        self.data, self.dtype, self._gradient, self.given = data, dtype, gradient, given
        self.count = len(given.place)
        self.active = given.weight.any(-1, keepdim=True) if ragged else None

    def gradient(
        self, step: int, at: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Minibatch gradient, loss and new buffers in a local step."""
        return self.on_batch(
            self.given.place[step], self.given.weight[step], self._keys[step], at, buffers
        )

    @cached_property
    def _keys(self) -> Tensor:
        """Of the random layers in each step, [S, ...]."""
        noise = self.given.noise
        steps = torch.arange(self.count, device=noise.device).reshape(-1, *(1,) * noise.dim())
        return torch.as_tensor(prng.fold(noise, steps))

    def on_batch(
        self, place: Tensor, weight: Tensor, key: Tensor, at: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same on the examples in these places, [..., B]."""
        x = self.data.inputs(self.data.x[place.flatten()], self.dtype)
        x, y = x.reshape(*place.shape, *x.shape[1:]), self.data.y[place]
        y = y.to(self.dtype) if y.is_floating_point() else y
        return self._gradient(at, buffers, x, y, weight, key)


def received(given: Inputs) -> Tree:
    """What each visit was sent, [J, P]."""
    return {name: gather_rows(value, given.mode) for name, value in given.sent.items()}


def single(given: Inputs) -> Inputs:
    """A block of one visit without its leading dimension."""
    values = given._asdict()
    for name in ("memory", "hyper"):
        values[name] = rows(values[name], 0)
    for name in ("mode", "buffers", "noise", "own", "coin", "sizes", "counts", "lr"):
        values[name] = values[name][0]
    return Inputs(**{**values, "place": given.place[:, 0], "weight": given.weight[:, 0]})


def tuned(algorithm: Algorithm, hyper: Tree) -> Algorithm:
    """The algorithm with a tensor [..., 1] in place of some of its numbers: visits of different
    runs side by side.
    """
    if not hyper:
        return algorithm
    other = copy(algorithm)
    for name in [
        name
        for name in vars(other)
        if isinstance(getattr(type(other), name, None), cached_property)
    ]:
        del other.__dict__[name]  # it may have been made from one run's numbers
    for name, value in hyper.items():
        object.__setattr__(other, name, value)
    return other


def summarize_losses(trained: BlockResult, given: Inputs) -> tuple[Tensor, Tensor]:
    """Mean loss of each visit, nan if its upload is not finite, and its first bad step or -1; [J]
    each.
    """
    active = given.weight[: len(trained.losses)].any(-1)  # [S, J]
    loss = torch.where(active, trained.losses, 0).sum(0) / active.sum(0)
    bad = active & ~torch.isfinite(trained.losses)
    # One pass over the uploads: a sum is finite only if all of it is (or, at 1e38, is as good as
    # diverged).
    finite = torch.stack([value.sum(-1).isfinite() for value in trained.uploads.values()]).all(0)
    # all losses were finite, but the last step's result is not
    last = torch.where(finite, -1, active.sum(0) - 1)
    return torch.where(finite, loss, torch.nan), torch.where(bad.any(0), bad.long().argmax(0), last)
