"""What a federated method is: what a client does with a mode, and what the server does with the
answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree, payload_bytes
from ..modeling.server_context import ServerContext
from ..registry import Registry
from .hyperparameters import check_hyperparameters
from .optimizer import SGD, Optimizer
from .problem import LocalProblem
from .types import Cohort

algorithms: Registry[type[Algorithm]] = Registry("algorithm", lambda: Algorithm)


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A federated method as arithmetic on models.

    Everything it touches has shape [..., P]: the leading dimensions are whoever is being processed
    (none on a single client, J visits in a batch, K modes on the server), the last one is the
    flattened model. Code broadcasts over `...` and reduces only over the last dimension; then one
    definition runs on every engine.

    Args:
        lr: learning rate of local training.
        lr_decay: multiplies the rate every `lr_decay_every` rounds (the paper: 0.99 every 10; 1 is
            constant).
        lr_decay_every: rounds between two such steps.
        weighting: a mode's clients count by their "examples" (the paper's appendix) or are
            "uniform" (its remark).
        optimizer: the local optimiser.
    """

    reference: ClassVar[str] = ""  # who described it first
    # what travels up and down, for people; left empty, the names of the tensors are shown
    sends: ClassVar[str] = ""
    # its paper assumes that all clients take part in every round
    full_participation: ClassVar[bool] = False
    plain_sgd: ClassVar[bool] = False  # its equations hold for local SGD without momentum only
    # its server learns from unlabelled inputs of its own, the data's `x_server`
    distils: ClassVar[bool] = False
    # its server needs what each client sent: `cohort.members`, not means alone
    gathers: ClassVar[bool] = False
    # its uploads are rounded or sparse: a median by coordinate is zero
    quantised: ClassVar[bool] = False

    lr: float = 0.1
    lr_decay: float = 1.0
    lr_decay_every: int = 10
    weighting: Literal["examples", "uniform"] = "examples"
    optimizer: Optimizer = SGD()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_hyperparameters(self)
        if not self.lr > 0:
            raise InputError(f"{owner} needs lr > 0; got {self.lr}.")
        if not 0 < self.lr_decay <= 1 or self.lr_decay_every < 1:
            raise InputError(
                f"{owner} needs 0 < lr_decay <= 1 and lr_decay_every >= 1; "
                f"got {self.lr_decay} and {self.lr_decay_every}."
            )
        if self.weighting not in ("examples", "uniform"):
            raise InputError(
                f"{owner} needs weighting 'examples' or 'uniform'; got {self.weighting!r}."
            )
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(
                f"{owner} needs an optimizer such as SGD() or Adam(); got {self.optimizer!r}."
            )
        if self.plain_sgd and (not isinstance(self.optimizer, SGD) or self.optimizer.momentum > 0):
            raise InputError(f"{owner} needs local SGD without momentum; got {self.optimizer!r}.")

    def rate(self, round: int) -> float:
        """The learning rate in a round (counted from 0)."""
        return self.lr * self.lr_decay ** (round // self.lr_decay_every)

    @property
    def assumes_full_participation(self) -> bool:
        """Whether the method, with these settings, relies on all clients taking part in every
        round.
        """
        return self.full_participation

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the server does its work."""
        return ()

    def bind(self, workshop: ServerContext) -> Self:
        """The method with what its server may use; called once, before `init_mode`. Raises if it
        cannot work there.
        """
        return self

    def init_mode(self, theta: Tensor) -> Tree:
        """Server state of modes with weights `theta`; "theta" is always in it."""
        return {"theta": theta}

    def check_state(self, mode: Tree) -> None:  # noqa: B027 (most methods never changed what they keep)
        """Raises StoreError if server state from a file cannot be continued, such as that of an
        earlier version.
        """

    def init_memory(self, theta: Tensor) -> Tree:
        """What a client keeps for a mode before it first trains it; empty for most methods."""
        return {}

    def predictors(self, mode: Tree) -> Tensor:
        """The models whose predictions a mode averages, [K, S, P]; one, its own, for most
        methods.
        """
        return mode["theta"].unsqueeze(-2)

    def broadcast(self, mode: Tree) -> Tree:
        """What travels down to a client."""
        return {"theta": mode["theta"]}

    def upload_bytes(self, uploads: Tree, coin: Tensor, sent: Tree | None = None) -> int | Tensor:
        """Bytes of what one client sends; methods that compress give the length of their encoding.

        A method whose messages differ between visits returns int64 [..., 1] in place of one number.
        An override may leave out the last argument.

        Args:
            uploads: their shapes and types count, not their values, [..., P].
            coin: the round's, on the CPU, [..., 1].
            sent: what the client received, [..., P]; None asks for the size of an ordinary message.
        """
        return payload_bytes(uploads)

    def download_bytes(self, sent: Tree, coin: Tensor, memory: Tree | None = None) -> int | Tensor:
        """Bytes of what one client receives; returns as `upload_bytes` does. An override may leave
        out `memory`.

        Args:
            sent: what is broadcast, [..., P].
            coin: the round's, on the CPU, [..., 1].
            memory: what the client keeps for the mode, [..., P]; None asks for the size of an
                ordinary message, to a client that has missed nothing.
        """
        return payload_bytes(sent)

    def encode(self, uploads: Tree, coin: Tensor) -> Tree:
        """What one client's message carries, [P] each: the uploads as they are, or their encoding
        in bytes (uint8).
        """
        return uploads

    def decode(self, message: Tree, like: Tree, coin: Tensor) -> Tree:
        """The uploads that `encode` was given; `like` has their names, shapes and types."""
        return message

    @abstractmethod
    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        """What a client sends up, and its new memory."""

    @abstractmethod
    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """The new server state, from the weighted mean of what a mode's clients sent."""
