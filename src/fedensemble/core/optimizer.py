"""What a client steps with: SGD and Adam on vectors [..., P], fresh in every round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree
from ..registry import Registry
from .hyperparameters import LARGEST, check_hyperparameters

optimizers: Registry[type[Optimizer]] = Registry("optimizer", lambda: Optimizer)


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """A rule from gradients to steps, without state of its own: slots go in and come out.

    Args:
        weight_decay: adds `weight_decay * theta` to the gradient (L2).
        clip: gradients longer than this are shortened to it; 0 never clips.
    """

    weight_decay: float = 0.0
    clip: float = 0.0

    def __post_init__(self) -> None:
        check_hyperparameters(self)
        for name in ("weight_decay", "clip"):
            if getattr(self, name) < 0:
                raise InputError(
                    f"{type(self).__name__} needs {name} >= 0; got {getattr(self, name)}."
                )
        if self.clip > LARGEST:
            raise InputError(
                f"{type(self).__name__} needs clip <= {LARGEST:.3g}; got {self.clip}. 0 never clips."
            )

    @abstractmethod
    def slots(self, theta: Tensor) -> Tree:
        """Slots before the first step, each shaped like `theta`, [..., P], or [..., 1]."""

    @abstractmethod
    def step(
        self, theta: Tensor, gradient: Tensor, slots: Tree, lr: Tensor | float
    ) -> tuple[Tensor, Tree]:
        """The next point and slots."""

    def prepare(self, theta: Tensor, gradient: Tensor) -> Tensor:
        """The gradient after clipping and weight decay."""
        if self.clip > 0:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient = gradient * (self.clip / norm.clamp(min=self.clip))
        return gradient + self.weight_decay * theta if self.weight_decay > 0 else gradient


@optimizers.register("sgd")
@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent: `v <- momentum * v + g`, `theta <- theta - lr * v`, as
    torch.optim.SGD.

    Args:
        momentum: share of the last step's direction that is kept.

    >>> SGD(momentum=0.9).step(torch.ones(2), torch.ones(2), {"velocity": torch.ones(2)}, lr=0.1)[0]
    tensor([0.8100, 0.8100])
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise InputError(f"SGD needs 0 <= momentum < 1; got {self.momentum}.")

    def slots(self, theta: Tensor) -> Tree:
        return {"velocity": torch.zeros_like(theta)} if self.momentum > 0 else {}

    def step(
        self, theta: Tensor, gradient: Tensor, slots: Tree, lr: Tensor | float
    ) -> tuple[Tensor, Tree]:
        gradient = self.prepare(theta, gradient)
        if self.momentum > 0:
            gradient = self.momentum * slots["velocity"] + gradient
            slots = {"velocity": gradient}
        if isinstance(lr, Tensor):
            # one pass over the weights, not two
            return torch.addcmul(theta, gradient, lr, value=-1), slots
        return theta - lr * gradient, slots


@optimizers.register("adam")
@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015) with bias correction, as torch.optim.Adam; the paper's choice for
    Shakespeare.

    Args:
        beta1, beta2: share of the running means of the gradient and of its square that is kept.
        epsilon: added to the root of the latter.
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

    def slots(self, theta: Tensor) -> Tree:
        zero = torch.zeros_like(theta)
        return {"mean": zero, "square": zero, "count": torch.zeros_like(theta[..., :1])}

    def step(
        self, theta: Tensor, gradient: Tensor, slots: Tree, lr: Tensor | float
    ) -> tuple[Tensor, Tree]:
        gradient = self.prepare(theta, gradient)
        count = slots["count"] + 1
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * gradient
        square = self.beta2 * slots["square"] + (1 - self.beta2) * gradient**2
        scale = torch.sqrt(square / (1 - self.beta2**count)) + self.epsilon
        theta = theta - lr * (mean / (1 - self.beta1**count)) / scale
        return theta, {"mean": mean, "square": square, "count": count}
