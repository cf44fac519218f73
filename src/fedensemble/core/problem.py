"""One client's objective, or that of J clients at once, as an algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .. import prng
from ..flat_params import Tree
from .optimizer import Optimizer
from .secret import SecretSource

_SECRET = 0x5EC2E7  # sets the keys of simulated secret numbers apart from those of `uniform`
Gradient = Callable[[Tensor], Tensor]
Step = Callable[[Tree, Gradient], Tree]
Adjust = Callable[[Tensor, Tensor], Tensor]


class Steps(Protocol):
    """What an engine gives a problem: gradients, step by step."""

    count: int  # steps of the longest visit
    active: Tensor | None  # [S, ..., 1], False where a visit is already done; None if none ever is

    def gradient(
        self, step: int, at: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Minibatch gradient [..., P], loss [...] and new buffers [..., R] in a local step."""
        ...


class LocalProblem:
    """The objective of a visit: all an algorithm may know of a client.

    Everything broadcasts over the leading dimensions: none, or J visits.

    Args:
        steps: where gradients come from.
        buffers: running statistics the visit starts with, [..., R].
        optimizer, lr: the local optimiser and this round's learning rate.
        sizes: examples of the client, [..., 1].
        counts: local steps of the client, [..., 1].
        key: for random numbers of the algorithm's own, [...].
        coin: a number in (0, 1) that all clients of a mode and the server share in a round, [...,
            1].
        secret: where secret numbers come from; None, in a simulation, makes them from the key.
    """

    def __init__(
        self,
        steps: Steps,
        buffers: Tensor,
        optimizer: Optimizer,
        lr: Tensor | float,
        sizes: Tensor,
        counts: Tensor,
        key: Tensor,
        coin: Tensor,
        secret: SecretSource | None = None,
    ) -> None:
        self.optimizer, self.lr, self.sizes, self.counts, self.coin = (
            optimizer,
            lr,
            sizes,
            counts,
            coin,
        )
        self.buffers = buffers
        self.losses: dict[int, Tensor] = {}  # minibatch loss [...] of each step
        self._steps, self._key, self._drawn = steps, key, 0
        self._secret, self._secrets = secret, 0

    def uniform(self, like: Tensor) -> Tensor:
        """Fresh random numbers in (0, 1) shaped like `like`, [..., P]: for compression, sampling
        and the like.

        They follow from the run's seed, which the server knows: they hide nothing from it. See
        `secret_uniform`.
        """
        self._drawn += 1
        return prng.uniform(prng.fold(self._key, self._drawn), like.shape[-1]).to(like.dtype)

    def secret_uniform(self, like: Tensor) -> Tensor:
        """Fresh random numbers in (0, 1) shaped like `like` that only the client knows, [..., P].

        On a real client they come from the operating system's cryptographic source: they are
        different at each visit, also if the server asks for the same visit twice, and nobody can
        repeat them. In a simulation, where there is nobody to hide from, they follow from seed,
        round, client and mode, so that runs can be repeated.
        """
        return self._secret_numbers(like).to(like.dtype)

    def secret_normal(self, like: Tensor) -> Tensor:
        """The same with a standard normal distribution: noise for differential privacy.

        Noise in floating point can leak through its last bits (Mironov 2012). A method that must
        withstand this rounds what it sends to a grid.
        """
        drawn: Tensor = torch.special.ndtri(self._secret_numbers(like))
        return drawn.to(like.dtype)

    def _secret_numbers(self, like: Tensor) -> Tensor:
        """As `secret_uniform`, in float64: rounded to float32, a number could be 1, for which
        `ndtri` is infinite.
        """
        self._secrets += 1
        if self._secret is not None:
            return self._secret(like.numel()).reshape(like.shape).to(like.device)
        return prng.uniform(prng.fold(self._key, _SECRET, self._secrets), like.shape[-1])

    def iterate(self, state: Tree, step: Step) -> Tree:
        """The state after all local steps of `step(state, gradient) -> state`.

        `gradient(at)` is the gradient on this step's minibatch, at any point. Visits with fewer
        steps stand still while others go on.
        """
        for index in range(self._steps.count):
            active = None if self._steps.active is None else self._steps.active[index]

            def gradient(at: Tensor, index: int = index, active: Tensor | None = active) -> Tensor:
                value, (loss, buffers) = self._steps.gradient(index, at, self.buffers)
                self.buffers = (
                    buffers if active is None else torch.where(active, buffers, self.buffers)
                )
                self.losses[index] = loss.detach()
                return value

            new = step(state, gradient)
            if active is not None:
                new = {name: torch.where(active, value, state[name]) for name, value in new.items()}
            state = new
        return state

    def descend(
        self, start: Tensor, adjust: Adjust | None = None, limit: Tensor | None = None
    ) -> Tensor:
        """The model after local training from `start` with the local optimiser.

        Args:
            adjust: `adjust(theta, gradient)` is used in place of the gradient; this is where most
                methods differ.
            limit: steps after which a visit stops early, [..., 1]. Whoever stopped still looks at
                its batches, which shows in the reported loss and in BatchNorm's statistics only.
        """

        def step(state: Tree, gradient: Gradient) -> Tree:
            theta = state["theta"]
            value = gradient(theta)
            value = value if adjust is None else adjust(theta, value)
            slots = {name: slot for name, slot in state.items() if name != "theta"}
            theta, slots = self.optimizer.step(theta, value, slots, self.lr)
            return {"theta": theta, **slots}

        def stopping(state: Tree, gradient: Gradient) -> Tree:
            left = state["left"]
            state = {name: value for name, value in state.items() if name != "left"}
            new = step(state, gradient)
            return {
                "left": left - 1,
                **{name: torch.where(left > 0, new[name], old) for name, old in state.items()},
            }

        state = {"theta": start, **self.optimizer.slots(start)}
        if limit is None:
            return self.iterate(state, step)["theta"]
        return self.iterate({**state, "left": limit.to(start.dtype)}, stopping)["theta"]
