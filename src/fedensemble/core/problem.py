"""The local training problem of one client, or of J clients at once, as an algorithm sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .. import prng
from ..errors import InputError
from ..flat_params import Tree
from .optimizer import Optimizer
from .secret import SecretSource

# Separates the PRNG keys of simulated secret values from those of `uniform`.
_SECRET = 0x5EC2E7
Gradient = Callable[[Tensor], Tensor]
Step = Callable[[Tree, Gradient], Tree]
Adjust = Callable[[Tensor, Tensor], Tensor]


class Steps(Protocol):
    """The gradients of each local step, which an engine provides."""

    count: int  # steps S of the longest visit
    # [S, ..., 1], False in steps after a visit's last one; None if all visits have S steps
    active: Tensor | None

    def gradient(
        self, step: int, theta: Tensor, buffers: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Minibatch gradient [..., P], (loss [...], new buffers [..., R]) of a local step."""
        ...


@runtime_checkable
class JointSteps(Steps, Protocol):
    """The local steps of joint visits, see `core/visits/joint.py`."""

    def row_losses(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """See `LocalProblem.row_losses`."""
        ...

    def weigh_rows(self, weight: Tensor) -> None:
        """See `LocalProblem.weigh_rows`."""
        ...


class LocalProblem:
    """The local problem of a visit: all that an algorithm may know of a client.

    All tensors broadcast over the leading dimensions: none for one visit, or J visits.

    Args:
        steps: source of gradients.
        buffers: running statistics at the start of the visit, [..., R].
        optimizer, lr: the local optimizer and this round's learning rate.
        sizes: number of examples of the client, [..., 1].
        counts: number of local steps of the client, [..., 1].
        key: PRNG key for random values of the algorithm, [...].
        shared_draw: a random draw in (0, 1) that the server shares with all clients of a mode in a
            round, [..., 1].
        secret: source of secret random values; None, for simulations, derives them from the key.
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
        shared_draw: Tensor,
        secret: SecretSource | None = None,
    ) -> None:
        self.optimizer, self.lr, self.sizes, self.counts, self.shared_draw = (
            optimizer,
            lr,
            sizes,
            counts,
            shared_draw,
        )
        self.buffers = buffers
        self.losses: dict[int, Tensor] = {}  # minibatch loss [...] of each step
        self.steps, self._key, self._drawn = steps, key, 0
        self._secret, self._secrets = secret, 0

    def uniform(self, like: Tensor) -> Tensor:
        """New random values in (0, 1) shaped like `like`, [..., P], such as for compression.

        The values are derived from the run's seed, which the server knows. Use `secret_uniform` to
        hide something from the server.
        """
        self._drawn += 1
        return prng.uniform(prng.fold_in(self._key, self._drawn), like.shape[-1]).to(like.dtype)

    def secret_uniform(self, like: Tensor) -> Tensor:
        """New random values in (0, 1) shaped like `like` that only the client knows, [..., P].

        On a real client they come from the operating system's cryptographic source. They differ
        between visits, even if the server asks for the same visit twice, and cannot be reproduced.
        A simulation has nothing to hide: there they are derived from seed, round, client and mode,
        so that runs are reproducible.
        """
        return self._draw_secret(like).to(like.dtype)

    def secret_normal(self, like: Tensor) -> Tensor:
        """Standard normal values that only the client knows, as noise for differential privacy.

        The last bits of floating-point noise can leak information (Mironov 2012). An algorithm that
        must withstand this rounds its uploads to a grid.
        """
        noise: Tensor = torch.special.ndtri(self._draw_secret(like))
        return noise.to(like.dtype)

    def _draw_secret(self, like: Tensor) -> Tensor:
        """Secret random values in (0, 1) in float64.

        In float32 a value could round to 1, for which `ndtri` is infinite.
        """
        self._secrets += 1
        if self._secret is not None:
            return self._secret(like.numel()).reshape(like.shape).to(like.device)
        return prng.uniform(prng.fold_in(self._key, _SECRET, self._secrets), like.shape[-1])

    def row_losses(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each of the client's n rows under K models, [..., K, n], in eval mode.

        For algorithms with joint visits. Of several visits, n is the number of rows of the largest
        client; the second result, [..., n], is 1 for rows and 0 for padding.

        Args:
            theta, buffers: of the models, [..., K, P] and [..., K, R].
        """
        return self._joint_steps.row_losses(theta, buffers)

    def weigh_rows(self, weight: Tensor) -> None:
        """Multiplies the loss of each row by a weight in the gradients of all further steps.

        For algorithms with joint visits. The gradient of a model is then the mean over the rows of
        a minibatch of weight times gradient.

        Args:
            weight: of each row for each of the K models of the visit, [..., K, n].
        """
        self._joint_steps.weigh_rows(weight)

    @property
    def _joint_steps(self) -> JointSteps:
        if not isinstance(self.steps, JointSteps):
            raise InputError("Only algorithms with `joint = True` know the losses of single rows.")
        return self.steps

    def iterate(self, state: Tree, step: Step) -> Tree:
        """The state after all local steps of `step(state, gradient) -> state`.

        `gradient(theta)` computes the gradient on the step's minibatch at any point: accelerated
        algorithms evaluate it at a point other than the one that they update. The state of a visit
        with fewer steps does not change after its last step.
        """
        for index in range(self.steps.count):
            active = None if self.steps.active is None else self.steps.active[index]

            def gradient(
                theta: Tensor, index: int = index, active: Tensor | None = active
            ) -> Tensor:
                value, (loss, buffers) = self.steps.gradient(index, theta, self.buffers)
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

    def descend(self, start: Tensor, adjust: Adjust | None = None) -> Tensor:
        """The parameters after local training from `start` with the local optimizer.

        Args:
            adjust: `adjust(theta, gradient)` replaces the gradient; most algorithms differ only
                here.
        """

        def step(state: Tree, gradient: Gradient) -> Tree:
            theta = state["theta"]
            value = gradient(theta)
            value = value if adjust is None else adjust(theta, value)
            slots = {name: slot for name, slot in state.items() if name != "theta"}
            theta, slots = self.optimizer.step(theta, value, slots, self.lr)
            return {"theta": theta, **slots}

        return self.iterate({"theta": start, **self.optimizer.init_state(start)}, step)["theta"]
