"""The base class of averages over models that are collected at regular rounds."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.average import Average
from ..errors import InputError
from ..flat_params import Tree


@dataclass(frozen=True, kw_only=True)
class Periodic(Average):
    """An average over the models of a mode at the end of every period of `every` rounds.

    Periods count all rounds of a run, so that they agree with cycles of the learning rate
    (`every = lr_cycle`). A mode that no client trained during a period has not changed since the
    period before, and is not collected a second time.

    Args:
        every: number of rounds per period; a model is collected after its last round.
        start: number of rounds at the beginning whose models are not collected.
    """

    every: int = 1
    start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        if self.every < 1 or self.start < 0:
            raise InputError(
                f"{owner} needs every >= 1 and start >= 0; got {self.every} and {self.start}."
            )

    def note(self, rounds: int) -> str:
        first = (self.start // self.every + 1) * self.every
        if first <= rounds:
            return ""
        return (
            f"{type(self).__name__} collects its first model after round {first}, and there are "
            f"{rounds} rounds: until then the current modes predict."
        )

    def init(self, theta: Tensor, buffers: Tensor) -> Tree:
        one_per_mode = theta.new_zeros(len(theta), 1)
        return {
            **self.init_models(theta, buffers),
            "collected": one_per_mode.long(),  # number of models
            "changed": one_per_mode.bool(),  # whether a client trained the mode in this period
        }

    def update(
        self, state: Tree, theta: Tensor, buffers: Tensor, trained: Tensor, round: int, lr: float
    ) -> Tree:
        if round < self.start:
            return state
        changed = state["changed"] | trained.unsqueeze(1)
        if (round + 1) % self.every:
            return {**state, "changed": changed}
        count = state["collected"] + changed
        # The divisor of modes that are not collected is never used; it must not be 0.
        updated = self.add_models(state, theta, buffers, count.clamp(min=1).to(theta.dtype))
        rows = {
            name: torch.where(changed.reshape(-1, *[1] * (value.dim() - 1)), value, state[name])
            for name, value in updated.items()
        }
        return {**rows, "collected": count, "changed": torch.zeros_like(changed)}

    @abstractmethod
    def init_models(self, theta: Tensor, buffers: Tensor) -> Tree:
        """The part of the state that `add_models` returns, before the first model."""

    @abstractmethod
    def add_models(self, state: Tree, theta: Tensor, buffers: Tensor, count: Tensor) -> Tree:
        """That part of the state with one more model of every mode.

        Args:
            state: before.
            theta, buffers: the models to add, [K, P] and [K, R].
            count: number of models including this one, [K, 1].
        """


@dataclass(frozen=True, kw_only=True)
class PeriodicMean(Periodic):
    """A plain mean of the collected models."""

    def init_models(self, theta: Tensor, buffers: Tensor) -> Tree:
        return {"mean": torch.zeros_like(theta), "mean_buffers": torch.zeros_like(buffers)}

    def add_models(self, state: Tree, theta: Tensor, buffers: Tensor, count: Tensor) -> Tree:
        models = {"mean": theta, "mean_buffers": buffers}
        return {name: state[name] + (value - state[name]) / count for name, value in models.items()}

    def center(self, state: Tree, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        collected = state["collected"] > 0
        return (
            torch.where(collected, state["mean"], theta),
            torch.where(collected, state["mean_buffers"], buffers),
        )
