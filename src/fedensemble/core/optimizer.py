"""Local optimizers: SGD and Adam on vectors [..., P]; their state starts fresh in each visit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree
from ..registry import Registry
from ..renamed import adopt_earlier_names
from .hyperparameters import LARGEST, check_hyperparameters

optimizers: Registry[type[Optimizer]] = Registry("optimizer", lambda: Optimizer)

_RENAMED = {"slots": "init_state"}


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """A functional optimizer: its state is an argument and a result of each step.

    Args:
        weight_decay: adds `weight_decay * theta` to the gradient (L2).
        clip: largest norm of the gradient; longer gradients are scaled down to it. 0 never clips.
    """

    weight_decay: float = 0.0
    clip: float = 0.0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_earlier_names(cls, _RENAMED)

    def __post_init__(self) -> None:
        check_hyperparameters(self)
        for name in ("weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"{type(self).__name__} needs {name} >= 0; got {getattr(self, name)}."
                )
        if self.clip > LARGEST:
            raise InputError(
                f"{type(self).__name__} needs clip <= {LARGEST:.3g}; got {self.clip}. "
                "0 never clips."
            )

    @abstractmethod
    def init_state(self, theta: Tensor) -> Tree:
        """The state before the first step; each tensor is [..., P] like `theta`, or [..., 1]."""

    @abstractmethod
    def step(
        self, theta: Tensor, gradient: Tensor, state: Tree, lr: Tensor | float
    ) -> tuple[Tensor, Tree]:
        """The parameters and the state after one step."""

    def prepare(self, theta: Tensor, gradient: Tensor) -> Tensor:
        """The gradient after clipping and weight decay."""
        if self.clip > 0:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient = gradient * (self.clip / norm.clamp(min=self.clip))
        return gradient + self.weight_decay * theta if self.weight_decay > 0 else gradient


@optimizers.register("sgd")
@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, as torch.optim.SGD.

    `v <- momentum * v + g`, `theta <- theta - lr * v`.

    Args:
        momentum: factor on the velocity of the last step.

    >>> one = torch.ones(2)
    >>> SGD(momentum=0.9).step(one, one, {"velocity": one}, lr=0.1)[0]
    tensor([0.8100, 0.8100])
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise InputError(f"SGD needs 0 <= momentum < 1; got {self.momentum}.")

    def init_state(self, theta: Tensor) -> Tree:
        return {"velocity": torch.zeros_like(theta)} if self.momentum > 0 else {}

    def step(
        self, theta: Tensor, gradient: Tensor, state: Tree, lr: Tensor | float
    ) -> tuple[Tensor, Tree]:
        gradient = self.prepare(theta, gradient)
        if self.momentum > 0:
            gradient = self.momentum * state["velocity"] + gradient
            state = {"velocity": gradient}
        if isinstance(lr, Tensor):
            # fused: one pass over the parameters instead of two
            return torch.addcmul(theta, gradient, lr, value=-1), state
        return theta - lr * gradient, state


@optimizers.register("adam")
@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015) with bias correction, as torch.optim.Adam.

    The paper uses it for Shakespeare.

    Args:
        beta1, beta2: decay rates of the running means of the gradient and of its square.
        epsilon: added to the square root of the latter, for numerical stability.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"Adam needs 0 <= {name} < 1; got {getattr(self, name)}.")
        if self.epsilon < 0:
            raise InputError(f"Adam needs epsilon >= 0; got {self.epsilon}.")

    def init_state(self, theta: Tensor) -> Tree:
        zero = torch.zeros_like(theta)
        return {"mean": zero, "square": zero, "count": torch.zeros_like(theta[..., :1])}

    def step(
        self, theta: Tensor, gradient: Tensor, state: Tree, lr: Tensor | float
    ) -> tuple[Tensor, Tree]:
        gradient = self.prepare(theta, gradient)
        count = state["count"] + 1
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * gradient
        square = self.beta2 * state["square"] + (1 - self.beta2) * gradient**2
        scale = torch.sqrt(square / (1 - self.beta2**count)) + self.epsilon
        theta = theta - lr * (mean / (1 - self.beta1**count)) / scale
        return theta, {"mean": mean, "square": square, "count": count}
